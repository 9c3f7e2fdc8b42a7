"""When failures stop a run: always where nothing works, never for the sake of one broken slot."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentenv import AsyncEnv
from agentenv.errors import RolloutError
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.rollout.failures import FailurePolicy
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import SimulatedEngine
from agentenv.simulation.environment import SimulatedTokenizer
from agentenv.trajectory import Trajectory

Behaviour = Callable[[int, int], float]
"""Seconds of the only step of a slot's n-th episode; negative: it raises after as many."""


def _slot() -> int:
    task = asyncio.current_task()
    assert task is not None
    frame = task.get_coro().cr_frame  # type: ignore[union-attr]
    return int(frame.f_locals["self"].name.removeprefix("slot-"))


class _Made:
    """Makes environments that know their slots."""

    def __init__(self, step_s: Behaviour, *, reset_fails: bool = False) -> None:
        self.step_s = step_s
        self.reset_fails = reset_fails
        self.episodes: Counter[int] = Counter()
        self.ends: list[tuple[float, int]] = []

    def __call__(self) -> AsyncEnv:
        return _Env(self, _slot())


class _Env(AsyncEnv):
    max_turns = 1

    def __init__(self, made: _Made, slot: int) -> None:
        self._made, self._slot = made, slot

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        if self._made.reset_fails:
            raise OSError("no sandbox")
        return "1", {"slot": self._slot}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        number = self._made.episodes[self._slot]
        self._made.episodes[self._slot] += 1
        seconds = self._made.step_s(self._slot, number)
        await asyncio.sleep(abs(seconds))
        self._made.ends.append((asyncio.get_running_loop().time(), self._slot))
        if seconds < 0.0:
            raise OSError("dead")
        return "", 1.0, True, False, {}


MakeController = Callable[..., tuple[AsyncController, VirtualLoop]]


@pytest.fixture
def make_controller() -> Iterator[MakeController]:
    controllers: list[AsyncController] = []

    def make(env_fn: Any, *, reward_fn: Any = None, **settings: Any) -> tuple[AsyncController, VirtualLoop]:
        runner = VirtualLoop()
        hours = {f"{name}_timeout_s": 36_000.0 for name in ("step", "episode", "batch")}
        config = RolloutConfig(**{"worker": "inline", **hours, **settings})
        controllers.append(
            AsyncController(
                env_fn,
                LLMProxy([SimulatedEngine()]),
                SimulatedTokenizer(),
                config,
                reward_fn=reward_fn,
                loop_factory=lambda: runner,
            )
        )
        return controllers[-1], runner

    yield make
    for controller in controllers:
        controller.stop()


def _failures(controller: AsyncController) -> int:
    discarded = controller.counts()["discarded"]
    return sum(number for reason, number in discarded.items() if reason != "stopped")


@pytest.mark.parametrize("limit", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("num_envs", "batch_size", "group_size"),
    [(1, 1, 1), (1, 8, 4), (2, 4, 1), (32, 1, 1), (32, 2, 1), (64, 8, 4), (300, 2, 1), (288, 256, 8)],
)
@pytest.mark.parametrize("mode", ["async", "batch"])
def test_a_run_in_which_nothing_works_stops_after_a_window_of_failures(
    make_controller: MakeController, limit: float, num_envs: int, batch_size: int, group_size: int, mode: str
) -> None:
    made = _Made(lambda slot, number: -1.0)
    controller, _ = make_controller(
        made,
        num_envs=num_envs,
        batch_size=batch_size,
        group_size=group_size,
        mode=mode,
        max_failure_rate=limit,
    )
    with pytest.raises(RolloutError, match=r"episodes failed .*step_OSError"):
        controller.get_batch(0)
    # What fails in the same moment as the last one is counted, too.
    assert _failures(controller) <= max(controller.config.failure_window, num_envs)


@pytest.mark.parametrize("reset_retries", [0, 2])
@pytest.mark.parametrize("num_envs", [1, 3, 40])
def test_resets_that_all_fail_stop_the_run(
    make_controller: MakeController, reset_retries: int, num_envs: int
) -> None:
    made = _Made(lambda slot, number: 0.0, reset_fails=True)
    controller, _ = make_controller(made, num_envs=num_envs, batch_size=4, reset_retries=reset_retries)
    with pytest.raises(RolloutError, match="reset_OSError"):
        controller.get_batch(0)
    assert _failures(controller) <= controller.config.failure_window


@pytest.mark.parametrize("num_envs", [1, 3, 40])
def test_rewards_that_all_fail_stop_the_run(make_controller: MakeController, num_envs: int) -> None:
    async def reward(trajectory: Trajectory) -> float:
        raise ConnectionError("no judge")

    made = _Made(lambda slot, number: 1.0)
    controller, _ = make_controller(made, num_envs=num_envs, batch_size=4, reward_fn=reward)
    with pytest.raises(RolloutError, match="reward_RewardError"):
        controller.get_batch(0)
    assert _failures(controller) <= controller.config.failure_window


@pytest.mark.parametrize("limit", [0.5, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_failures_of_very_different_length_stop_the_run_when_nothing_works(
    make_controller: MakeController, limit: float, seed: int
) -> None:
    # A few slots fail at once and fill the window, all others much later, at times of their own.
    chance = random.Random(seed)
    made = _Made(lambda slot, number: -0.001 if slot < 4 else -chance.uniform(50.0, 1000.0))
    controller, runner = make_controller(
        made, num_envs=100, batch_size=100, max_failure_rate=limit, max_retries=2000, batch_timeout_s=1500.0
    )
    with pytest.raises(RolloutError, match="episodes failed"):
        controller.get_batch(0)
    assert runner.now <= 1000.0


@pytest.mark.parametrize(
    ("num_envs", "limit"),
    [
        (2, 0.5),
        (2, 0.9),
        (3, 0.5),
        (8, 0.5),
        (64, 0.5),
        (64, 0.9),
    ],
)
def test_one_broken_slot_does_not_stop_the_run(
    make_controller: MakeController, num_envs: int, limit: float
) -> None:
    made = _Made(lambda slot, number: -0.001 if slot == 0 else 1000.0)
    controller, _ = make_controller(
        made,
        num_envs=num_envs,
        batch_size=num_envs,
        max_failure_rate=limit,
        max_retries=10_000,
    )
    for step in range(2):
        assert len(controller.get_batch(step)) == num_envs
        controller.sync_weights({}, step + 1)
    assert made.episodes[0] > 64


def test_one_broken_slot_whose_rewards_fail_does_not_stop_the_run(make_controller: MakeController) -> None:
    # Its episodes end at once, and nothing can be said about what they did.
    async def reward(trajectory: Trajectory) -> float:
        if trajectory.info["slot"] == 0:
            raise ValueError("the answer is empty")
        return 1.0

    made = _Made(lambda slot, number: 1.0 if slot == 0 else 200.0)
    controller, _ = make_controller(
        made, num_envs=32, batch_size=32, max_retries=100_000, reward_fn=reward, asynchrony=0.0
    )
    assert len(controller.get_batch(0)) == 32


def test_many_episodes_lost_at_once_stop_no_run_but_losses_again_and_again_do() -> None:
    policy = FailurePolicy(RolloutConfig(num_envs=16, failure_window=16))
    for slot in range(16):
        assert policy.failure("step_SandboxLostError", "the service is gone", slot=f"slot-{slot}") is None
    stops = [
        policy.failure("step_SandboxLostError", "the service is gone", slot=f"slot-{slot}")
        for slot in range(16)
    ]
    assert stops[-1] is not None and "16 of the last 16 episodes failed" in stops[-1]


def test_the_failure_rate_is_that_of_the_last_window() -> None:
    policy = FailurePolicy(RolloutConfig(batch_size=4, num_envs=4, failure_window=16, max_failure_rate=1.0))
    rng, outcomes = random.Random(0), []
    for _ in range(100):
        outcomes.append(rng.random() < 0.3)
        if outcomes[-1]:
            policy.failure("step_EnvError", "it broke", slot="slot-0")
        else:
            policy.success(1.0, slot="slot-0")
        window = outcomes[-16:]
        assert policy.rate == sum(window) / len(window)
