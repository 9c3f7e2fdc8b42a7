"""What a policy wrote, as the command that the engine knows.

Invariants:
- case, spaces, a prompt sign, quotes and a final full stop don't matter;
- `put X in Y`, `put X on Y` and `place X ...` are `move X to Y`: alfworld 0.4 renamed the verb;
- between `<action>` and `</action>`, in any case, stands the command, if they are there; thoughts end at `</think>`;
- the time is linear in the length of the action.
"""

import re
from typing import Final

__all__ = ["LONGEST", "command_of"]

LONGEST: Final = 200
"""Characters of a command; no command of a game is as long."""

_PUT: Final = re.compile(r"(?:put|place|move) (.+?) (?:in/on|into|onto|inside|in|on|to) (.+)")
_GO: Final = re.compile(r"(?:goto|walk to|move to|go) (?!to )(.+)")
_DROPPED: Final = " \t\r\n>.`'\"*"


def command_of(action: str) -> str | None:
    """The command in an action; None where there is none."""
    text = action.lower()
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    if "<action>" in text:
        text = text.rpartition("<action>")[2].partition("</action>")[0]
    # Cut before anything looks at it closely: an action may be megabytes long.
    text = text.strip(_DROPPED)
    if not text or len(text) > LONGEST:
        return None
    text = " ".join(text.split())
    text = re.sub(r"\b(?:the|a|an) (?=[a-z]+ [0-9])", "", text)
    if match := _PUT.fullmatch(text):
        return f"move {match[1]} to {match[2]}"
    if match := _GO.fullmatch(text):
        return f"go to {match[1]}"
    return text
