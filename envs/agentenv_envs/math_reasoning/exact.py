r"""Integers, fractions and decimals as exact values: what is compared without a computer-algebra system.

Invariants:
- values are `Fraction`: 1/3 and 0.333 are different, 1/2, 0.5 and \frac{3}{6} are the same;
- a text that is not plainly one number (or the wanted number of them) has no value: nothing is guessed;
- texts over `MAX_EXACT_CHARS` have no value, so the work is bounded.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

__all__ = ["MAX_EXACT_CHARS", "format_values", "read_values"]

MAX_EXACT_CHARS: Final = 400

_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad|~|\s+")
_TWO_NUMBERS = re.compile(r"[0-9.]\s+[0-9.]")  # which white space alone parts
_INTEGER: Final = r"[0-9]+"
_COMMAS: Final = r"[0-9]{1,3}(?:\{?,\}?[0-9]{3})+"
_NUMBER = re.compile(rf"(?:{_COMMAS}|{_INTEGER})(?:\.[0-9]+)?|\.[0-9]+")
_RATIO = re.compile(r"(.+?)/(.+)")
_FRAC = re.compile(r"\\[dtc]?frac(?:\{([^{}]*)\}|([0-9]))(?:\{([^{}]*)\}|([0-9]))")
_NAME = re.compile(r"\(?([a-z])(?:,[a-z]){0,3}\)?=(?=.)")
_SEPARATOR = re.compile(r",|;|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_WRAPPERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\left(", r"\right)"))


def read_values(text: str, count: int = 1) -> tuple[Fraction, ...] | None:
    r"""The `count` numbers that a text is made of, or None if it is anything else.

    Understood are whole numbers, also with commas between thousands; decimals; fractions as `a/b` and `\frac{a}{b}`; a
    sign; a name before the number (`x = 3`); dollars and brackets around all of it; and between several numbers `,`,
    `;`, `and` or `or`.
    """
    text = text.strip().rstrip(".")
    if not text or len(text) > MAX_EXACT_CHARS or _TWO_NUMBERS.search(text):
        return None
    for begin, end in _WRAPPERS:
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            text = text[len(begin) : -len(end)].strip()
    if count == 1:
        value = _value(_strip_name(_squeeze(text)))
        return None if value is None else (value,)
    # Brackets around a pair, or braces around a set; around one number they would be an interval's or nothing.
    squeezed = _squeeze(_SEPARATOR.sub(",", text)).replace(r"\{", "{").replace(r"\}", "}")
    for begin, end in ("()", "{}", "[]"):
        if squeezed.startswith(begin) and squeezed.endswith(end) and _closes_last(squeezed):
            squeezed = squeezed[1:-1]
            break
    if (name := _NAME.match(squeezed)) and "," in name[0]:  # (x, y) = (1, 2)
        squeezed = squeezed[name.end() :].removeprefix("(").removesuffix(")")
    parts = [part for part in squeezed.split(",") if part]
    if len(parts) != count:
        return None
    values = tuple(_value(_strip_name(part)) for part in parts)
    return None if None in values else tuple(value for value in values if value is not None)


def format_values(values: Sequence[Fraction]) -> str:
    """Values as an answer spells them: `7`, `-3/4`, `2, 5`."""
    return ", ".join(map(str, values))


def _squeeze(text: str) -> str:
    return _SPACES.sub("", text).replace("\u2212", "-")


def _closes_last(text: str) -> bool:
    """Whether the bracket that opens the text is the one that its end closes."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0:
            return place == len(text) - 1
    return False


def _strip_name(text: str) -> str:
    name = _NAME.match(text)
    return text[name.end() :] if name and "," not in name[0] else text


def _value(text: str) -> Fraction | None:
    sign = 1
    while text[:1] in ("-", "+"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:]
        if text[:1] in ("-", "+"):
            return None
    if frac := _FRAC.fullmatch(text):
        over, under = frac[1] if frac[1] is not None else frac[2], frac[3] if frac[3] is not None else frac[4]
    elif ratio := _RATIO.fullmatch(text):
        over, under = ratio[1], ratio[2]
    else:
        over, under = text, "1"
    top, bottom = _signed(over), _signed(under)
    if top is None or bottom is None or bottom == 0:
        return None
    return sign * top / bottom


def _signed(text: str) -> Fraction | None:
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-")
    if not _NUMBER.fullmatch(text):
        return None
    return sign * Fraction(re.sub(r"\{?,\}?", "", text))
