"""The action in what a policy wrote: `search[...]`, `click[...]` or `ask[...]`, once, with any text around it.

Invariants:
- Case and spacing do not matter, and full-width brackets are brackets; reading takes time in proportion to the text.
- A text with no action, with several, or with one that is not closed, is none.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final, NamedTuple

__all__ = ["Action", "fold", "parse_action"]

_START: Final = re.compile(r"(?<![A-Za-z0-9_])(search|click|ask)\s*\[", re.IGNORECASE)
_EDGE: Final = re.compile(r"[\[\]]")
_QUOTES: Final = {'"': '"', "'": "'", "“": "”", "‘": "’", "`": "`"}
_WIDE: Final = re.compile("[\uff01-\uff5e【】\ufe47\ufe48]")
_PLAIN: Final = {
    **{chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)},
    **dict(zip("【】\ufe47\ufe48", "[][]", strict=True)),
}
"""Full-width signs, and other brackets -> ASCII.

Normal form comes later, for what stands in the brackets alone: it takes the square of the length of a run of marks."""
_MOST_CHARS: Final = 2_000
"""Of what stands in the brackets."""


class Action(NamedTuple):
    """What to do."""

    verb: str
    """"search", "click" or "ask"."""
    value: str
    """What stands in the brackets, without white space or quotes around it."""


def parse_action(text: str) -> Action | None:
    """The one action of a text, if it has exactly one."""
    if not text.isascii():
        text = _WIDE.sub(lambda sign: _PLAIN[sign[0]], text)
    started = _START.search(text)
    if started is None:
        return None
    depth = 1
    for edge in _EDGE.finditer(text, started.end()):
        depth += 1 if edge[0] == "[" else -1
        if depth == 0:
            if edge.start() - started.end() > _MOST_CHARS or _START.search(text, edge.end()):
                return None
            value = " ".join(unicodedata.normalize("NFKC", text[started.end() : edge.start()]).split())
            if len(value) > 1 and _QUOTES.get(value[0]) == value[-1]:
                value = value[1:-1].strip()
            return Action(started[1].casefold(), value)
    return None


def fold(text: str) -> str:
    """As buttons are compared: in lower case, white space collapsed, full-width characters as plain ones."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).replace("【", "[").replace("】", "]")
    return " ".join(text.casefold().split())
