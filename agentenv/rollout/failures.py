"""Failed episodes: how a failure is named, and when failures stop the run.

Invariants:

* A failed episode is data: it is counted under a reason and never becomes a reward.
* Only the share of failures in a window of episodes stops a run, with a message that names the dominant reason and an
  example of it.
"""

from __future__ import annotations

from collections import Counter, deque

from agentenv.errors import EnvError, EpisodeTimeoutError
from agentenv.rollout.config import RolloutConfig


class EpisodeFailedError(Exception):
    """One episode ended without a sample; internal to the rollout.

    Args:
        stage: reset, step, generate, episode.
        cause: what happened.
        action_tokens: tokens sampled in vain.
    """

    def __init__(self, stage: str, cause: Exception, *, action_tokens: int = 0) -> None:
        super().__init__(f"{stage}: {cause}")
        self.stage = stage
        self.cause = cause
        self.action_tokens = action_tokens

    @property
    def reason(self) -> str:
        """Short name that failures are counted under: ``step_timeout``, ``reset_SandboxError``."""
        if isinstance(self.cause, EpisodeTimeoutError):
            return f"{self.cause.stage}_timeout"
        # What an environment raised tells more than the EnvError that the worker put around it.
        wrapped = type(self.cause) is EnvError and self.cause.__cause__
        origin = self.cause.__cause__ if wrapped else self.cause
        return f"{self.stage}_{type(origin).__name__}"


class FailurePolicy:
    """Decides when failed episodes stop the run.

    Args:
        config: ``max_failure_rate`` and ``failure_window``.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._limit = config.max_failure_rate
        self._outcomes: deque[tuple[str, str] | None] = deque(maxlen=config.failure_window)
        self._least = max(1, config.failure_window // 4)

    @property
    def rate(self) -> float:
        """Share of failures in the window, 0 without episodes."""
        failures = sum(outcome is not None for outcome in self._outcomes)
        return failures / len(self._outcomes) if self._outcomes else 0.0

    def success(self) -> None:
        """An episode ended with a sample."""
        self._outcomes.append(None)

    def failure(self, reason: str, example: str) -> str | None:
        """An episode failed.

        Args:
            reason: what failures are counted under.
            example: message of this one.

        Returns:
            why the run must stop, or None to go on.
        """
        self._outcomes.append((reason, example))
        if len(self._outcomes) < self._least or self._limit >= 1.0 or self.rate <= self._limit:
            return None
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        (dominant, times), *_ = Counter(name for name, _ in failures).most_common(1)
        last = next(message for name, message in reversed(failures) if name == dominant)
        return (
            f"{len(failures)} of the last {len(self._outcomes)} episodes failed (allowed share {self._limit:g}); "
            f"{times} of them with {dominant}, for example: {last}"
        )
