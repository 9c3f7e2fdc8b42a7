"""The smallest environment that has tasks, a reward, and both ways to end.

Invariants:
- `reset(seed=s)` chooses the word; without a seed the words follow from the last one given.
- Saying the word terminates with reward 1.0; the last turn without it is truncated with reward 0.0.
"""

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from agentenv.env import BaseEnv

__all__ = ["EchoEnv"]

_WORDS = ("apple", "brook", "cedar", "delta", "ember", "fjord", "grape", "heron")


class EchoEnv(BaseEnv):
    """Say the word that the task names; everything else is echoed.

    Args:
        max_turns: actions of an episode.

    Raises:
        ValueError: `max_turns` is below 1.
    """

    worker = "inline"
    policies: ClassVar[Mapping[str, str]] = {
        "oracle": "agentenv.testing.echo_env:EchoOracle",
        "random": "agentenv.testing.echo_env:RandomWords",
    }

    def __init__(self, max_turns: int = 3) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, got {max_turns}")
        self.max_turns = max_turns
        self._word: str | None = None
        self._turns = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Choose a word."""
        super().reset(seed=seed)
        self._word = _WORDS[int(self.np_random.integers(len(_WORDS)))]
        self._turns = 0
        return f"Say the word {self._word}.", {"task_id": f"echo-{self._word}", "family": "echo"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare the action, outer white space aside, with the word.

        Raises:
            RuntimeError: called before `reset` or after the end.
        """
        if self._word is None:
            raise RuntimeError("EchoEnv.step needs a running episode: call reset first")
        self._turns += 1
        right = action.strip() == self._word
        truncated = not right and self._turns >= (self.max_turns or 1)
        observation = "Right." if right else f"You said: {action}"
        if right or truncated:
            self._word = None
        return (
            observation,
            float(right),
            right,
            truncated,
            {"success": right, "metrics": {"echoes": self._turns}},
        )


class EchoOracle:
    """Says the word that the first observation names."""

    def __init__(self, env: EchoEnv, seed: int) -> None:
        self.word = ""

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Read the word."""
        self.word = observation.removesuffix(".").rpartition(" ")[2]

    def act(self, observation: str) -> str:
        return self.word


class RandomWords:
    """Says any of the words."""

    def __init__(self, env: EchoEnv, seed: int) -> None:
        self.rng = random.Random(seed)

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def act(self, observation: str) -> str:
        return self.rng.choice(_WORDS)
