"""Baselines: one that knows what to buy, and one that does what the page offers, by chance.

Invariants:
- The oracle plays through the pages like anybody else: what it knows is the product that the wish was made from.
- The random policy knows the page that is open and the words of the first observation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from .env import ShopEnv
from .records import Product
from .reward import matches
from .search import tokens
from .session import BUY

__all__ = ["Oracle", "Random"]


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
            for axis, value in self._choices(target):
                if session.chosen.get(axis) != value:
                    return f"click[{self._button(axis, value)}]"
            return f"click[{BUY}]"
        if target in session.shown:
            return f"click[{target.id}]"
        if "next page" in session.buttons():
            return "click[next page]"
        return f"search[{target.title}]"

    def _choices(self, target: Product) -> list[tuple[str, str]]:
        """Of each axis the value that the wish asks for, if it does."""
        wanted = [need.value for need in self._env.task.options]
        chosen: list[tuple[str, str]] = []
        for option in target.options:
            exact = [value for value in option.values if value in wanted]
            close = [value for value in option.values if any(matches(want, value) for want in wanted)]
            chosen += [(option.axis, value) for value in (exact or close)[:1]]
        return chosen

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
