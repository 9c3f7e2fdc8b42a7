r"""The final answer of a text: what its last `\boxed{...}` holds.

Invariants:
- the last `\boxed` counts, and where its brace is never closed there is no answer: an earlier one is not taken instead;
- the work is one pass over the text, whatever is in it; nothing raises.
"""

import re
from typing import Final

__all__ = ["last_boxed"]

_BEGIN = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_MARKS: Final = (r"\boxed", r"\fbox")
# The brace must follow the command: so far from it at most.
_REACH: Final = 20
_BRACES = re.compile(r"\\[\\{}]|[{}]")


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Where the last `\boxed{` begins, and what is between its braces; None where there is no answer.

    A box inside of a box is the last one: of `\boxed{\boxed{7}}` the answer is 7. `\{` and `\}` are no braces.
    """
    at = max(text.rfind(mark) for mark in _MARKS)
    if at < 0:
        return None
    begin = _BEGIN.match(text, at, at + _REACH)
    if begin is None:
        return None
    depth = 1
    for brace in _BRACES.finditer(text, begin.end()):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return at, text[begin.end() : brace.start()].strip()
    return None
