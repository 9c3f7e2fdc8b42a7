"""What the embedded policy of the ShopSimulator is shown: visits to a small shop with short pages.

The demonstrator knows the product that a wish was made from, but opens others too, looks at attributes only at times,
forgets options, and slips. What it does for no visible reason a policy can imitate only as often as it happens: it
learns how likely each product is.

Invariant: every page is the environment's own, in the training split, with the recipe's settings.
"""

import argparse
import functools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import (
    READ_WEIGHT,
    Course,
    Demonstrations,
    Phase,
    Row,
    byte_level,
    measured,
    play,
    special_tokens,
    with_chat_template,
)

import agentenv
from agentenv_envs.shop.env import ShopEnv
from agentenv_envs.shop.records import Product
from agentenv_envs.shop.session import BUY, MOST_RESULTS
from agentenv_envs.shop.synth import VARIANTS

__all__ = ["COURSE"]

ENV_ID: Final = "ShopSimulator-SingleTurn-v0"
OPTIONS: Final[dict[str, Any]] = {"products": 360, "page_size": 4, "max_turns": 10}
"""As recipes/shop_sao.py sets them for the embedded policy."""
_WISH: Final = "\nWish: "


@dataclass(frozen=True)
class Skill:
    """Chances of the demonstrator.

    Args:
        search: to search all that was wished for.
        open: to open the wished product where the page shows it.
        check: to look at the attributes of a product.
        reject: to leave a product that turned out wrong.
        option: to choose a wished value.
        slip: to write what the page does not have, so that a policy sees how that is answered.
    """

    search: float
    open: float
    check: float
    reject: float
    option: float
    slip: float


READING: Final = Skill(search=0.85, open=0.8, check=0.6, reject=0.95, option=0.9, slip=0.08)
MEDIOCRE: Final = Skill(search=0.7, open=0.7, check=0.35, reject=0.7, option=0.75, slip=0.08)


def open_shop(split: str = "train") -> ShopEnv:
    """The environment."""
    shop = agentenv.make(ENV_ID, split=split, **OPTIONS).unwrapped
    assert isinstance(shop, ShopEnv)
    return shop


class Demonstrator:
    """One visit.

    Args:
        shop: after its reset.
        skill: of the demonstrator.
        rng: of chance.
    """

    def __init__(self, shop: ShopEnv, skill: Skill, rng: random.Random) -> None:
        self.shop, self.skill, self.rng = shop, skill, rng
        self.task = shop.task
        self.target: Product = shop.catalogue.products[shop.catalogue.places[self.task.product_id]]
        self.looked: set[str] = set()
        self.rejected: set[str] = set()

    def act(self) -> tuple[str, bool]:
        """The next action, and whether it is a good one."""
        buttons = self.shop.session.buttons()
        if self.rng.random() < self.skill.slip:
            return self._slip(), False
        if "back to product" in buttons:
            return "click[back to product]", True
        if BUY in buttons:
            return self._at_product()
        if self.shop.session.shown:
            return self._at_results("next page" in buttons)
        return self._search()

    def _search(self) -> tuple[str, bool]:
        words = [self.task.category[1]]
        words += [need.value for need in (*self.task.attributes, *self.task.options)]
        if self.rng.random() < self.skill.search:
            return f"search[{', '.join(words)}]", True
        return f"search[{', '.join(words[: self.rng.randint(1, 2)])}]", False

    def _at_results(self, has_next: bool) -> tuple[str, bool]:
        shown = [product for product in self.shop.session.shown if product.id not in self.rejected]
        is_there = self.target in shown
        if is_there and self.rng.random() < self.skill.open:
            return f"click[{self.target.id}]", True
        fitting = [product for product in shown if product.price <= self.task.price_cap]
        if fitting and self.rng.random() < 0.7:
            most = max(map(self._named, fitting))
            looks_right = [product for product in fitting if self._named(product) == most]
            return f"click[{self.rng.choice(looks_right).id}]", True
        if shown and (not has_next or self.rng.random() < 0.3):
            return f"click[{self.rng.choice(shown).id}]", False
        return ("click[next page]", not is_there) if has_next else self._search()

    def _named(self, product: Product) -> int:
        """Wished attributes in its title."""
        return sum(need.value in product.title for need in self.task.attributes)

    def _slip(self) -> str:
        product = self.rng.choice(self.shop.catalogue.products)
        value = self.rng.choice(self.rng.choice(product.options).values)
        slips = (product.id, f"click[{product.id}]", f"click[{value}]", f"click[{BUY}]", "search[]")
        return self.rng.choice(slips)

    def _at_product(self) -> tuple[str, bool]:
        session, rng = self.shop.session, self.rng
        product = session.product
        assert product is not None
        if product.id not in self.looked:
            self.looked.add(product.id)
            offered = {value for option in product.options for value in option.values}
            lacks = any(need.value not in offered for need in self.task.options)
            if lacks or product.price > self.task.price_cap:
                self.rejected.add(product.id)
            elif rng.random() < self.skill.check:
                if product != self.target:
                    self.rejected.add(product.id)
                return "click[attributes]", True
        if product.id in self.rejected and rng.random() < self.skill.reject:
            return "click[back to results]", True
        good = product == self.target
        for need in self.task.options:
            values = {option.axis: option.values for option in product.options}.get(need.axis, ())
            if need.axis in session.chosen or need.value not in values:
                continue
            if rng.random() < self.skill.option:
                return f"click[{need.value}]", good
            if rng.random() < 0.5:
                return f"click[{BUY}]", False
            return f"click[{rng.choice(values)}]", False
        return f"click[{BUY}]", good


class Visits(Demonstrations):
    """Tokenised visits of one phase."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, phase: Phase, *, seed: int) -> None:
        self.imitate_wrong = phase == "mediocre"
        super().__init__(tokenizer, random.Random(f"demonstrations:{seed}:{self.imitate_wrong}"))
        self.skill = MEDIOCRE if self.imitate_wrong else READING
        self.shop = open_shop()

    def one(self) -> Row:
        """Token ids and loss weights: 1 on imitated actions, a little on what is only read."""
        ids: list[int] = []
        weights: list[float] = []
        for observation, action, right in visit(self.shop, self.skill, self.rng):
            heard, said = self.heard(observation), self.said(action)
            ids += heard + said
            weights += [READ_WEIGHT] * len(heard)
            weights += [1.0 if right or self.imitate_wrong else 0.0] * len(said)
        return ids, weights


def visit(shop: ShopEnv, skill: Skill, rng: random.Random) -> Iterator[tuple[str, str, bool]]:
    """Observation, action and whether it was a good one, of each turn."""
    observation, _ = shop.reset(seed=rng.randrange(2**31))
    demonstrator, ended = Demonstrator(shop, skill, rng), False
    while not ended:
        action, right = demonstrator.act()
        yield observation, action, right
        observation, _, terminated, truncated, _ = shop.step(action)
        ended = terminated or truncated


def build_tokenizer(seed: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over what is left of visits beside whole tokens: values, and what pages say again and again."""
    shop = open_shop()
    first, _ = shop.reset(seed=seed)
    whole = [f"{first.partition(_WISH)[0]}{_WISH}", *_parts_of_pages(shop.catalogue.products)]
    values = {product.leaf for product in shop.catalogue.products}
    for product in shop.catalogue.products:
        values |= {*product.attributes, *(value for option in product.options for value in option.values)}
    added = [AddedToken(text, normalized=False) for text in dict.fromkeys(whole)]
    added += [AddedToken(text, normalized=False, single_word=True) for text in sorted(values - set(whole))]
    special = special_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added) - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(f"corpus:{seed}")
    texts = (text for _ in range(300) for turn in visit(shop, MEDIOCRE, rng) for text in turn[:2])
    known = re.compile("|".join(sorted((re.escape(token.content) for token in added), key=len, reverse=True)))
    tokenizer = byte_level()
    tokenizer.train_from_iterator((part for text in texts for part in known.split(text)), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(added)
    return with_chat_template(tokenizer)


def _parts_of_pages(products: Sequence[Product]) -> Iterator[str]:
    """What stands between the values, longest pieces first where one holds another."""
    yield "\nSearch page. Write search[keywords]."
    for place in range(4):
        first = 1 + place * OPTIONS["page_size"]
        for found in (VARIANTS, MOST_RESULTS):
            yield f"Results {first}-{first + OPTIONS['page_size'] - 1} of {found} for '"
    for page in ("next page, ", "next page, prev page, ", "prev page, "):
        yield f"\nButtons: a product's id, {page}back to search"
    yield f"\nButtons: an option's value, attributes, details, back to results, back to search, {BUY}"
    yield "\nButtons: back to product, back to search"
    for product in products:
        brand, _, rest = product.title.partition(f" {product.leaf} ")
        yield product.id  # one token, to be copied in one step
        yield f" | {brand} {product.leaf} "
        yield rest.partition(",")[0]
        for option in product.options:
            yield f"\n{option.axis}: "
            yield f"\nChosen: {option.axis} "
            yield f"; {option.axis} "
            yield f", {option.axis} "
            yield f" {option.axis} "
    yield from (f".{tenth}0" for tenth in range(1, 10))
    yield from ("'\n", "Attributes of ", "Bought: ", ", for ", "search[", "click[", "]")
    yield from ("next page", "back to search", "back to results", "back to product", "attributes", BUY)
    yield from (", ", ": ", ") / ", " / ", " | ", "; ", " (", ")")


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Held-out wishes through the rollout, sampled at temperature 1 and greedily."""
    make = functools.partial(agentenv.make, ENV_ID, split="heldout", **OPTIONS)
    limits = {"max_turns": OPTIONS["max_turns"], "max_tokens_per_turn": 48, "max_tokens_per_episode": 1024}
    result = measured(play(model, tokenizer, make, episodes=args.evaluation_tasks, **limits))
    greedy = play(model, tokenizer, make, episodes=args.evaluation_tasks, greedy=True, **limits)
    return {ENV_ID: {**result, "greedy": measured(greedy)["success"]}}


COURSE = Course(
    build_tokenizer=build_tokenizer,
    lessons=Visits,
    evaluate=evaluate,
    results="heldout",
    defaults={
        "vocab_size": 1024,
        "hidden_size": 96,
        "layers": 3,
        "reading_steps": 1100,
        "mediocre_steps": 150,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "muon_learning_rate": 4e-3,
        "evaluation_tasks": 128,
    },
)
