"""What slots do after failures, surplus and the ledger's end, and what the metrics then say."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agentenv import BaseEnv
from agentenv.errors import RolloutError
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.rollout.run_state import RunState
from agentenv.simulation.engine import SimulatedEngine
from agentenv.simulation.environment import SimulatedTokenizer


class _Gated(BaseEnv):
    """The first step of task 0 waits for the gate."""

    worker = "thread"
    max_turns = 1

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate
        self._seed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self._seed = seed or 0
        return "1", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._seed == 0:
            self._gate.wait(120.0)
        return "", 1.0, True, False, {}


def test_a_slot_whose_cancelled_call_goes_on_gets_no_episode_before_it_is_over() -> None:
    gate = threading.Event()
    config = RolloutConfig(batch_size=2, redundant_groups=1, num_envs=3, asynchrony=0.0, batch_timeout_s=60.0)
    controller = AsyncController(
        lambda: _Gated(gate),
        LLMProxy([SimulatedEngine()]),
        SimulatedTokenizer(),
        config,
        task_seeds=iter(range(100)),
    )
    with controller:
        try:
            assert {trajectory.seed for trajectory in controller.get_batch(0)} == {1, 2}
            controller.sync_weights({}, 1)
            # Task 0 holds up a second slot; the third one plays the others.
            assert {trajectory.seed for trajectory in controller.get_batch(1)} == {3, 4}
        finally:
            gate.set()


def test_the_end_of_the_ledger_is_noticed_by_a_slot_that_comes_back_from_its_rest(
    virtual_run: Any, tasks: Any
) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        raise OSError("dead")

    run = virtual_run(tasks(step_s=step_s), batch_size=2, num_envs=1, max_retries=0, task_seeds=iter([7]))
    with pytest.raises(RolloutError, match="no task is left for step 0"):
        run.controller.get_batch(0)
    assert run.now < 5.0


def test_failed_episodes_are_none_of_those_that_were_offered(virtual_run: Any, tasks: Any) -> None:
    played = tasks(
        turns=2,
        step_s=lambda seed, member, turn: 1.0,
        reward=lambda seed, member: 1 / 0 if seed == 1 and not member else 1.0,
        tokens=lambda seed, member, turn: 30 if seed == 1 and not member else 1,
    )
    run = virtual_run(played, asynchrony=0.0)
    run.controller.get_batch(0)
    # Two turns of a token and a step; the failed episode took 62 s.
    assert run.now > 62.0
    assert run.controller.metrics()["offered_episode_s"] == run.controller.metrics()["episode_s"] == 4.0


def test_a_group_whose_last_member_fails_has_its_time(virtual_run: Any, tasks: Any) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if turn == 1 and member == 1:
            raise OSError("dead")
        return 1.0 if turn == 0 and member == 0 else 4.0

    run = virtual_run(
        tasks(turns=2, step_s=step_s), batch_size=2, group_size=2, max_retries=0, asynchrony=0.0
    )
    assert len(run.controller.get_batch(0)) == 1
    # The good member ends at 7 s, as does the failed one's first turn and second reply; the rest is nothing.
    assert run.controller.metrics()["group_s"] == run.now > 0.0


def test_a_slot_whose_cancelled_call_is_over_plays_what_waits_for_it() -> None:
    gate = threading.Event()
    config = RolloutConfig(batch_size=1, num_envs=1, asynchrony=0.0, on_stale="abort", batch_timeout_s=60.0)
    controller = AsyncController(
        lambda: _Gated(gate),
        LLMProxy([SimulatedEngine()]),
        SimulatedTokenizer(),
        config,
        task_seeds=iter(range(100)),
    )
    with controller:
        controller.start()
        controller.sync_weights({}, 1)
        opening = threading.Timer(0.3, gate.set)
        opening.start()
        try:
            assert [trajectory.start_version for trajectory in controller.get_batch(1)] == [1]
        finally:
            gate.set()
            opening.join()


def test_a_slot_that_fails_again_and_again_rests_longer_and_longer(virtual_run: Any, tasks: Any) -> None:
    run = virtual_run(
        tasks(step_s=lambda *_: 1 / 0, tokens=lambda *_: 1),
        num_envs=1,
        max_failure_rate=1.0,
        batch_timeout_s=105.0,
    )
    with pytest.raises(RolloutError, match="no batch"):
        run.controller.get_batch(0)
    # A second each for the token; rests of 0.02 s, doubling, to 5 s.
    assert 20 <= run.counts()["produced"] <= 30


def test_tokens_of_episodes_whose_rewards_never_came_are_counted_at_the_end(
    virtual_run: Any, tasks: Any
) -> None:
    async def reward(trajectory: Any) -> float:
        return 1.0

    played = tasks(tokens=lambda seed, *_: 3 if seed < 2 else 10**5)
    run = virtual_run(played, mode="batch", batch_size=4, num_envs=2, reward_fn=reward, batch_timeout_s=10.0)
    with pytest.raises(RolloutError, match="no batch"):
        run.controller.get_batch(0)
    # Two have ended and wait for the other two.
    assert run.counts()["running"] == 4
    run.controller.stop()
    assert run.controller.counts()["discarded"] == {"stopped": 4}
    assert run.controller.metrics()["discarded_tokens/stopped"] == 6.0


def test_only_the_first_reason_ends_a_run_and_a_stop_does_not_replace_it() -> None:
    run = RunState()
    died: list[Exception | None] = []
    run.on_death.append(lambda: died.append(run.fatal))
    first = RolloutError("first")
    run.die(first, KeyError("why"))
    run.die(RolloutError("second"))
    assert died == [first] and isinstance(first.__cause__, KeyError)
    run.stop()
    assert run.fatal is first and run.is_stopped


def test_background_tasks_are_forgotten_when_they_have_ended() -> None:
    async def main() -> None:
        run = RunState()
        for handled in (False, True):
            await run.in_background(asyncio.sleep(0), handled=handled)
            await asyncio.sleep(0)
            assert not run.background
        assert run.fatal is None

    asyncio.run(main())
