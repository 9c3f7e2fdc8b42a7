"""How well a purchase answers a wish: three rewards over the same four marks.

    loose   = r_type * (hitA + hitO + [price <= cap]) / (|A| + |O| + 1)
    strict  = r_type * (hitA / |A|) * (hitO / |O|) * [price <= cap]
    success = r_type, hitA / |A|, hitO / |O| and [price <= cap] are all 1

Source: ShopSimulator, arXiv 2601.18225; training on strict is better there. A share of nothing is 1.

Invariants:
- loose, strict and success are in [0, 1], success is 0 or 1, and success = 1 exactly where strict = 1.
- r_type is 1 for the right kind of goods and 0.5 for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, cast

from agentenv.errors import MissingExtraError

from .records import Need, Product, Task

__all__ = ["REWARDS", "Score", "attribute_hit", "matches", "score", "wished_values"]

REWARDS: Final = ("strict", "loose", "success")
_THRESHOLD: Final = 85.0
"""A token-set ratio above it is a hit."""
_WRONG_KIND: Final = 0.5


@dataclass(frozen=True, slots=True)
class Score:
    """The marks of one purchase."""

    r_type: float
    attribute_hits: int
    attributes: int
    """How many were wanted."""
    option_hits: int
    options: int
    """How many were wanted."""
    price_ok: bool

    @property
    def attribute_share(self) -> float:
        """hitA / |A|."""
        return self.attribute_hits / self.attributes if self.attributes else 1.0

    @property
    def option_share(self) -> float:
        """hitO / |O|."""
        return self.option_hits / self.options if self.options else 1.0

    @property
    def strict(self) -> float:
        """Every mark is a bottleneck."""
        return self.r_type * self.attribute_share * self.option_share * self.price_ok

    @property
    def loose(self) -> float:
        """The marks' mean, over needs."""
        hits = self.attribute_hits + self.option_hits + self.price_ok
        return self.r_type * hits / (self.attributes + self.options + 1)

    @property
    def success(self) -> float:
        """1.0 where all marks are 1."""
        return float(self.strict == 1.0)

    def reward(self, kind: str) -> float:
        """One of `REWARDS`."""
        return cast("float", getattr(self, kind))


def score(
    task: Task, product: Product, chosen: Collection[str], price: float, *, r_type: float | None = None
) -> Score:
    """Mark a purchase.

    Args:
        task: the wish.
        product: what was bought.
        chosen: values of its options.
        price: what it cost.
        r_type: overrides that of `kind_mark`.

    Raises:
        MissingExtraError: rapidfuzz is not installed.
    """
    return Score(
        r_type=kind_mark(task, product) if r_type is None else r_type,
        attribute_hits=sum(attribute_hit(need.value, product) for need in task.attributes),
        attributes=len(task.attributes),
        option_hits=sum(option_hit(need, chosen) for need in task.options),
        options=len(task.options),
        price_ok=price <= task.price_cap,
    )


def kind_mark(task: Task, product: Product) -> float:
    """1 for the same kind of goods (the whole category is equal), 0.5 for another."""
    return 1.0 if product.category == task.category else _WRONG_KIND


def attribute_hit(wanted: str, product: Product) -> bool:
    """One of the product's attributes matches, or its title or an attribute holds the words as they stand."""
    if any(matches(wanted, attribute) for attribute in product.attributes):
        return True
    text = wanted.casefold()
    return text in product.title.casefold() or any(
        text in attribute.casefold() for attribute in product.attributes
    )


def wished_values(options: Collection[Need], product: Product) -> dict[str, str]:
    """Of each axis of a product the value that is wished for, if one is: the very one before one that matches."""
    axes = {option.axis for option in product.options}
    chosen: dict[str, str] = {}
    for option in product.options:
        # A need of another axis of this product is not meant; one without an axis may be.
        wanted = [need.value for need in options if need.axis == option.axis or need.axis not in axes]
        exact = [value for value in option.values if value in wanted]
        close = exact or [value for value in option.values if any(matches(want, value) for want in wanted)]
        if close:
            chosen[option.axis] = close[0]
    return chosen


def option_hit(need: Need, chosen: Collection[str]) -> bool:
    """One of the chosen values matches."""
    return any(matches(need.value, value) for value in chosen)


@lru_cache(maxsize=65_536)
def matches(wanted: str, offered: str) -> bool:
    """The token-set ratio of the two, in lower case and without punctuation, is above 85.

    A text whose every word is in the other one has a ratio of 100: "steel" and "brushed steel" match.

    Raises:
        MissingExtraError: rapidfuzz is not installed.
    """
    ratio, process = _rapidfuzz()
    return ratio(process(wanted), process(offered)) > _THRESHOLD


@cache
def _rapidfuzz() -> tuple[Callable[[str, str], float], Callable[[str], str]]:
    try:
        from rapidfuzz.fuzz import token_set_ratio
        from rapidfuzz.utils import default_process
    except ImportError as error:
        raise MissingExtraError("rapidfuzz", "shop") from error
    return token_set_ratio, default_process
