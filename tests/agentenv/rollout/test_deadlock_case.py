"""What must not block a batch: a dead environment in any place, and other things that end without saying so."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv import AsyncEnv
from agentenv.errors import RolloutError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.simulation.environment import SimulatedTokenizer
from agentenv.trajectory import Trajectory

_PATH = Path(__file__).parents[3] / "benchmarks" / "deadlock.py"
_SPEC = importlib.util.spec_from_file_location("deadlock", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
deadlock: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["deadlock"] = deadlock
_SPEC.loader.exec_module(deadlock)


@pytest.mark.parametrize("case", deadlock.cases(stride=288), ids=str)
def test_one_dead_environment_blocks_no_batch(case: Any) -> None:
    result = deadlock.play(case, steps=2)
    assert result.error == ""
    assert result.longest_step_s <= case.longest_step_s


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_one_dead_environment_among_many_slow_ones_does_not_stop_the_run(alpha: float) -> None:
    result = deadlock.play(deadlock.Case(100, "death", alpha, 0, 300.0))
    assert result.error == ""


class Env(AsyncEnv):
    """One turn of a second."""

    max_turns = 1

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return "1", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(1.0)
        return "", 1.0, True, False, {}


def _controller(
    runner: VirtualLoop, *, ledger: Any = None, engine: Any = None, reward_fn: Any = None, **options: Any
) -> AsyncController:
    config = RolloutConfig(**{"batch_size": 4, "num_envs": 4, "batch_timeout_s": 1000.0, **options})
    return AsyncController(
        Env,
        LLMProxy([engine or SimulatedEngine()]),
        SimulatedTokenizer(),
        config,
        task_seeds=ledger,
        reward_fn=reward_fn,
        loop_factory=lambda: runner,
    )


class BrokenLedger:
    """Raises at its fifth task."""

    def __init__(self) -> None:
        self._handed_out = 0

    def next_seed(self) -> int:
        self._handed_out += 1
        if self._handed_out > 4:
            raise OSError("the ledger's file is gone")
        return self._handed_out

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_a_ledger_that_raises_reaches_the_trainer() -> None:
    runner = VirtualLoop()
    with _controller(runner, ledger=BrokenLedger(), num_envs=2, asynchrony=0.0, batch_size=8) as controller:
        with pytest.raises((RolloutError, OSError), match="the ledger's file is gone"):
            controller.get_batch(0)
        assert runner.now < 10.0


def test_a_batch_after_the_last_step_is_refused_at_once() -> None:
    runner = VirtualLoop()
    with _controller(runner, num_steps=1) as controller:
        controller.get_batch(0)
        controller.sync_weights({}, 1)
        with pytest.raises((UsageError, RolloutError), match="num_steps"):
            controller.get_batch(1)
        assert runner.now < 10.0


def test_a_slot_whose_episode_was_surplus_does_not_rest() -> None:
    class Uneven(SimulatedEngine):
        def __init__(self) -> None:
            super().__init__(
                DecodeModel(base_s=1.0), length=lambda request: 100 if _group(request) % 2 else 1
            )

    runner = VirtualLoop()
    with _controller(runner, engine=Uneven(), num_envs=8, redundant_groups=4, asynchrony=0.0) as controller:
        for step in range(12):
            controller.get_batch(step)
            controller.sync_weights({}, step + 1)
        # A step takes 2 s: one for the token and one in the environment. Rests of up to 5 s would be on top.
        assert runner.now <= 12 * 2.0 + 0.5
        assert not controller._scheduler._player._failed_in_a_row


def _group(request: Any) -> int:
    return int(request.request_id[1:].split("-")[0])


def test_in_batch_mode_with_few_slots_no_reward_comes_before_all_have_ended() -> None:
    events: list[str] = []

    async def reward(trajectory: Trajectory) -> float:
        events.append("reward")
        return 1.0

    class Noting(Env):
        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
            result = await super().step(action)
            events.append("end")
            return result

    runner = VirtualLoop()
    config = RolloutConfig(batch_size=4, num_envs=1, mode="batch", num_steps=1)
    controller = AsyncController(
        Noting,
        LLMProxy([SimulatedEngine()]),
        SimulatedTokenizer(),
        config,
        reward_fn=reward,
        loop_factory=lambda: runner,
    )
    with controller:
        controller.get_batch(0)
    assert events == ["end"] * 4 + ["reward"] * 4
