"""Numbers about the rollouts between two batches; ``docs/metrics.md`` says what each is and what bad looks like.

Invariants:

* Shares and means over time are weighted by time: what held for longer counts for more.
* Durations of cancelled episodes count as far as they had come, so ``offered_episode_s`` is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.buffer import SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.trajectory import Trajectory

_STAGES = ("reset", "generate", "step", "reward")


class StepMetrics:
    """Gathers between two batches.

    Args:
        config: sizes that shares are taken of.
        num_engines: behind the proxy.
    """

    def __init__(self, config: RolloutConfig, *, num_engines: int) -> None:
        self._num_envs = config.num_envs
        self._max_outstanding = config.max_outstanding
        self._num_engines = num_engines
        self._last: dict[str, float] = {}
        self._group_starts: dict[str, float] = {}
        self._playing = 0
        self._buffered = 0
        self.begin(0.0, 0.0)

    def begin(self, now: float, engines_busy_s: float) -> None:
        """Gather anew.

        Args:
            now: the loop's time in seconds.
            engines_busy_s: see :meth:`LLMProxy.busy_s`.
        """
        self._since = self._observed = now
        self._engines_busy_s = engines_busy_s
        self._episodes = 0
        self._tokens = 0
        self._accepted_s: list[float] = []
        self._offered_s = 0.0
        self._offered = 0
        self._group_s: list[float] = []
        self._playing_s = 0.0
        self._buffered_s = 0.0
        self.sync_s = 0.0

    def observe(self, now: float, *, playing: int, buffered: int) -> None:
        """From now on so many slots play, and so many finished episodes wait."""
        self._playing_s += self._playing * (now - self._observed)
        self._buffered_s += self._buffered * (now - self._observed)
        self._observed, self._playing, self._buffered = now, playing, buffered

    def group_started(self, group_id: str, now: float) -> None:
        """An episode of the group starts."""
        self._group_starts.setdefault(group_id, now)

    def group_ended(self, group_id: str, now: float) -> None:
        """The group is complete, or gone."""
        started = self._group_starts.pop(group_id, None)
        if started is not None:
            self._group_s.append(now - started)

    def ended(self, trajectory: Trajectory) -> None:
        """An episode ended well."""
        self._episodes += 1
        self._tokens += trajectory.num_action_tokens
        self._offered += 1
        self._offered_s += trajectory.duration_s

    def cut_short(self, duration_s: float) -> None:
        """An episode was cancelled for being stale or surplus."""
        self._offered += 1
        self._offered_s += duration_s

    def close(
        self,
        batch: Sequence[Trajectory],
        buffer: SampleBuffer,
        *,
        step: int,
        now: float,
        waited_s: float,
        engines_busy_s: float,
    ) -> None:
        """A batch was consumed: compute the numbers and begin anew."""
        elapsed = max(now - self._since, 1e-9)
        self.observe(now, playing=self._playing, buffered=self._buffered)
        staleness = Counter(step - trajectory.start_version for trajectory in batch)
        accepted_s = _mean([trajectory.duration_s for trajectory in batch])
        offered_s = self._offered_s / self._offered if self._offered else 0.0
        busy_s = engines_busy_s - self._engines_busy_s
        self._last = {
            "staleness_mean": _mean(list(staleness.elements())),
            "staleness_max": float(max(staleness, default=0)),
            **{f"staleness/{age}": float(number) for age, number in sorted(staleness.items())},
            "episodes_per_s": self._episodes / elapsed,
            "sampled_tokens_per_s": self._tokens / elapsed,
            "batch_wait_s": waited_s,
            "sync_s": self.sync_s,
            "episode_s": accepted_s,
            "offered_episode_s": offered_s,
            "first_finisher_bias": accepted_s / offered_s if offered_s else 1.0,
            "group_s": _mean(self._group_s),
            "engine_idle_share": max(0.0, 1.0 - busy_s / (elapsed * self._num_engines)),
            "slot_idle_share": max(0.0, 1.0 - self._playing_s / (elapsed * self._num_envs)),
            "buffer_occupancy": self._buffered_s / (elapsed * self._max_outstanding),
        }
        for stage in _STAGES:
            seconds = [trajectory.info.get("timing_s", {}).get(stage, 0.0) for trajectory in batch]
            self._last[f"{stage}_s"] = _mean(seconds)
        self._last["environment_wait_s"] = self._last["reset_s"] + self._last["step_s"]
        self._group_starts = {
            group_id: started
            for group_id, started in self._group_starts.items()
            if not buffer.is_ready(group_id)
        }
        self.begin(now, engines_busy_s)

    def report(
        self,
        buffer: SampleBuffer,
        *,
        failure_rate: float,
        workers_replaced: int,
        slots_settling: int,
        proxy: LLMProxy,
    ) -> dict[str, float]:
        """The last batch's numbers with the present counts."""
        discarded, tokens = buffer.discarded, buffer.discarded_tokens
        return {
            **self._last,
            "failure_rate": failure_rate,
            "workers_replaced": float(workers_replaced),
            "slots_settling": float(slots_settling),
            "tasks_given_up": float(buffer.tasks_given_up),
            "wasted_tokens": float(sum(tokens.values()) + proxy.restarted_tokens),
            "restarted_tokens": float(proxy.restarted_tokens),
            "engines_in_service": float(proxy.engines_in_service),
            "engine_losses": float(proxy.engine_losses),
            "moved_turns": float(proxy.moved_turns),
            "buffered": float(buffer.buffered),
            "running": float(buffer.running),
            "discarded": float(sum(discarded.values())),
            **{f"discarded/{reason}": float(number) for reason, number in sorted(discarded.items())},
            **{f"discarded_tokens/{reason}": float(number) for reason, number in sorted(tokens.items())},
        }


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values) if values else 0.0
