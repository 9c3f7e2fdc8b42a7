"""Failed episodes: how a failure is named, what is tried again, what is replaced, and when failures stop the run.

Invariants:

* A failed episode is data: it is counted under a reason and never becomes a reward.
* Only a reset is tried again within an episode; an environment that failed is used no more.
* Only the share of failures in a window of episodes stops a run, with a message that names the dominant reason and an
  example of it.
"""

from __future__ import annotations

from collections import Counter, deque

from agentenv.cluster.placement import NODE_LOST
from agentenv.errors import EnvError, EpisodeTimeoutError, SandboxLostError, UsageError
from agentenv.rollout.config import RolloutConfig

_LOST = (NODE_LOST, SandboxLostError.__name__)
"""How the reasons of episodes end that were lost with many others, by one cause."""
_SLOT_PAUSE_S = 0.01
_LONGEST_SLOT_PAUSE_S = 5.0


class EpisodeFailedError(Exception):
    """One episode ended without a sample; internal to the rollout.

    Args:
        stage: reset, generate, step, reward, episode.
        cause: what happened.
    """

    def __init__(self, stage: str, cause: Exception) -> None:
        super().__init__(f"{stage}: {cause}")
        self.stage = stage
        self.cause = cause

    @property
    def reason(self) -> str:
        """Short name that failures are counted under: ``step_timeout``, ``reset_SandboxError``."""
        if isinstance(self.cause, EpisodeTimeoutError):
            return f"{self.cause.stage}_timeout"
        # What an environment raised tells more than the EnvError that the worker put around it.
        origin = self.cause.origin if isinstance(self.cause, EnvError) else None
        return f"{self.stage}_{origin or type(self.cause).__name__}"


class FailurePolicy:
    """Retry, replace, or give up.

    Args:
        config: ``reset_retries``, ``reset_backoff_s``, ``max_failure_rate`` and ``failure_window``.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._reset_retries = config.reset_retries
        self._reset_backoff_s = config.reset_backoff_s
        self._limit = config.max_failure_rate
        self._num_slots = config.num_envs
        # Failures end sooner than good episodes: before every slot could have ended one, their share says nothing.
        self._least = max(config.failure_window // 4, min(config.num_envs, config.max_outstanding))
        window = max(config.failure_window, self._least)
        self._outcomes: deque[tuple[str, str, str] | None] = deque(maxlen=window)
        """Reason, example and slot of each failure; None for a success."""
        self._num_failures = 0
        """Among them: the window is as large as the slots are many, and is not gone through at each failure."""
        self._failing: set[str] = set()
        """Slots whose last episode failed."""
        self._good_episode_s = 0.0
        """A moving mean of what good episodes take."""

    def reset_pause_s(self, attempt: int, error: Exception) -> float | None:
        """How long to wait before a failed reset is tried again in a new environment; None: it is not.

        Args:
            attempt: how many resets of the episode failed before this one.
            error: what it failed with; bad input (UsageError) does not get better.
        """
        if attempt >= self._reset_retries or isinstance(error, UsageError):
            return None
        return self._reset_backoff_s * 2.0**attempt

    def replaces_environment(self, stage: str) -> bool:
        """Whether a failure in that stage ends the environment; a failure of the engine or of a reward does not."""
        return stage not in ("generate", "reward")

    def slot_pause_s(self, failures: int) -> float:
        """How long a slot rests after so many failures in a row: it must not turn into a busy loop."""
        if not failures:
            return 0.0
        return min(_SLOT_PAUSE_S * 2.0 ** min(failures, 16), max(_LONGEST_SLOT_PAUSE_S, self._good_episode_s))

    @property
    def rate(self) -> float:
        """Share of failures in the window, 0 without episodes."""
        return self._num_failures / len(self._outcomes) if self._outcomes else 0.0

    def success(self, duration_s: float, *, slot: str) -> None:
        """An episode of the slot ended with a sample."""
        self._note(None)
        weight = 0.1 if self._good_episode_s else 1.0
        self._good_episode_s += weight * (duration_s - self._good_episode_s)
        self._failing.discard(slot)

    def failure(self, reason: str, example: str, *, slot: str) -> str | None:
        """An episode failed.

        Failures end sooner than good episodes, so a few broken slots among many good ones would soon fill the window:
        the run is only stopped where the failures come from that share of the slots, too. Episodes lost with a node, or
        with a sandbox service, say nothing about the others, however many they are; only a slot's second loss in a row
        counts.

        Args:
            reason: what failures are counted under.
            example: message of this one.
            slot: that it was played in.

        Returns:
            why the run must stop, or None to go on.
        """
        failed_before = slot in self._failing
        self._failing.add(slot)
        if reason.endswith(_LOST) and not failed_before:
            return None
        self._note((reason, example, slot))
        if len(self._outcomes) < self._least or self._limit >= 1.0 or self.rate <= self._limit:
            return None
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        slots = len({name for _, _, name in failures})
        in_window = slots > self._limit * min(self._num_slots, len(failures))
        if not in_window and len(self._failing) <= self._limit * self._num_slots:
            return None
        (dominant, times), *_ = Counter(name for name, _, _ in failures).most_common(1)
        last = next(message for name, message, _ in reversed(failures) if name == dominant)
        return (
            f"{len(failures)} of the last {len(self._outcomes)} episodes failed (allowed share {self._limit:g}); "
            f"{times} of them with {dominant}, for example: {last}"
        )

    def _note(self, outcome: tuple[str, str, str] | None) -> None:
        if len(self._outcomes) == self._outcomes.maxlen:
            self._num_failures -= self._outcomes[0] is not None
        self._outcomes.append(outcome)
        self._num_failures += outcome is not None
