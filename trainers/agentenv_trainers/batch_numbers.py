"""Numbers that describe a batch of trajectories as it came, whatever is trained on it."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import Truncation, reason_to_drop


def batch_numbers(trajectories: Sequence[Trajectory], truncation: Truncation, step: int) -> dict[str, float]:
    """Means and extremes; docs/metrics.md says what each means.

    Reward and success are over the trajectories that did not fail, 0 where all did.

    Args:
        trajectories: those of all processes, at least one.
        truncation: what becomes of those that were cut off.
        step: training step that consumes them, which is the version of the weights it trains.
    """
    count = len(trajectories)
    ages = [step - trajectory.start_version for trajectory in trajectories]
    tokens = [t.num_action_tokens for t in trajectories]
    played = [t for t in trajectories if not t.failed]
    return {
        "reward": sum(t.reward for t in played) / max(1, len(played)),
        "success": sum(t.success for t in played) / max(1, len(played)),
        "staleness_mean": sum(ages) / count,
        "staleness_max": float(max(ages)),
        "response_tokens": sum(tokens) / count,
        "response_tokens_max": float(max(tokens)),
        "turns": sum(t.turns for t in trajectories) / count,
        "truncation_rate": sum(t.truncated and not t.terminated for t in trajectories) / count,
        "untrained_trajectories": float(
            sum(reason_to_drop(trajectory, truncation) is not None for trajectory in trajectories)
        ),
    }
