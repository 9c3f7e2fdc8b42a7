"""Asynchronous, synchronous and batch rollout: what runs when, in worked numbers."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest

from agentenv import AsyncEnv
from agentenv.inference import Generation, GenerationRequest
from agentenv.testing import ScriptedModel
from agentenv.trajectory import Trajectory

# Tokens (1 s each) and step seconds per turn of tasks 0, 1 and 2.
_TOKENS = [[1, 2], [3, 1], [1, 1]]
_STEP_S = [[1.0, 5.0], [4.0, 1.0], [2.0, 2.0]]


def _three_tasks(tasks: Any) -> Any:
    return tasks(
        turns=2,
        tokens=lambda seed, member, turn: _TOKENS[seed % 3][turn],
        step_s=lambda seed, member, turn: _STEP_S[seed % 3][turn],
    )


def test_async_goes_on_while_the_trainer_trains_and_sync_does_not(virtual_run: Any, tasks: Any) -> None:
    during = {}
    for mode in ("async", "sync", "batch"):
        played = tasks(step_s=lambda seed, *_: 1.0 + seed % 3)
        run = virtual_run(played, mode=mode, asynchrony=2.0)
        during[mode] = 0
        for step in range(5):
            run.controller.get_batch(step)
            before = run.now
            run.sleep(100.0)
            during[mode] += sum(time > before for time, _, _ in played.log)
            assert run.counts()["running"] == 0
            run.controller.sync_weights({}, step + 1)
    assert during["async"] > 0 and during["sync"] == during["batch"] == 0


def test_in_sync_and_batch_nothing_is_played_before_a_batch_is_asked_for_so_that_the_state_holds_no_episode(
    virtual_run: Any, tasks: Any
) -> None:
    for mode, early in (("async", 4), ("sync", 0), ("batch", 0)):
        played = tasks()
        run = virtual_run(played, mode=mode, asynchrony=0.0)
        run.train(2)
        run.sleep(100.0)
        # Four tasks a batch; those of the third only where they may be played ahead.
        assert len(played.seeds("reset")) == 8 + early, mode
        state = run.controller.state_dict()
        assert (state["ledger"]["position"], len(state["buffer"]["groups"])) == (8 + early, early), mode
        assert len(run.controller.get_batch(2)) == 4


def test_sync_takes_the_longest_episode_and_batch_the_slowest_of_every_turn(
    virtual_run: Any, tasks: Any
) -> None:
    took = {}
    for mode in ("sync", "batch"):
        run = virtual_run(_three_tasks(tasks), mode=mode, batch_size=3)
        assert len(run.controller.get_batch(0)) == 3
        took[mode] = run.now
    # Sync: max(1 + 1 + 2 + 5, 3 + 4 + 1 + 1, 1 + 2 + 1 + 2). Batch: (3 + 4) + (2 + 5).
    assert took == {"sync": 9.0, "batch": 14.0}


def test_in_batch_mode_no_episode_goes_on_before_all_have_their_reply_and_their_step(
    virtual_run: Any, tasks: Any
) -> None:
    played = _three_tasks(tasks)
    run = virtual_run(played, mode="batch", batch_size=3)
    run.controller.get_batch(0)
    # All replies of turn 0 are there at 3 s; all steps at 7 s; replies of turn 1 at 9 s.
    assert played.times("step") == [3.0] * 3 + [9.0] * 3
    assert sorted(played.times("stepped")) == [4.0, 5.0, 7.0, 10.0, 11.0, 14.0]


@pytest.mark.parametrize("seed", range(5))
def test_over_random_latencies_batch_time_is_the_sum_of_the_slowest_and_sync_time_the_slowest_sum(
    virtual_run: Any, tasks: Any, seed: int
) -> None:
    chance = random.Random(seed)
    size, turns = 12, 6
    tokens = [[chance.randrange(1, 20) for _ in range(turns)] for _ in range(size)]
    step_s = [[float(chance.randrange(0, 30)) for _ in range(turns)] for _ in range(size)]
    played = {"turns": turns, "tokens": lambda s, _, t: tokens[s][t], "step_s": lambda s, _, t: step_s[s][t]}
    took = {}
    for mode in ("async", "sync", "batch"):
        run = virtual_run(tasks(**played), mode=mode, batch_size=size, asynchrony=0.0)
        run.controller.get_batch(0)
        took[mode] = run.now
    slowest = max(sum(tokens[s]) + sum(step_s[s]) for s in range(size))
    of_turns = sum(max(column) for rows in (tokens, step_s) for column in zip(*rows, strict=True))
    assert took["batch"] == pytest.approx(of_turns)
    assert took["sync"] == took["async"] == pytest.approx(slowest)


def test_episodes_of_different_lengths_leave_the_barrier(virtual_run: Any, tasks: Any) -> None:
    played = tasks(turns=3, step_s=lambda seed, member, turn: 1.0 + seed)
    run = virtual_run(played, mode="batch", batch_size=2, max_turns=2, num_envs=2)
    batch = run.controller.get_batch(0)
    assert [trajectory.end_reason for trajectory in batch] == ["max_turns"] * 2
    assert run.now == 6.0


def test_in_batch_mode_a_failed_episode_holds_up_nobody_and_is_tried_again_alone(
    virtual_run: Any, tasks: Any
) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if seed == 1 and member == 0:
            raise OSError("dead")
        return 2.0

    run = virtual_run(tasks(turns=2, step_s=step_s), mode="batch", batch_size=3, num_envs=4)
    assert sorted(trajectory.seed for trajectory in run.controller.get_batch(0)) == [0, 1, 2]
    assert run.counts()["discarded"] == {"step_OSError": 1}


@pytest.mark.parametrize(
    ("mode", "reward_at", "took"), [("sync", [7.0, 10.0, 10.0], 12.0), ("batch", [14.0] * 3, 16.0)]
)
def test_rewards_come_as_episodes_end_or_in_batch_mode_after_all_have(
    virtual_run: Any, tasks: Any, mode: str, reward_at: list[float], took: float
) -> None:
    began_s: list[float] = []

    async def reward(trajectory: Trajectory) -> float:
        began_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(2.0)
        return 1.0

    played = _three_tasks(tasks)
    run = virtual_run(played, mode=mode, batch_size=3, reward_fn=reward)
    run.controller.get_batch(0)
    ends = {seed: played.times("stepped", seed)[-1] for seed in range(3)}
    assert sorted(began_s) == (sorted(ends.values()) if mode == "sync" else reward_at)
    assert run.now == (11.0 if mode == "sync" else took)


@pytest.mark.parametrize(
    "num_envs",
    [2, 1],
)
def test_in_batch_mode_rewards_wait_for_episodes_that_have_not_begun(
    virtual_run: Any, tasks: Any, num_envs: int
) -> None:
    rewarded: list[float] = []

    async def reward(trajectory: Trajectory) -> float:
        rewarded.append(asyncio.get_running_loop().time())
        return 1.0

    played = tasks(step_s=lambda *_: 1.0)
    run = virtual_run(played, mode="batch", batch_size=4, num_envs=num_envs, reward_fn=reward)
    run.controller.get_batch(0)
    assert min(rewarded) >= max(played.times("stepped"))


def test_in_batch_mode_nothing_new_starts_before_the_wave_has_ended(virtual_run: Any, tasks: Any) -> None:
    # Even tasks are filtered; their successors wait for the odd ones, which take longer.
    played = tasks(
        step_s=lambda seed, *_: 1.0 + 8.0 * (seed % 2),
        reward=lambda seed, member: float(member) if seed % 2 else 0.0,
    )
    run = virtual_run(played, mode="batch", batch_size=4, group_size=2, filter_zero_variance=True)
    assert {trajectory.seed for trajectory in run.controller.get_batch(0)} == {1, 3}
    events = [(time, what) for time, what, _ in played.log if what in ("reset", "stepped")]
    waves = 0
    playing = 0
    for (_, before), (_, what) in pairwise([(0.0, "stepped"), *events]):
        if what == "reset":
            waves += before == "stepped"
            assert before == "reset" or playing == 0
        playing += 1 if what == "reset" else -1
    # Tasks 0 and 1 take a token and 9 s together; task 2 alone 2 s, in vain; task 3 alone 10 s.
    assert waves == 3 and run.now == 22.0


def test_after_a_batch_in_batch_mode_the_next_wave_is_a_whole_one(virtual_run: Any, tasks: Any) -> None:
    played = tasks(step_s=lambda seed, *_: float(seed % 4))
    run = virtual_run(played, mode="batch", batch_size=4, num_envs=8)
    run.train(4, train_s=7.0)
    # A token and the slowest step, then 7 s of training.
    assert sorted(set(played.times("reset"))) == [0.0, 11.0, 22.0, 33.0]


def test_in_batch_mode_a_task_that_is_given_up_is_replaced_in_the_next_wave(
    virtual_run: Any, tasks: Any
) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if seed == 0:
            raise OSError("dead")
        return 3.0

    played = tasks(turns=3, step_s=step_s)
    run = virtual_run(played, mode="batch", batch_size=3, num_envs=8, max_retries=0)
    assert sorted(trajectory.seed for trajectory in run.controller.get_batch(0)) == [1, 2, 3]
    # Task 0 dies at 1 s; the others' three turns of 4 s each end at 12 s, and only then is there room.
    assert played.times("reset", 3) == [12.0]
    assert run.now == 24.0


def test_in_batch_mode_the_lock_step_holds_where_nothing_yields_before_the_first_step(
    virtual_run: Any,
) -> None:
    class AtOnce(ScriptedModel):
        async def generate(self, request: GenerationRequest) -> Generation:
            return Generation([65], [-0.5], [self.version], "stop")

    class Env(AsyncEnv):
        made = 0

        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.turn, self.slow_turn = 0, Env.made % 2
            Env.made += 1
            return "task", {}

        async def step(self, action: str) -> Any:
            await asyncio.sleep(9.0 if self.turn == self.slow_turn else 1.0)
            self.turn += 1
            return "more", 1.0, self.turn == 2, False, {}

    # One is slow in its first turn, the other in its second: 9 + 9 s in lock-step.
    engines = [AtOnce(["a"], repeat=True)]
    run = virtual_run(env=Env, mode="batch", batch_size=2, num_envs=2, engines=engines)
    run.controller.get_batch(0)
    assert run.now == 18.0
