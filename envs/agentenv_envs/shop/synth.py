"""A shop made up from `words`: near-identical goods, and wishes that exactly one of them meets.

Invariants:
- A kind of goods has 120 variants that depend on language and kind alone, so the same wishes come with any size of
  catalogue.
- A wish is kept only if no second product can be bought in any way that scores success (`compat="fixed"`).
- Splits share no wish. A hash of the kind keeps one kind in five for `heldout_leaves`; of the others' wishes, a hash
  keeps one in five for `heldout`.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from agentenv.errors import UsageError

from .phrases import Phrases, phrases
from .records import Need, Option, Product, Task
from .reward import attribute_hit, matches
from .words import LANGUAGES, Axis, Domain, colours, domains

__all__ = ["CATALOGUE_LANGUAGES", "VARIANTS", "Kind", "SyntheticTasks", "kinds_of", "make_products"]

VARIANTS: Final = 120
CATALOGUE_LANGUAGES: Final = (*LANGUAGES, "mixed")
_SHARE: Final = 5
"""One in five is held out, of the kinds and of the wishes."""
_SIZED_STEPS: Final = (1.0, 1.25, 1.5, 1.9)
"""Price of the option's values over the cheapest one's."""
_SYLLABLES: Final = {
    "en": (
        "ve",
        "lo",
        "ra",
        "mi",
        "tu",
        "ska",
        "nor",
        "bel",
        "qui",
        "dan",
        "fe",
        "zo",
        "pri",
        "hal",
        "wen",
        "ost",
    ),
    "zh": ("岚", "沐", "禾", "砚", "澄", "朔", "屿", "棠", "黎", "筑", "蔚", "珂", "湛", "栖", "翊", "芷"),
}


class Kind(NamedTuple):
    """A kind of goods."""

    language: str
    domain: int
    good: int

    @property
    def words(self) -> Domain:
        """Its department."""
        return domains(self.language)[self.domain]

    @property
    def category(self) -> tuple[str, ...]:
        """Department and kind."""
        return (self.words.name, self.words.goods[self.good])

    @property
    def held_out(self) -> bool:
        """Whether all its wishes belong to `heldout_leaves`."""
        return _hash(f"{self.language}:{self.domain}:{self.good}") % _SHARE == 0


def kinds_of(language: str, products: int) -> tuple[Kind, ...]:
    """The kinds of a catalogue, department after department in turn.

    Args:
        language: "en", "zh", or "mixed", which takes both in turn.
        products: wanted; rounded up to whole kinds.

    Raises:
        UsageError: an unknown language, or more products than there are.
    """
    if language not in CATALOGUE_LANGUAGES:
        raise UsageError(f"language must be one of {', '.join(CATALOGUE_LANGUAGES)}, got {language!r}")
    languages = LANGUAGES if language == "mixed" else (language,)
    every = [
        Kind(each, domain, good)
        for good in range(len(domains("en")[0].goods))
        for domain in range(len(domains("en")))
        for each in languages
    ]
    most = len(every) * VARIANTS
    if isinstance(products, bool) or not isinstance(products, int) or not 1 <= products <= most:
        raise UsageError(
            f"products must be a whole number from 1 to {most} with language={language!r}, got {products!r}"
        )
    return tuple(every[: math.ceil(products / VARIANTS)])


def make_products(kind: Kind) -> list[Product]:
    """The variants of a kind."""
    rng = random.Random(f"shop-products:{kind.language}:{kind.domain}:{kind.good}")
    words, language = kind.words, kind.language
    category = kind.category
    base = rng.uniform(15.0, 220.0)
    brands = [_brand(rng, language) for _ in range(9)]
    made: list[Product] = []
    for variant in range(VARIANTS):
        brand = rng.choice(brands)
        attributes = tuple(rng.choice(axis.values) for axis in words.axes)
        price = round(base * rng.uniform(0.7, 1.5), 1)
        sized = _some(rng, words.sized, 2, 4)
        colour = _some(rng, colours(language), 3, 5)
        prices = tuple(round(price * _SIZED_STEPS[words.sized.values.index(value)], 1) for value in sized)
        shown = sorted(rng.sample(range(len(attributes)), 2))
        title = phrases(language).title(
            brand,
            category[1],
            [attributes[place] for place in shown],
            f"{chr(65 + variant // 10)}{variant % 10}",
        )
        made.append(
            Product(
                id=f"{language}{kind.domain:02d}{kind.good:02d}{variant:03d}".upper(),
                title=title,
                shop=phrases(language).shop(brand),
                category=category,
                attributes=attributes,
                price=min(prices),
                price_high=max(prices),
                options=(
                    Option(colours(language).name, colour, _no_prices(len(colour))),
                    Option(words.sized.name, sized, prices),
                ),
            )
        )
    return made


@dataclass(frozen=True, slots=True)
class _Wish:
    """What was drawn, before it has words."""

    variant: int
    attributes: tuple[int, ...]
    """Axes that are wished for, as the variant has them."""
    colour: str | None
    sized: str | None
    cap: int


class _Table:
    """Which variants of a kind can meet which need; for the search for a second one."""

    def __init__(self, kind: Kind) -> None:
        import numpy as np

        self.products = make_products(kind)
        values = [value for axis in kind.words.axes for value in axis.values]
        self._hits = {
            value: np.array([attribute_hit(value, product) for product in self.products]) for value in values
        }
        self._prices: dict[str, Any] = {}
        for axis in (colours(kind.language), kind.words.sized):
            for value in axis.values:
                self._prices[value] = np.array([_least_price(product, value) for product in self.products])
        self._least = np.array([product.price for product in self.products])

    def num_meeting(self, wish: _Wish) -> int:
        """How many variants, bought in the cheapest way that has the wished values, score success."""
        import numpy as np

        attributes = self.products[wish.variant].attributes
        good = np.logical_and.reduce([self._hits[attributes[axis]] for axis in wish.attributes])
        chosen = [self._prices[value] for value in (wish.colour, wish.sized) if value is not None]
        price = np.maximum.reduce([self._least, *chosen])
        return int(np.count_nonzero(good & (price <= wish.cap)))


class SyntheticTasks:
    """The wishes of a synthetic catalogue, drawn from a seed.

    Args:
        kinds: what the catalogue holds.
    """

    splits: tuple[str, ...] = ("train", "heldout", "heldout_leaves")

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        self._kinds = {
            split: tuple(kind for kind in kinds if kind.held_out == (split == "heldout_leaves"))
            for split in self.splits
        }
        self._tables: dict[Kind, _Table] = {}

    def check_split(self, split: str, *, persona: bool) -> None:
        """Refuse an unknown split, and one that this catalogue has nothing for.

        Raises:
            UsageError: it is one of these.
        """
        if split not in self.splits:
            raise UsageError(f"split must be one of {', '.join(self.splits)}, got {split!r}")
        if not self._kinds[split]:
            raise UsageError(f"split {split!r} has no kind of goods in so small a catalogue: raise products")

    def draw(self, seed: int, split: str, *, persona: bool) -> Task:
        """The wish of a seed; each one has a persona."""
        rng = random.Random(f"shop-task:{seed}")
        kinds = self._kinds[split]
        while True:
            kind = rng.choice(kinds)
            table = self._table(kind)
            wish = _draw(rng, table.products)
            digest = _hash(f"{kind}:{wish}")
            if split != "heldout_leaves" and (digest % _SHARE == 0) != (split == "heldout"):
                continue
            # Nothing is drawn from `rng` for the words: the wish alone decides them.
            if table.num_meeting(wish) == 1:
                return _task(kind, table.products[wish.variant], wish, digest)

    def _table(self, kind: Kind) -> _Table:
        # Two threads may make the same one; either will do.
        if kind not in self._tables:
            self._tables[kind] = _Table(kind)
        return self._tables[kind]


def _draw(rng: random.Random, products: list[Product]) -> _Wish:
    variant = rng.randrange(len(products))
    product = products[variant]
    colour, sized = product.options
    count = rng.choices((2, 3, 4), (3, 5, 2))[0]
    attributes = tuple(sorted(rng.sample(range(len(product.attributes)), count)))
    wants = rng.choices(("both", "colour", "sized"), (6, 2, 2))[0]
    tint = rng.choice(colour.values) if wants != "sized" else None
    size = rng.choice(sized.values) if wants != "colour" else None
    price = sized.price(size) if size is not None else product.price
    assert price is not None
    return _Wish(variant, attributes, tint, size, math.ceil(price * rng.uniform(1.0, 1.2)))


def _task(kind: Kind, product: Product, wish: _Wish, digest: int) -> Task:
    words, language = kind.words, kind.language
    attributes = tuple(Need(words.axes[axis].name, product.attributes[axis]) for axis in wish.attributes)
    options = tuple(
        Need(option.axis, value)
        for option, value in zip(product.options, (wish.colour, wish.sized), strict=True)
        if value is not None
    )
    rng = random.Random(digest)
    say: Phrases = phrases(language)
    return Task(
        id=f"shop-{language}-{digest:012x}",
        product_id=product.id,
        category=product.category,
        instruction=say.instruction(rng, product.leaf, attributes, options, wish.cap),
        request=say.request(rng, product.leaf),
        attributes=attributes,
        options=options,
        price_cap=float(wish.cap),
        persona=say.persona(rng, attributes, _elsewhere(rng, kind)),
        language=language,
    )


def _elsewhere(rng: random.Random, kind: Kind) -> list[tuple[str, str]]:
    """Habits about other departments, which are beside the point."""
    others = [domain for place, domain in enumerate(domains(kind.language)) if place != kind.domain]
    habits = []
    for domain in rng.sample(others, 2):
        axis = rng.choice(domain.axes)
        habits.append((domain.name, rng.choice(axis.values)))
    return habits


def _least_price(product: Product, value: str) -> float:
    """Of the ways to buy the product that have this value, the cheapest; infinite where it is not for sale."""
    least = math.inf
    for option in product.options:
        for offered, price in zip(option.values, option.prices, strict=True):
            if matches(value, offered):
                least = min(least, product.price if price is None else price)
    return least


def _brand(rng: random.Random, language: str) -> str:
    count = rng.choice((2, 3)) if language == "en" else 2
    name = "".join(rng.sample(_SYLLABLES[language], count))
    return name.capitalize()


def _some(rng: random.Random, axis: Axis, low: int, high: int) -> tuple[str, ...]:
    """Some of the values, in their order."""
    picks = sorted(rng.sample(range(len(axis.values)), rng.randint(low, high)))
    return tuple(axis.values[pick] for pick in picks)


@cache
def _no_prices(count: int) -> tuple[None, ...]:
    return (None,) * count


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
