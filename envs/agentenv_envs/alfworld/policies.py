"""Baselines of ALFWorld-v0: a walkthrough, and any admissible command.

Invariants:
- `Oracle` wins every synthetic game, and every official game of which the layout tells a way;
- `RandomCommand` draws evenly from the commands that the observation lists.
"""

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentenv.errors import UsageError

if TYPE_CHECKING:
    from .env import ALFWorldEnv

__all__ = ["Oracle", "RandomCommand"]


class Oracle:
    """Follows the game's walkthrough.

    Args:
        env: whose game it looks into.
        seed: of no use to it.
    """

    def __init__(self, env: "ALFWorldEnv", seed: int) -> None:
        self._env = env
        self._left: list[str] = []

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Take the walkthrough.

        Raises:
            UsageError: the game has none.
        """
        game = self._env.game
        if game.walkthrough is None:
            raise UsageError(f"policy 'oracle' has no walkthrough of game {game.task_id}")
        self._left = list(game.walkthrough)

    def act(self, observation: str) -> str:
        """The next command of it."""
        return self._left.pop(0) if self._left else "look"


class RandomCommand:
    """Any admissible command.

    Args:
        env: whose commands it draws from.
        seed: of the draws.
    """

    def __init__(self, env: "ALFWorldEnv", seed: int) -> None:
        self._env = env
        self._rng = random.Random(seed)

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Nothing to remember."""

    def act(self, observation: str) -> str:
        """One of the commands that the observation lists."""
        return self._rng.choice(self._env.commands)
