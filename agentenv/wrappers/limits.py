"""Limits on the length of an episode, in turns or in tokens.

Invariants:
- Reaching a limit sets `truncated`, never `terminated`: the task was cut off, not failed.
- A step that ends the task by itself at the limit stays `terminated` alone.
"""

from typing import Any, Protocol

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from agentenv.wrappers.base import TextWrapper

__all__ = ["TextEncoder", "TokenBudget", "TurnLimit"]


class TextEncoder(Protocol):
    """The part of a Hugging Face tokenizer that `TokenBudget` needs."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of `text`."""
        ...


class TurnLimit(TextWrapper, RecordConstructorArgs):
    """Cut an episode as truncated after `max_turns` actions.

    Raises:
        ValueError: `max_turns` is below 1.
    """

    def __init__(self, env: gymnasium.Env[str, str], max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, got {max_turns}")
        RecordConstructorArgs.__init__(self, max_turns=max_turns)
        super().__init__(env)
        self._limit = max_turns
        self._turns = 0

    @property
    def max_turns(self) -> int | None:
        """The smaller of this limit and the wrapped environment's advice."""
        inner = super().max_turns
        return self._limit if inner is None else min(self._limit, inner)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode with no turns taken."""
        self._turns = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn; the one that reaches the limit is truncated unless it ends the task."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turns += 1
        truncated = truncated or (not terminated and self._turns >= self._limit)
        return observation, float(reward), terminated, truncated, info


class TokenBudget(TextWrapper):
    """Cut an episode as truncated once its observations and actions together hold `max_tokens` tokens.

    The count is of the text, encoded once more: the chat template, and ids that do not survive decoding, can
    make the rollout's own count differ by some tokens. It is reported as `info["tokens_used"]`.

    Args:
        env: the environment to wrap.
        tokenizer: any object with `encode(text, add_special_tokens=False)`.
        max_tokens: the budget, the first observation included.

    Raises:
        ValueError: `max_tokens` is below 1.
    """

    def __init__(self, env: gymnasium.Env[str, str], tokenizer: TextEncoder, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
        super().__init__(env)
        self._tokenizer = tokenizer
        self._limit = max_tokens
        self._used = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; its first observation counts."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._used = self._count(observation)
        return observation, {**info, "tokens_used": self._used}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn; the one that uses the budget up is truncated unless it ends the task."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._used += self._count(action) + self._count(observation)
        truncated = truncated or (not terminated and self._used >= self._limit)
        return observation, float(reward), terminated, truncated, {**info, "tokens_used": self._used}

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))
