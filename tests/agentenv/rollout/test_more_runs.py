"""Odd combinations in whole runs: wrong steps, pauses, versions that jump, the last step, tasks slow by nature."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.trajectory import Trajectory


def test_a_batch_for_a_step_that_the_weights_are_too_old_for_is_refused_and_costs_nothing(
    virtual_run: Any, tasks: Any
) -> None:
    run = virtual_run(tasks(step_s=lambda *_: 1.0), asynchrony=1.0)
    run.controller.start()
    run.sleep(5.0)
    before = run.counts()
    assert before["buffered"] == 8
    with pytest.raises(UsageError, match="step 5 needs episodes of version >= 4"):
        run.controller.get_batch(5)
    assert run.counts() == before
    assert len(run.controller.get_batch(0)) == 4


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("redundant_groups", [0, 2])
@pytest.mark.parametrize("group_size", [1, 2])
def test_steps_that_are_left_out_give_full_and_fresh_batches(
    virtual_run: Any, tasks: Any, alpha: float, redundant_groups: int, group_size: int
) -> None:
    played = tasks(turns=2, step_s=lambda seed, member, _: 1.0 + (3 * seed + member) % 7)
    run = virtual_run(
        played, asynchrony=alpha, redundant_groups=redundant_groups, group_size=group_size, num_envs=24
    )
    for step in (0, 2, 4, 7):
        run.controller.sync_weights({}, step)
        batch = run.controller.get_batch(step)
        assert len(batch) == 4
        assert all(step - alpha <= trajectory.start_version <= step for trajectory in batch)
        run.sleep(3.0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("redundant_groups", [0, 2])
def test_versions_that_jump_by_two_hold_up_nothing(
    virtual_run: Any, tasks: Any, alpha: float, redundant_groups: int
) -> None:
    run = virtual_run(
        tasks(turns=2, step_s=lambda seed, *_: 1.0 + seed % 7),
        asynchrony=alpha,
        redundant_groups=redundant_groups,
    )
    for step in range(6):
        batch = run.controller.get_batch(step)
        assert len(batch) == 4
        assert all(trajectory.start_version >= step - alpha for trajectory in batch)
        run.controller.sync_weights({}, 2 * step + 2)
    # Two turns take at most 16 s.
    assert run.now <= 6 * 16.0


def test_after_the_last_batch_nothing_runs(virtual_run: Any, tasks: Any) -> None:
    played = tasks(step_s=lambda seed, *_: 300.0 if seed % 5 == 0 else 1.0 + seed % 7)
    run = virtual_run(played, redundant_groups=3, asynchrony=2.0, num_steps=8)
    run.train(8)
    assert run.counts()["running"] == 0


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("group_size", [1, 2])
def test_stale_episodes_with_rewards_in_flight_are_given_up_in_any_state(
    virtual_run: Any, tasks: Any, alpha: float, group_size: int
) -> None:
    cancelled = []

    async def reward(trajectory: Trajectory) -> float:
        try:
            await asyncio.sleep(5.0 + trajectory.seed % 13)
        except asyncio.CancelledError:
            cancelled.append(trajectory.episode_id)
            raise
        return 1.0

    run = virtual_run(
        tasks(turns=2, step_s=lambda seed, member, _: float((3 * seed + member) % 17)),
        engines=[SimulatedEngine(DecodeModel(1.0), tokens_per_id=1) for _ in range(3)],
        on_stale="abort",
        on_sync="restart",
        prompt_replication=False,
        group_size=group_size,
        asynchrony=alpha,
        num_envs=24,
        num_reward_workers=3,
        reward_fn=reward,
        num_steps=12,
    )
    for step, batch in enumerate(run.train(12, train_s=6.0)):
        assert len(batch) == 4
        assert all(trajectory.start_version >= step - alpha for trajectory in batch)
    counts = run.counts()
    assert counts["running"] == counts["buffered"] == 0
    assert cancelled and counts["discarded"]["stale"] >= len(cancelled)
    router = run.controller._proxy._router
    assert router._load == router._homes == [0, 0, 0] and not router._home and not router._shared


def test_a_ledger_that_ends_gives_its_surplus_tasks_before_the_run_does(virtual_run: Any, tasks: Any) -> None:
    run = virtual_run(
        tasks(step_s=lambda seed, *_: 1.0 + seed % 5), task_seeds=iter(range(12)), redundant_groups=2
    )
    trained = [trajectory.seed for batch in run.train(3, train_s=2.0) for trajectory in batch]
    assert sorted(trained) == list(range(12))


def test_an_evaluation_while_the_engines_are_suspended_is_refused(virtual_run: Any, tasks: Any) -> None:
    run = virtual_run(tasks(), generate_timeout_s=5.0)
    run.controller.start()
    run.controller.suspend()
    with pytest.raises(UsageError, match="suspend"):
        run.controller.evaluate(None, [1, 2, 3])


def test_redundancy_helps_in_the_long_run_where_tasks_are_slow_by_nature(
    virtual_run: Any, tasks: Any
) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        return 10.0 * random.Random(seed).lognormvariate(0.0, 1.0)

    took = []
    for redundant_groups in (0, 4):
        run = virtual_run(
            tasks(step_s=step_s),
            batch_size=32,
            num_envs=64,
            redundant_groups=redundant_groups,
            asynchrony=0.0,
        )
        run.train(40)
        before = run.now
        run.train(20, start=40)
        took.append(run.now - before)
    assert took[1] < 0.7 * took[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "batch", "num_envs": 3},
        {"mode": "batch", "group_size": 2, "num_envs": 8},
        {"mode": "sync", "num_envs": 5},
        {"asynchrony": 1.0, "group_size": 2},
        {"asynchrony": 0.0, "redundant_groups": 2},
        {"asynchrony": 2.0, "redundant_groups": 2, "group_size": 2, "redundant_members": 1, "num_envs": 32},
        {"asynchrony": 2.0, "redundant_groups": 1, "on_stale": "abort"},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_goes_on_from_any_moment_loses_no_task_and_trains_none_twice(
    virtual_run: Any, tasks: Any, settings: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)

    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(float(trajectory.seed % 7))
        return 1.0

    def make() -> Any:
        played = tasks(turns=2, step_s=lambda s, member, turn: float((5 * s + 3 * member + turn) % 11))
        return virtual_run(played, reward_fn=reward, num_steps=6, max_retries=100, **settings)

    trained: list[int] = []
    run = make()
    produced = 0
    for step in range(6):
        for _ in range(chance.randrange(3)):
            run.controller.start()
            run.sleep(chance.uniform(0.0, 20.0))
            state = json.loads(json.dumps(run.controller.state_dict()))
            run = make()
            run.controller.load_state_dict(state)
            run.controller.sync_weights({}, step)
            counts = run.counts()
            assert counts["running"] == 0 and counts["produced"] >= produced
            produced = counts["produced"]
        batch = run.controller.get_batch(step)
        assert len(batch) == 4
        names = [trajectory.episode_id for trajectory in batch]
        assert len(set(names)) == len(names)
        trained += {trajectory.seed for trajectory in batch}
        if chance.random() < 0.5:
            # While the surplus of the batch is still being cancelled.
            state = json.loads(json.dumps(run.controller.state_dict()))
            run = make()
            run.controller.load_state_dict(state)
        run.controller.sync_weights({}, step + 1)
    assert len(set(trained)) == len(trained)
    left = run.controller.state_dict()["buffer"]
    waiting = [group["task_seed"] for group in left["groups"]] + [seed for seed, _ in left["again"]]
    assert len(set(waiting)) == len(waiting) and not set(waiting) & set(trained)
    assert set(trained) | set(waiting) == set(range(len(trained) + len(waiting)))
