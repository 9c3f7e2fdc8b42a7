"""What a family of problems draws: see `Draft`, and the parts that families share."""

import random
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Draft", "nonzero", "polynomial"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem before it is known which split it belongs to."""

    problem: str
    values: tuple[Fraction, ...]
    program: str
    """Prints the values; made from the problem's numbers and not from `values`."""
    key: tuple[object, ...]
    """The mathematics without the wording: drafts with equal keys are the same problem, and in the same split."""
    any_order: bool = False


def nonzero(rng: random.Random, most: int) -> int:
    """A whole number from -most to most, but not 0."""
    return rng.randint(1, most) * rng.choice((1, -1))


def polynomial(*terms: tuple[int, str]) -> str:
    """`2x^2 - x + 7` of (2, "x^2"), (-1, "x"), (7, ""): terms of coefficient 0 are left out."""
    text = ""
    for coefficient, name in terms:
        if coefficient == 0:
            continue
        size = "" if abs(coefficient) == 1 and name else str(abs(coefficient))
        sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
        text += f"{sign}{size}{name}"
    return text or "0"
