"""Small multi-turn tasks in plain text, inline and in microseconds: KeyDoor-v0, GuessNumber-v0 and others."""

from .key_door import KeyDoorEnv
from .styled_reply import StyledReplyEnv

__all__ = ["KeyDoorEnv", "StyledReplyEnv"]
