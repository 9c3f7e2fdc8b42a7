"""Keep observations short: head, a line that says how much is missing, and tail.

Invariant: what comes out is at most `max_chars` characters long, and unchanged if it fits.
"""

from typing import Any

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from agentenv.wrappers.base import TextWrapper

__all__ = ["ObservationCut", "cut_text"]

_LEAST_CHARS = 64


def cut_text(text: str, max_chars: int) -> str:
    """Shorten `text` to at most `max_chars` characters, head and tail kept in equal parts.

    Args:
        text: any text.
        max_chars: 64 or more, so that the line in the middle fits.

    Returns:
        `text` if it fits; else its head, "[N characters left out]" on a line of its own, and its tail.

    Raises:
        ValueError: `max_chars` is below 64.
    """
    if max_chars < _LEAST_CHARS:
        raise ValueError(f"max_chars must be {_LEAST_CHARS} or more, got {max_chars}")
    if len(text) <= max_chars:
        return text
    # The count is at most len(text), so that the marker with len(text) in it is the longest possible one.
    kept = max_chars - len(_marker(len(text)))
    head = (kept + 1) // 2
    tail = kept - head
    return text[:head] + _marker(len(text) - kept) + text[len(text) - tail :]


def _marker(count: int) -> str:
    return f"\n[{count} characters left out]\n"


class ObservationCut(TextWrapper, RecordConstructorArgs):
    """Cut every observation to `max_chars` characters with `cut_text`.

    Raises:
        ValueError: `max_chars` is below 64.
    """

    def __init__(self, env: gymnasium.Env[str, str], max_chars: int = 8000) -> None:
        cut_text("", max_chars)
        RecordConstructorArgs.__init__(self, max_chars=max_chars)
        super().__init__(env)
        self._max_chars = max_chars

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; its first observation is cut too."""
        observation, info = self.env.reset(seed=seed, options=options)
        return cut_text(observation, self._max_chars), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn and cut its observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return cut_text(observation, self._max_chars), float(reward), terminated, truncated, info
