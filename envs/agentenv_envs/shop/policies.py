"""Baselines: one knows what to buy, one compares attributes, one takes the first match, and one clicks by chance.

Invariants:
- The oracle plays through the pages like anybody else: what it knows is the product that the wish was made from.
- The random policy knows the page that is open and the words of the first observation; the
  scripted and the careful one read observations and nothing else.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any, Final

from .env import ShopEnv
from .reward import wished_values
from .search import tokens
from .session import BUY

__all__ = ["Careful", "Oracle", "Random", "Scripted"]

_PRODUCT: Final = re.compile(r"^(\S+) \| .* \| ([\d.]+)$", re.MULTILINE)
_OPTION: Final = re.compile(r"^(?!Chosen:|Buttons:|Shopper:|Wish:)([^:|\n]+): (.*)$", re.MULTILINE)
_PRICE: Final = re.compile(r" \([\d.]+\)$")
_ATTRIBUTES: Final = re.compile(r"Attributes of (\S+): (.*)")
_LOOKS: Final = 5
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


class Oracle:
    """Searches the wished product by its title, pages on to it, chooses the wished options and buys.

    Args:
        env: a shop, maybe wrapped; it looks into it.
        seed: of no use here.
    """

    def __init__(self, env: Any, seed: int) -> None:
        self._env: ShopEnv = env.unwrapped
        del seed

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Take note of an episode's start."""
        del observation, info

    def act(self, observation: str) -> str:
        """The next action."""
        del observation
        env, session = self._env, self._env.session
        target = env.catalogue.products[env.catalogue.places[env.task.product_id]]
        if session.product == target:
            for axis, value in wished_values(env.task.options, target).items():
                if session.chosen.get(axis) != value:
                    return f"click[{self._button(axis, value)}]"
            return f"click[{BUY}]"
        if target in session.shown:
            return f"click[{target.id}]"
        if "next page" in session.buttons():
            return "click[next page]"
        return f"search[{target.title}]"

    def _button(self, axis: str, value: str) -> str:
        """The name that only this value of this axis has."""
        full = f"{axis}: {value}"
        return full if full in self._env.session.buttons() else value


class Random:
    """Searches words of the wish and clicks what there is, all by chance.

    Args:
        env: a shop, maybe wrapped.
        seed: where chance comes from.
    """

    def __init__(self, env: Any, seed: int) -> None:
        self._env: ShopEnv = env.unwrapped
        self._rng = random.Random(seed)
        self._words: list[str] = []

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Take note of the words of the wish."""
        del info
        self._words = tokens(observation.partition("Wish:")[2]) or ["a"]

    def act(self, observation: str) -> str:
        """A button of the page or a search, evenly."""
        del observation
        session = self._env.session
        offered = [f"click[{button}]" for button in session.buttons()]
        if session.can_search:
            count = min(len(self._words), self._rng.randint(1, 4))
            offered.append(f"search[{' '.join(self._rng.sample(self._words, count))}]")
        if self._env.multi_turn and self._rng.random() < 0.1:
            return "ask[What else?]"
        return self._rng.choice(offered)


class Scripted:
    """A fixed strategy without the answer: ask until nothing is left, search what was heard, open the first product
    that keeps within the budget, choose the options that were named, buy. It never looks at a product's attributes.

    Args:
        env: of no use here.
        seed: of no use here.
    """

    def __init__(self, env: Any, seed: int) -> None:
        del env, seed
        self._heard = ""
        self._asking = False
        self._chosen: set[str] = set()

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Take note of the wish, and of who has it."""
        del info
        _, _, self._heard = observation.partition("\n")
        self._heard = self._heard.rpartition("\n")[0]
        self._asking = "ask[" in observation
        self._chosen = set()

    def act(self, observation: str) -> str:
        """The next action."""
        if self._asking:
            last = observation.partition("Shopper: ")[2] if observation.startswith("Shopper: ") else ""
            if last and last not in self._heard:
                self._heard = f"{self._heard} {last}"
            elif last:
                self._asking = False
            if self._asking:
                return "ask[Anything else?]"
        products = _PRODUCT.findall(observation)
        if observation.startswith("Results"):
            fitting = [id for id, price in products if float(price) <= self._budget()]
            return f"click[{(fitting or [products[0][0]])[0]}]"
        if products:
            for axis, values in _OPTION.findall(observation):
                for value in values.split(" / "):
                    value = _PRICE.sub("", value)
                    if axis not in self._chosen and _said(value, self._heard):
                        self._chosen.add(axis)
                        return f"click[{axis}: {value}]"
            return f"click[{BUY}]"
        return f"search[{' '.join(tokens(self._heard))}]"

    def _budget(self) -> float:
        """The highest number that was heard: sizes are smaller, as a rule."""
        return max(map(float, _NUMBER.findall(self._heard)), default=math.inf)


class Careful(Scripted):
    """`Scripted` with a look at the attributes of the first five products within the budget: it buys the one of which
    the most attributes and options were named.

    Args:
        env: of no use here.
        seed: of no use here.
    """

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Take note of the wish, and forget the products of the last one."""
        super().begin(observation, info)
        self._to_see: list[str] | None = None
        self._marks: dict[str, int] = {}
        self._buying = False

    def act(self, observation: str) -> str:
        """The next action."""
        attributes = _ATTRIBUTES.match(observation)
        if attributes is not None:
            self._marks[attributes[1]] += sum(
                _said(value, self._heard) for value in attributes[2].split(", ")
            )
            return "click[back to product]"
        products = _PRODUCT.findall(observation)
        if self._asking or self._buying or not products:
            return super().act(observation)
        if observation.startswith("Results"):
            if self._to_see is None:
                fitting = [id for id, price in products if float(price) <= self._budget()]
                self._to_see = (fitting or [products[0][0]])[:_LOOKS]
            if self._to_see:
                return f"click[{self._to_see.pop(0)}]"
            self._buying = True
            return f"click[{max(self._marks, key=lambda id: self._marks[id])}]"
        id = products[0][0]
        if id in self._marks:
            return "click[back to results]"
        named = [values for _, values in _OPTION.findall(observation) if self._named(values)]
        self._marks[id] = len(named)
        return "click[attributes]"

    def _named(self, values: str) -> bool:
        return any(_said(_PRICE.sub("", value), self._heard) for value in values.split(" / "))


def _said(value: str, text: str) -> bool:
    """Whether a text has all words of a value, next to each other."""
    return f" {' '.join(tokens(value))} " in f" {' '.join(tokens(text))} "
