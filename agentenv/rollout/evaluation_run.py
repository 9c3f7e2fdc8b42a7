"""Evaluation episodes: a fixed list of tasks, each played once, beside or without training rollouts.

Invariants:

* One trajectory per seed, in the order of the seeds; a failed episode is one with ``failed`` true and its reason.
* Nothing of the training ledger, buffer or failure window is touched.
* All environments are closed at the end, whatever the end is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from agentenv.errors import RolloutError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.rewards import RewardPool
from agentenv.rollout.slot import EpisodeSlot
from agentenv.trace import DISCARDED, slot_track
from agentenv.trajectory import Trajectory

logger = logging.getLogger(__name__)


async def evaluate(
    managers: Sequence[EpisodeSlot],
    proxy: LLMProxy,
    seeds: Sequence[int],
    *,
    rewards: RewardPool | None,
    name: str,
    sampling_seed: int,
    shutdown_timeout_s: float,
    on_result: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Play one episode per seed.

    Args:
        managers: the slots; they are closed here.
        proxy: told apart from an episode's failure when an engine is dead.
        seeds: of the tasks.
        rewards: computes rewards apart from the environments; None: the environments' own.
        name: prefix of episode ids, unique among evaluations.
        sampling_seed: episodes of one seed and one sampling seed sample alike.
        shutdown_timeout_s: longest wait for environments to close.
        on_result: called in the event loop's thread as episodes end; must be quick.

    Raises:
        RolloutError: an engine died.
        UsageError: the environment cannot be made.
    """
    remaining = iter(enumerate(seeds))
    results: dict[int, Trajectory] = {}

    async def play(manager: EpisodeSlot) -> None:
        for index, seed in remaining:
            episode_id = f"{name}-{index}"
            ticket = EpisodeTicket(episode_id, episode_id, seed, start_version=proxy.version, number=index)
            time = asyncio.get_running_loop().time
            started = time()
            try:
                trajectory = await manager.run_episode(ticket, sampling_seed * 1_000_003 + seed)
                if rewards is not None:
                    trajectory = await rewards.reward(trajectory)
            except EpisodeFailedError as failure:
                if proxy.error is not None:
                    raise RolloutError(f"an inference engine died: {proxy.error!r}") from proxy.error
                logger.warning("evaluation episode %s (task seed %d) failed: %s", episode_id, seed, failure)
                trajectory = _failed(ticket, failure)
                proxy.trace.instant(DISCARDED, "failed", episode=episode_id, reason=failure.reason)
            finally:
                proxy.trace.span(
                    slot_track(manager.name),
                    "episode",
                    started,
                    time(),
                    episode=episode_id,
                    task_seed=seed,
                    version=ticket.start_version,
                )
            results[index] = trajectory
            if on_result is not None:
                on_result(trajectory)

    try:
        async with asyncio.TaskGroup() as group:
            for manager in managers:
                group.create_task(play(manager))
    except BaseExceptionGroup as errors:
        fatal, _ = errors.split((RolloutError, UsageError))
        raise (fatal or errors).exceptions[0] from None
    finally:
        deadline = asyncio.get_running_loop().time() + shutdown_timeout_s
        for manager in managers:
            manager.end()
        for manager in managers:
            for hung in await manager.join(deadline):
                logger.warning("%s did not close its environment within %g s", hung, shutdown_timeout_s)
    return [results[index] for index in range(len(seeds))]


def _failed(ticket: EpisodeTicket, failure: EpisodeFailedError) -> Trajectory:
    return Trajectory(
        prompt_ids=[],
        completion_ids=[],
        rollout_logprobs=[],
        action_mask=[],
        policy_versions=[],
        end_reason=failure.reason,
        episode_id=ticket.episode_id,
        task_id=str(ticket.task_seed),
        group_id=ticket.group_id,
        seed=ticket.task_seed,
        start_version=ticket.start_version,
        info={"failure": failure.reason, "error": str(failure.cause)},
    )
