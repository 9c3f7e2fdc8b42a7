"""Episodes that a recipe plays besides those it trains on: evaluations, and what a critic is pretrained on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from agentenv.errors import RolloutError
from agentenv.report import Progress
from agentenv.rollout import AsyncController
from agentenv.rollout.slot import EpisodeSource
from agentenv.trajectory import Trajectory


def play(
    controller: AsyncController,
    env: EpisodeSource,
    seeds: Sequence[int],
    progress: Progress,
    *,
    stage: str,
    max_failure_rate: float,
) -> list[Trajectory]:
    """Play an episode per seed with the current policy, and show how it goes.

    Args:
        controller: plays them.
        env: makes the environment.
        seeds: of the tasks.
        progress: gets a stage of its own.
        stage: its name.
        max_failure_rate: share of episodes that infrastructure may end, 0 to 1.

    Returns:
        The episodes, those that failed among them.

    Raises:
        RolloutError: all failed, or more than ``max_failure_rate`` of them.
    """
    number = len(seeds)
    progress.stage(stage, unit="episode", total=number)
    done: list[Trajectory] = []
    began = time.monotonic()

    def show(trajectory: Trajectory) -> None:
        done.append(trajectory)
        valid = [item for item in done if not item.failed]
        progress.update(
            len(done),
            {
                "success": f"{sum(item.success for item in valid) / max(1, len(valid)):.2f}",
                "episodes/s": f"{len(done) / max(1e-9, time.monotonic() - began):.1f}",
            },
        )

    trajectories = controller.evaluate(env, seeds, on_result=show)
    failed = [item for item in trajectories if item.failed]
    if len(failed) == number or len(failed) > max_failure_rate * number:
        # Kept, such a result would pass for that of the policy, and a resumed run would not play it again.
        (reason, times), *_ = Counter(item.end_reason for item in failed).most_common(1)
        example = next(item.info["error"] for item in failed if item.end_reason == reason)
        raise RolloutError(
            f"{stage}: {len(failed)} of {number} episodes failed (allowed share {max_failure_rate:g}); "
            f"{times} of them with {reason}, for example: {example}"
        )
    return trajectories
