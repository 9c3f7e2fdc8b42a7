r"""Integers, fractions and decimals as exact values: what is compared without a computer-algebra system.

Invariants:
- values are `Fraction`: 1/3 and 0.333 are different, 1/2, 0.5 and \frac{3}{6} are the same;
- a text that is not plainly one number (or the wanted number of them) has no value: nothing is guessed;
- what is named is taken by its name: `y = 2, x = 1` are the numbers 1 and 2, in the order of x and y;
- texts over `MAX_EXACT_CHARS` have no value, so the work is bounded.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

__all__ = ["MAX_EXACT_CHARS", "format_values", "read_values"]

MAX_EXACT_CHARS: Final = 400

_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad|~|\s+")
_STYLE = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])")
_DRESSED = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf))?\{(-?[0-9.,/]+)\}")
_UNIT = re.compile(
    r"(?:\\[,;: ]|\s)*\\(?:text|textrm|mathrm|mbox)\{\s*([A-Za-z][A-Za-z. ]*)\}(?:\^\{?[23]\}?)?$"
)
# Words that make another number of the one before them, or an answer that is none.
_NO_UNITS = re.compile(
    r"\b(?:and|or|not|no|none|i|e|pi|percent|pairs?|dozens?|hal(?:f|ves)|thirds?|hundreds?|thousands?|[mbtr]+illions?)\b",
    re.IGNORECASE,
)
_TWO_NUMBERS = re.compile(r"[0-9.]\s+[0-9.]")  # which white space alone parts
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:\s[0-9]{3})+(?:\.[0-9]+)?")
_MIXED_RATIO = re.compile(r"(?<![0-9./])([0-9]+)(?:\s|\\[,;: ])+([0-9]+)/([0-9]+)(?![0-9./])")
_INTEGER: Final = r"[0-9]+"
_COMMAS: Final = r"[0-9]{1,3}(?:\{?,\}?[0-9]{3})+"
_NUMBER = re.compile(rf"(?:{_COMMAS}|{_INTEGER})(?:\.[0-9]+)?|\.[0-9]+")
_RATIO = re.compile(r"(.+?)/(.+)")
_FRAC = re.compile(r"([0-9]*)\\[dtc]?frac(?:\{([^{}]*)\}|([0-9]))(?:\{([^{}]*)\}|([0-9]))")
_NAME = re.compile(r"\(?([a-zA-Z](?:_(?:[0-9]|\{[0-9]+\}))?)\)?=(?=.)")
_NAMES = re.compile(r"\(?([a-z](?:,[a-z]){1,3})\)?=(?=.)")
_SEPARATOR = re.compile(r",|;|\\\\|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_WRAPPERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\left(", r"\right)"))


def read_values(text: str, count: int = 1) -> tuple[Fraction, ...] | None:
    r"""The `count` numbers that a text is made of, or None if it is anything else.

    Understood are whole numbers, also with commas or spaces between thousands; decimals; fractions as `a/b` and
    `\frac{a}{b}`, also behind a whole number (`1\frac{1}{2}`, `1 1/2`); a sign; a name before the number (`x = 3`,
    `x_1 = 3`); dollars and brackets around all of it; a unit as `\text{...}` behind one number; and between several
    numbers `,`, `;`, `and` or `or`.
    """
    text = text.strip().rstrip(".")
    if not text or len(text) > MAX_EXACT_CHARS:
        return None
    for begin, end in _WRAPPERS:
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            text = text[len(begin) : -len(end)].strip()
    text = _MIXED_RATIO.sub(r"\1\\frac{\2}{\3}", text)
    if count == 1:
        text = _without_unit(text)
    if _TWO_NUMBERS.search(text) and not (count == 1 and _THOUSANDS.fullmatch(text)):
        return None
    if count == 1:
        value = _value(_strip_name(_squeeze(text)))
        return None if value is None else (value,)
    # Brackets around a pair, or braces around a set; around one number they would be an interval's or nothing.
    squeezed = _squeeze(_SEPARATOR.sub(",", text)).replace(r"\{", "{").replace(r"\}", "}")
    for begin, end in ("()", "{}", "[]"):
        if squeezed.startswith(begin) and squeezed.endswith(end) and _closes_last(squeezed):
            squeezed = squeezed[1:-1]
            break
    names: list[str] = []
    if tuple_name := _NAMES.match(squeezed):  # (x, y) = (1, 2)
        names = tuple_name[1].split(",")
        squeezed = squeezed[tuple_name.end() :].removeprefix("(").removesuffix(")")
    parts = [part for part in squeezed.split(",") if part]
    if len(parts) != count or len(names) not in (0, count):
        return None
    if not names:
        names = [name[1] for part in parts if (name := _NAME.match(part))]
        parts = [_strip_name(part) for part in parts]
    values = [value for part in parts if (value := _value(part)) is not None]
    if len(values) != count:
        return None
    if len(set(names)) == count:
        values = [value for _, value in sorted(zip(names, values, strict=True), key=lambda named: named[0])]
    return tuple(values)


def format_values(values: Sequence[Fraction]) -> str:
    """Values as an answer spells them: `7`, `-3/4`, `2, 5`."""
    return ", ".join(map(str, values))


def _squeeze(text: str) -> str:
    return _SPACES.sub("", _STYLE.sub("", text)).replace("\u2212", "-")


def _without_unit(text: str) -> str:
    """Without `\\text{cm}` behind a number, and a dollar's sign before it."""
    unit = _UNIT.search(text)
    if unit and not _NO_UNITS.search(unit[1]):
        text = text[: unit.start()]
    return text.removeprefix(r"\$").strip()


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
    return text[name.end() :] if name else text


def _value(text: str) -> Fraction | None:
    sign = 1
    while text[:1] in ("-", "+"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:]
        if text[:1] in ("-", "+"):
            return None
    if dressed := _DRESSED.fullmatch(text):
        text = dressed[1]
    whole = ""
    if frac := _FRAC.fullmatch(text):
        whole, over, under = frac[1], frac[2] or frac[3] or "", frac[4] or frac[5] or ""
    elif ratio := _RATIO.fullmatch(text):
        over, under = ratio[1], ratio[2]
    else:
        over, under = text, "1"
    top, bottom = _signed(over), _signed(under)
    if top is None or bottom is None or bottom == 0:
        return None
    if whole:
        # 3\frac{5}{2} is a product if it is anything.
        return sign * (int(whole) + top / bottom) if 0 < top < bottom else None
    return sign * top / bottom


def _signed(text: str) -> Fraction | None:
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-")
    if not _NUMBER.fullmatch(text):
        return None
    return sign * Fraction(re.sub(r"\{?,\}?", "", text))
