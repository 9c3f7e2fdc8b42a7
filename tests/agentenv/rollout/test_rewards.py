"""Rewards beside the episodes: overlapped, in threads or in the loop, with a deadline; never 0 for want of one."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from agentenv import AsyncEnv
from agentenv.errors import RolloutError
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Trajectory

HANG_S = 1e7


class Env(AsyncEnv):
    """One step, with a reward of its own."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "task", {"family": "f"}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", -7.0, True, False, {"answer": action}


@contextmanager
def _controller(reward_fn: Any, **settings: Any) -> Iterator[AsyncController]:
    """In real time, for functions that run in threads."""
    config = RolloutConfig(
        **{"batch_size": 4, "num_envs": 4, "batch_timeout_s": 60.0, "max_failure_rate": 1.0, **settings}
    )
    controller = AsyncController(
        Env, LLMProxy([ScriptedModel(["a"], repeat=True)]), ByteTokenizer(), config, reward_fn=reward_fn
    )
    try:
        yield controller
    finally:
        controller.stop()
    deadline = time.monotonic() + 60.0
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("agentenv")]


async def _async_reward(trajectory: Trajectory) -> tuple[float, dict[str, Any]]:
    return 0.25, {"grade": trajectory.info["answer"]}


def _sync_reward(trajectory: Trajectory) -> tuple[float, dict[str, Any]]:
    return 0.25, {"grade": trajectory.info["answer"], "thread": threading.current_thread().name}


@pytest.mark.parametrize("reward_fn", [_async_reward, _sync_reward, functools.partial(_async_reward)])
def test_the_reward_takes_the_place_of_the_environments_and_its_info_joins(reward_fn: Any) -> None:
    with _controller(reward_fn) as controller:
        for trajectory in controller.get_batch(0):
            assert trajectory.reward == 0.25
            assert trajectory.info["grade"] == "a" and trajectory.info["family"] == "f"
            assert set(trajectory.info["timing_s"]) == {"reset", "generate", "step", "reward"}
            assert trajectory.info.get("thread", "agentenv-reward-0").startswith("agentenv-reward-")
            trajectory.validate()
        json.dumps(controller.state_dict(), allow_nan=False)


def test_functions_run_side_by_side_in_threads_up_to_the_limit() -> None:
    together = threading.Barrier(3)
    lock = threading.Lock()
    now = most = 0

    def reward(trajectory: Trajectory) -> float:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(60)  # broken unless three run at once
        with lock:
            now -= 1
        return 1.0

    with _controller(reward, batch_size=6, num_envs=6, num_reward_workers=3, asynchrony=0.0) as controller:
        assert [trajectory.reward for trajectory in controller.get_batch(0)] == [1.0] * 6
    assert most == 3


def test_a_slot_plays_its_next_episode_while_the_reward_is_computed(virtual_run: Any, tasks: Any) -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(10.0)
        return 1.0

    took = {}
    for workers in (16, 1):
        played = tasks(step_s=lambda *_: 4.0)
        run = virtual_run(played, reward_fn=reward, num_envs=1, asynchrony=0.0, num_reward_workers=workers)
        batch = run.controller.get_batch(0)
        assert [trajectory.reward for trajectory in batch] == [1.0] * 4
        # Episodes take 5 s each, one after another, whatever the rewards do.
        assert played.times("reset") == [0.0, 5.0, 10.0, 15.0]
        took[workers] = run.now
        assert run.controller.metrics()["reward_s"] == 10.0
    # The last reward begins at 20 s; in turns the first begins at 5 s.
    assert took == {16: 30.0, 1: 45.0}


def test_a_reward_that_does_not_come_is_a_failure_and_no_zero(virtual_run: Any, tasks: Any) -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(HANG_S if trajectory.seed % 2 else 1.0)
        return 1.0

    run = virtual_run(
        tasks(), reward_fn=reward, reward_timeout_s=5.0, max_retries=0, max_failure_rate=1.0, asynchrony=0.0
    )
    batch = run.controller.get_batch(0)
    assert [(t.reward, t.seed % 2) for t in batch] == [(1.0, 0)] * 4
    # Of the tasks 0 to 6 the odd ones.
    assert run.counts()["discarded"] == {"reward_timeout": 3}
    metrics = run.controller.metrics()
    # The environment did nothing wrong: it is kept, and the tokens are counted.
    assert metrics["workers_replaced"] == 0.0
    assert metrics["discarded_tokens/reward_timeout"] == 3.0
    assert metrics["failure_rate"] == 3 / 7


def test_the_task_of_a_failed_reward_is_tried_again(virtual_run: Any, tasks: Any) -> None:
    calls: list[int] = []

    async def reward(trajectory: Trajectory) -> float:
        calls.append(trajectory.seed)
        if calls.count(trajectory.seed) == 1:
            raise ConnectionError("the judge is away")
        return 1.0

    run = virtual_run(tasks(), reward_fn=reward, asynchrony=0.0, max_failure_rate=1.0)
    assert sorted(trajectory.seed for trajectory in run.controller.get_batch(0)) == [0, 1, 2, 3]
    assert run.counts()["discarded"] == {"reward_RewardError": 4}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hung_reward_gives_its_place_back(kind: str) -> None:
    gate = threading.Event()
    calls = 0

    def hangs() -> bool:
        nonlocal calls
        calls += 1
        return calls <= 2

    def sync_reward(trajectory: Trajectory) -> float:
        if hangs():
            gate.wait(120)
        return 1.0

    async def async_reward(trajectory: Trajectory) -> float:
        if hangs():
            await asyncio.sleep(120)
        return 1.0

    reward_fn: Callable[..., Any] = sync_reward if kind == "sync" else async_reward
    with _controller(
        reward_fn, num_reward_workers=2, num_envs=2, batch_size=2, reward_timeout_s=0.3, asynchrony=0.0
    ) as controller:
        assert len(controller.get_batch(0)) == 2
        # Those that hang and, on a machine that stands still, those that were caught by it.
        assert controller.counts()["discarded"] == {"reward_timeout": calls - 2} and calls >= 4
        gate.set()


class _UnhelpfulError(Exception):
    pass


def _raising(error: BaseException) -> Callable[[Trajectory], float]:
    def reward(trajectory: Trajectory) -> float:
        raise error

    return reward


def _raising_async(error: BaseException) -> Any:
    async def reward(trajectory: Trajectory) -> float:
        raise error

    return reward


@pytest.mark.parametrize("make", [_raising, _raising_async])
@pytest.mark.parametrize(
    "error", [_UnhelpfulError("no"), TimeoutError("of its own"), SystemExit(3), AssertionError()]
)
def test_whatever_a_reward_raises_is_a_reward_error(make: Any, error: BaseException) -> None:
    with _controller(make(error), max_failure_rate=0.5, failure_window=8) as controller:
        with pytest.raises(RolloutError, match=rf"with reward_RewardError.*{type(error).__name__}"):
            controller.get_batch(0)
        assert set(controller.counts()["discarded"]) <= {"reward_RewardError", "stopped"}


def test_a_reward_that_runs_out_of_an_iterator_is_a_reward_error() -> None:
    with (
        _controller(lambda t: next(iter([])), max_failure_rate=0.5, reward_timeout_s=20.0) as controller,
        pytest.raises(RolloutError, match="StopIteration"),
    ):
        controller.get_batch(0)


@pytest.mark.parametrize(
    "value", [None, "1.0", float("nan"), float("inf"), (1.0, None), (1.0, {}, 2), 1j, [1.0]]
)
def test_a_value_that_is_no_reward_is_a_reward_error(value: Any) -> None:
    with (
        _controller(lambda t: value, max_failure_rate=0.5, failure_window=8) as controller,
        pytest.raises(
            RolloutError, match=r"reward_RewardError.*must be a finite number, or \(number, dict\)"
        ),
    ):
        controller.get_batch(0)


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), 10**400])
def test_a_value_that_only_looks_like_a_number_is_a_reward_error(value: Any) -> None:
    with (
        _controller(lambda t: value, max_failure_rate=0.5, failure_window=8) as controller,
        pytest.raises(RolloutError, match="reward_RewardError"),
    ):
        controller.get_batch(0)


@pytest.mark.parametrize("value", [1, True, np.float32(1.0), np.array(1.0), np.array([1.0]), np.int64(1)])
def test_any_number_is_a_reward(value: Any) -> None:
    with _controller(lambda t: value) as controller:
        batch = controller.get_batch(0)
        assert [trajectory.reward for trajectory in batch] == [1.0] * 4
        assert all(type(trajectory.reward) is float for trajectory in batch)


def test_what_a_reward_adds_to_the_info_is_json() -> None:
    with _controller(lambda t: (1.0, {"score": np.float32(0.5), "tags": {"a"}})) as controller:
        for trajectory in controller.get_batch(0):
            trajectory.to_json()


def test_evaluation_uses_the_reward_function_too_and_failures_are_told() -> None:
    def reward(trajectory: Trajectory) -> float:
        if trajectory.seed == 2:
            raise ValueError("cannot grade this")
        return float(trajectory.seed)

    with _controller(reward) as controller:
        results = controller.evaluate(None, [1, 2, 3])
        assert [(t.reward, t.failed) for t in (results[0], results[2])] == [(1.0, False), (3.0, False)]
        assert results[1].failed and results[1].end_reason == "reward_RewardError"
        assert "cannot grade this" in results[1].info["error"]
        assert controller.counts()["produced"] == 0


def test_surplus_of_a_group_whose_reward_comes_late_is_discarded_and_not_graded_twice(
    virtual_run: Any, tasks: Any
) -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(trajectory.reward)
        return 1.0

    # Members' rewards take 1, 2 and 50 s; two make the group.
    played = tasks(reward=lambda seed, member: [1.0, 2.0, 50.0][member])
    run = virtual_run(
        played, reward_fn=reward, batch_size=2, group_size=2, redundant_members=1, asynchrony=0.0, num_steps=1
    )
    assert len(run.controller.get_batch(0)) == 2
    assert run.now == 3.0
    run.sleep(100.0)
    assert run.counts()["discarded"] == {"surplus": 1}


def test_stop_does_not_wait_for_rewards_and_books_their_episodes() -> None:
    gate = threading.Event()
    started = threading.Semaphore(0)

    def reward(trajectory: Trajectory) -> float:
        started.release()
        gate.wait(120)
        return 1.0

    with _controller(reward, asynchrony=0.0) as controller:
        controller.start()
        for _ in range(4):
            assert started.acquire(timeout=60)
        began = time.monotonic()
        controller.stop()
        assert time.monotonic() - began < 60.0
        counts = controller.counts()
        assert counts["discarded"] == {"stopped": 4} and counts["running"] == 0
        gate.set()
