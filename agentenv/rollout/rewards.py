"""Rewards that are computed apart from the environment, as soon as an episode has ended and beside those still running.

Invariants:

* A reward comes by its deadline or the episode fails at the stage "reward"; it never becomes 0.
* At most ``num_reward_workers`` are computed side by side; one that hangs gives its place back at its deadline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast

from agentenv.errors import AgentEnvError, EpisodeTimeoutError, RewardError
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.rollout.workers.call_thread import CallThread
from agentenv.rollout.workers.contract import is_cancelled
from agentenv.rollout.workers.wire import json_able
from agentenv.trace import NO_TRACE, Trace, Track
from agentenv.trajectory import Trajectory

Reward = float | tuple[float, dict[str, Any]]
RewardFn = Callable[[Trajectory], Reward] | Callable[[Trajectory], Awaitable[Reward]]
"""The reward of an ended episode, and what to add to its info; a plain function or a coroutine function."""


class RewardPool:
    """Computes rewards in threads, or in the event loop where the function is a coroutine function.

    Args:
        reward_fn: see :data:`RewardFn`.
        config: ``reward_timeout_s`` and ``num_reward_workers``.
        trace: of the run.
    """

    def __init__(self, reward_fn: RewardFn, config: RolloutConfig, *, trace: Trace = NO_TRACE) -> None:
        self._reward_fn = reward_fn
        self._is_async = inspect.iscoroutinefunction(reward_fn)
        self._timeout_s = config.reward_timeout_s
        self._places = asyncio.Semaphore(config.num_reward_workers)
        self._trace = trace
        self._free_tracks = [
            Track("rewards", f"reward {n}") for n in reversed(range(config.num_reward_workers))
        ]
        """Of the places that compute none."""
        self._threads: list[CallThread] = []
        """Those without a call."""
        self._names = itertools.count()

    async def reward(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its reward: that of the function in place of the environment's.

        Raises:
            EpisodeFailedError: no reward; the cause says why.
        """
        async with self._places:
            loop = asyncio.get_running_loop()
            started, track = loop.time(), self._free_tracks.pop()
            try:
                value = await self._within(trajectory, started + self._timeout_s)
                reward, info = _checked(value)
            except AgentEnvError as error:
                raise EpisodeFailedError("reward", error) from error
            finally:
                self._trace.span(track, "reward", started, loop.time(), episode=trajectory.episode_id)
                self._free_tracks.append(track)
            timing = {
                **trajectory.info.get("timing_s", {}),
                "reward": round(loop.time() - started, 6),
            }
        return dataclasses.replace(
            trajectory, reward=reward, info={**trajectory.info, **info, "timing_s": timing}
        )

    def end(self) -> None:
        """Have the threads end; does not wait."""
        for thread in self._threads:
            thread.end()

    async def _within(self, trajectory: Trajectory, deadline: float) -> Any:
        what = f"the reward of episode {trajectory.episode_id!r}"
        timeout = asyncio.timeout_at(deadline)
        try:
            if self._is_async:
                value: Any = self._reward_fn(trajectory)
            else:
                value = await self._in_thread(trajectory, deadline, what)
            if inspect.isawaitable(value):
                async with timeout:
                    value = await value
            return value
        except AgentEnvError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            if timeout.expired():
                raise EpisodeTimeoutError("reward", f"{what} did not come before its deadline") from error
            raise RewardError(f"{what} raised {type(error).__name__}: {error}") from error

    async def _in_thread(self, trajectory: Trajectory, deadline: float, what: str) -> Any:
        thread = self._threads.pop() if self._threads else CallThread(f"agentenv-reward-{next(self._names)}")
        try:
            return await thread.call(lambda: self._reward_fn(trajectory), deadline, stage="reward", what=what)
        except asyncio.CancelledError:
            thread.end()
            raise
        finally:
            if not thread.has_ended:
                self._threads.append(thread)


def _checked(value: Any) -> tuple[float, dict[str, Any]]:
    reward, info = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    try:
        number = float(reward.item() if hasattr(reward, "item") else reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(reward, (str, bytes)) or not math.isfinite(number) or not isinstance(info, dict):
        raise RewardError(f"reward_fn returned {value!r}, must be a finite number, or (number, dict)")
    added = cast("dict[str, Any]", json_able(info))
    added.pop("failure", None)
    return number, added
