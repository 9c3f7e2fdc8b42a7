"""Numbers about the rollouts between two batches.

Name (unit): how it is computed. What bad looks like.

* ``staleness_mean``, ``staleness_max`` (versions): step - start_version over the batch. Near alpha: the trainer waits
  for slow tasks.
* ``episodes_per_s`` (1/s): episodes that ended well since the last batch, over the time since then. Below batch size
  over step time: rollouts are the bottleneck.
* ``sampled_tokens_per_s`` (1/s): action tokens of those episodes, over the same time.
* ``batch_wait_s`` (s): time inside ``get_batch``. Most of a step: rollouts are the bottleneck.
* ``sync_s`` (s): time inside ``sync_weights``.
* ``reset_s``, ``generate_s``, ``step_s`` (s): mean per episode of the batch and stage. step_s far above generate_s: the
  environment is the bottleneck.
* ``episode_s`` (s): mean duration of the batch's episodes.
* ``offered_episode_s`` (s): mean duration of all episodes that ended well since the last batch. Far above
  ``episode_s`` for many steps: slow tasks are left out.
* ``failure_rate`` (share): failures in the last ``failure_window`` episodes. Rising: an environment or its sandbox
  is ill.
* ``wasted_tokens`` (tokens): sampled in episodes without a sample, since the start.
* ``discarded``, ``discarded/REASON`` (episodes): since the start. Many stale: alpha is too small for the slowest tasks.
* ``buffered``, ``running`` (episodes): now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.trajectory import Trajectory

_STAGES = ("reset", "generate", "step")


class StepMetrics:
    """Gathers between two batches.

    Args:
        now: the loop's time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._episodes = 0
        self._tokens = 0
        self._duration_s = 0.0
        self.sync_s = 0.0
        self._last: dict[str, float] = {}

    def ended(self, trajectory: Trajectory) -> None:
        """An episode ended well."""
        self._episodes += 1
        self._tokens += trajectory.num_action_tokens
        self._duration_s += trajectory.duration_s

    def close(self, batch: Sequence[Trajectory], *, step: int, now: float, waited_s: float) -> None:
        """A batch was consumed: compute the numbers and begin anew."""
        elapsed = max(now - self._since, 1e-9)
        staleness = [step - trajectory.start_version for trajectory in batch]
        self._last = {
            "staleness_mean": _mean(staleness),
            "staleness_max": float(max(staleness, default=0)),
            "episodes_per_s": self._episodes / elapsed,
            "sampled_tokens_per_s": self._tokens / elapsed,
            "batch_wait_s": waited_s,
            "sync_s": self.sync_s,
            "episode_s": _mean([trajectory.duration_s for trajectory in batch]),
            "offered_episode_s": self._duration_s / self._episodes if self._episodes else 0.0,
        }
        for stage in _STAGES:
            seconds = [trajectory.info.get("timing_s", {}).get(stage, 0.0) for trajectory in batch]
            self._last[f"{stage}_s"] = _mean(seconds)
        self._since, self._episodes, self._tokens, self._duration_s, self.sync_s = now, 0, 0, 0.0, 0.0

    def report(self, counts: dict[str, Any], *, failure_rate: float, wasted_tokens: int) -> dict[str, float]:
        """The last batch's numbers with the present counts."""
        discarded: dict[str, int] = counts["discarded"]
        return {
            **self._last,
            "failure_rate": failure_rate,
            "wasted_tokens": float(wasted_tokens),
            "buffered": float(counts["buffered"]),
            "running": float(counts["running"]),
            "discarded": float(sum(discarded.values())),
            **{f"discarded/{reason}": float(number) for reason, number in sorted(discarded.items())},
        }


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values) if values else 0.0
