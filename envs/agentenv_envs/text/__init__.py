"""Small tasks in plain text, inline and in microseconds: a walk, a guessing game, a calculation, a choice of style."""

from .guess_number import GuessNumberEnv
from .key_door import KeyDoorEnv
from .styled_reply import StyledReplyEnv
from .tool_arithmetic import ToolArithmeticEnv

__all__ = ["GuessNumberEnv", "KeyDoorEnv", "StyledReplyEnv", "ToolArithmeticEnv"]
