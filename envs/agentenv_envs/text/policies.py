"""Baselines of the text environments.

Invariants:
- a random policy writes well-formed actions alone, made of what was observed, and is told nothing else;
- `Oracle` solves every task within its turns; `Scripted` is right in 8 turns of 10, at least one state at a time.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, Final

from .key_door import ACTIONS
from .styled_reply import FORMS, StyledReplyEnv, style_of
from .task_env import TextTaskEnv
from .tool_arithmetic import TOOLS

__all__ = [
    "Oracle",
    "RandomCalls",
    "RandomGuesses",
    "RandomMoves",
    "RandomReplies",
    "Scripted",
    "StyledOracle",
]

_SCRIPTED_SKILL: Final = 0.8
_NUMBER: Final = re.compile(r"[0-9]{1,12}")
_PRICE: Final = re.compile(r"\b([a-z]+ [0-9]+)\b")
_FINAL_SHARE: Final = 0.25  # of the random calculator's turns


class Oracle:
    """The demonstrator with skill 1."""

    skill = 1.0

    def __init__(self, env: TextTaskEnv[Any], seed: int) -> None:
        self.env = env
        self.rng = random.Random(seed)

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def act(self, observation: str) -> str:
        return self.env.demonstrate(self.skill, self.rng)


class Scripted(Oracle):
    """The demonstrator with skill 0.8: each turn it is careless with probability 0.2."""

    skill = _SCRIPTED_SKILL


class StyledOracle(Oracle):
    """Knows the wanted style, which the demonstrator of `StyledReply-v0` does not."""

    env: StyledReplyEnv

    def act(self, observation: str) -> str:
        return self.rng.choice(
            [reply for reply in self.env.solutions() if style_of(reply) == self.env.wanted]
        )


class _Random:
    def __init__(self, env: TextTaskEnv[Any], seed: int) -> None:
        self.rng = random.Random(seed)

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Nothing to prepare."""


class RandomMoves(_Random):
    """Any of the six actions of `KeyDoor-v0`."""

    def act(self, observation: str) -> str:
        return self.rng.choice(ACTIONS)


class RandomGuesses(_Random):
    """Any number of the range that the first observation tells."""

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        low, high = map(int, _NUMBER.findall(observation)[-2:])
        self.range = (low, high)

    def act(self, observation: str) -> str:
        return str(self.rng.randint(*self.range))


class RandomCalls(_Random):
    """A tool with two of the numbers seen so far, or one of them as the answer."""

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        self.numbers: list[str] = []

    def act(self, observation: str) -> str:
        self.numbers += _NUMBER.findall(observation)
        if self.rng.random() < _FINAL_SHARE:
            return f"answer {self.rng.choice(self.numbers)}"
        return f"{self.rng.choice(TOOLS)} {self.rng.choice(self.numbers)} {self.rng.choice(self.numbers)}"


class RandomReplies(_Random):
    """Any price of the list, in any style."""

    def act(self, observation: str) -> str:
        return self.rng.choice(list(FORMS.values())).format(self.rng.choice(_PRICE.findall(observation)))
