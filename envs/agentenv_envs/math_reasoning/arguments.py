"""Checks of arguments that may come from a command line as JSON."""

import math
from typing import Any

from agentenv.errors import UsageError

__all__ = ["check_number", "check_text", "check_whole"]


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Refuse what is no whole number from `low` to `high`.

    Raises:
        UsageError: naming argument, value and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; it has to be a whole number from {low} to {high}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no number above `low` and at most `high`; NaN is none.

    Raises:
        UsageError: naming argument, value and what is allowed.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or math.isnan(value) or not low < value <= high:
        raise UsageError(f"{name} is {value!r}; it has to be a number above {low:g} and at most {high:g}")


def check_text(name: str, value: Any) -> None:
    """Refuse what is neither a string with something in it nor None.

    Raises:
        UsageError: naming argument, value and what is allowed.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{name} is {value!r}; it has to be text, or None")
