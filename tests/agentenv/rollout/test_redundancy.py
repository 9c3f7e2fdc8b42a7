"""Redundant groups and members: the first to finish make the batch, the others are cancelled, no prompt is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from agentenv import AsyncEnv

HANG_S = 1e7


def _dead_env(position: int) -> type[AsyncEnv]:
    """Environments of which the ``position``-th made, and none made later, is dead at its first step."""

    class Env(AsyncEnv):
        made = 0

        def __init__(self) -> None:
            Env.made += 1
            self.is_dead = Env.made == position

        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return "1", {}

        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self.is_dead:
                raise OSError("dead at its first step")
            await asyncio.sleep(1.0)
            return "", 1.0, True, False, {}

    return Env


def _seeds(batch: list[Any]) -> list[int]:
    return sorted(trajectory.seed for trajectory in batch)


def test_the_first_groups_to_finish_make_the_batch_and_the_surplus_ends_at_once(
    virtual_run: Any, tasks: Any
) -> None:
    step_s = {0: 10.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 20.0}
    played = tasks(step_s=lambda seed, *_: step_s.get(seed, 1.0))
    run = virtual_run(played, asynchrony=0.0, redundant_groups=2)
    # One token at 1 s, then the step.
    assert _seeds(run.controller.get_batch(0)) == [1, 2, 3, 4]
    assert run.now == 5.0
    counts = run.counts()
    assert counts["running"] == 0 and counts["buffered"] == 0
    assert counts["discarded"] == {"surplus": 2}
    assert played.times("cancelled") == [5.0, 5.0]


def test_surplus_tasks_come_again_before_new_ones(virtual_run: Any, tasks: Any) -> None:
    played = tasks(step_s=lambda seed, member, turn: 50.0 if seed in (1, 4) and member == 0 else 1.0)
    run = virtual_run(played, asynchrony=0.0, redundant_groups=2)
    first, second = run.train(2)
    assert _seeds(first) == [0, 2, 3, 5]
    assert played.seeds("reset")[:12] == [0, 1, 2, 3, 4, 5, 1, 4, 6, 7, 8, 9]
    assert {1, 4} <= set(_seeds(second))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"redundant_groups": 3},
        {"redundant_groups": 2, "group_size": 2, "redundant_members": 1},
        {"redundant_members": 2, "group_size": 4},
        {"redundant_groups": 2, "on_stale": "abort"},
    ],
)
def test_no_prompt_is_skipped_and_none_is_trained_twice(
    virtual_run: Any, tasks: Any, alpha: float, settings: dict[str, Any]
) -> None:
    played = tasks(
        turns=2,
        step_s=lambda seed, member, turn: (seed * 7 + member * 5 + turn * 3) % 11,
        tokens=lambda seed, member, turn: 1 + (seed * 3 + member) % 5,
    )
    run = virtual_run(played, batch_size=8, num_envs=40, asynchrony=alpha, max_retries=100, **settings)
    batches = run.train(10, train_s=4.0)
    group_size = settings.get("group_size", 1)
    trained: list[int] = []
    for step, batch in enumerate(batches):
        assert len(batch) == 8
        assert all(trajectory.start_version >= step - alpha for trajectory in batch)
        groups = Counter(trajectory.seed for trajectory in batch)
        assert set(groups.values()) == {group_size}
        trained += groups
    assert len(set(trained)) == len(trained)
    state = run.controller.state_dict()["buffer"]
    waiting = [group["task_seed"] for group in state["groups"]] + [seed for seed, _ in state["again"]]
    assert len(set(waiting)) == len(waiting) and not set(waiting) & set(trained)
    assert set(trained) | set(waiting) == set(range(len(trained) + len(waiting)))


def test_partial_tokens_of_a_cancelled_turn_are_counted(virtual_run: Any, tasks: Any) -> None:
    # Task 0: a turn of 3 tokens, a step of 1 s, then a turn that is cut at 7 s, after 3 of its 100 tokens.
    played = tasks(
        turns=2,
        step_s=lambda *_: 1.0,
        tokens=lambda seed, member, turn: (3, 100)[turn] if seed == 0 else (2, 3)[turn],
    )
    run = virtual_run(played, batch_size=3, redundant_groups=1, asynchrony=0.0)
    assert _seeds(run.controller.get_batch(0)) == [1, 2, 3]
    assert run.now == 7.0
    run.counts()
    metrics = run.controller.metrics()
    assert metrics["discarded_tokens/surplus"] == 6.0
    assert metrics["wasted_tokens"] == 6.0
    assert metrics["discarded/surplus"] == 1.0
    # What was cancelled is no failure: neither of the run nor of its environment.
    assert metrics["failure_rate"] == 0.0
    assert metrics["workers_replaced"] == 0.0


def test_the_first_members_to_finish_make_the_group(virtual_run: Any, tasks: Any) -> None:
    step_s = {0: [1.0, 2.0, 3.0, 4.0, 50.0], 1: [60.0, 1.0, 2.0, 3.0, 5.0]}
    played = tasks(
        step_s=lambda seed, member, _: step_s[seed][member], reward=lambda seed, member: float(member)
    )
    run = virtual_run(
        played, batch_size=8, group_size=4, redundant_members=1, num_envs=10, asynchrony=0.0, num_steps=1
    )
    batch = run.controller.get_batch(0)
    assert run.now == 6.0
    members = {(trajectory.seed, trajectory.reward) for trajectory in batch}
    assert members == {(0, 0.0), (0, 1.0), (0, 2.0), (0, 3.0), (1, 1.0), (1, 2.0), (1, 3.0), (1, 4.0)}
    # The group's surplus ends when the group is full, not when the batch is.
    assert played.times("cancelled") == [5.0, 6.0]
    assert run.counts()["discarded"] == {"surplus": 2}


def test_a_redundant_member_stands_in_for_a_failed_one(virtual_run: Any) -> None:
    run = virtual_run(
        env=_dead_env(2),
        batch_size=4,
        group_size=4,
        redundant_members=1,
        num_envs=5,
        asynchrony=0.0,
        max_retries=3,
    )
    assert len(run.controller.get_batch(0)) == 4
    # Nothing was tried again: five were started, one died, four are the group.
    assert run.now == 2.0
    assert run.counts()["produced"] == 5


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(
    ("settings", "hangs"),
    [
        ({"redundant_groups": 1}, lambda seed, member: seed == 3),
        ({"redundant_groups": 2}, lambda seed, member: seed in (3, 8)),
        ({"redundant_members": 1, "group_size": 4}, lambda seed, member: member == seed % 5),
    ],
)
def test_environments_that_hang_within_the_redundancy_delay_no_batch(
    virtual_run: Any, tasks: Any, alpha: float, settings: dict[str, Any], hangs: Any
) -> None:
    played = tasks(step_s=lambda seed, member, turn: HANG_S if hangs(seed, member) else 1.0)
    run = virtual_run(played, batch_size=8, num_envs=40, asynchrony=alpha, **settings)
    batches = run.train(8)
    assert [len(batch) for batch in batches] == [8] * 8
    # An episode takes 2 s, and no step more than one episode.
    assert run.now <= 16.0


def test_a_batch_of_partial_groups_is_any_finished_episodes(virtual_run: Any, tasks: Any) -> None:
    played = tasks(step_s=lambda seed, member, turn: float(1 + seed + 3 * member))
    run = virtual_run(
        played,
        batch_size=8,
        group_size=4,
        redundant_groups=1,
        partial_groups=True,
        num_envs=12,
        asynchrony=0.0,
    )
    batch = run.controller.get_batch(0)
    # Three groups of four end at 1 s for the token and 1, 4, 7, 10; 2, 5, 8, 11; 3, 6, 9, 12 s: the eighth is at 8.
    assert run.now == 9.0
    assert Counter(trajectory.seed for trajectory in batch) == {0: 3, 1: 3, 2: 2}
    assert run.counts()["discarded"] == {"surplus": 4}


def test_a_group_that_ended_short_holds_up_no_batch_of_partial_groups(virtual_run: Any) -> None:
    run = virtual_run(
        env=_dead_env(1),
        batch_size=4,
        group_size=2,
        partial_groups=True,
        asynchrony=0.0,
        max_retries=0,
        batch_timeout_s=50.0,
    )
    assert len(run.controller.get_batch(0)) == 4


def test_a_slot_whose_surplus_was_cancelled_in_a_turn_does_not_rest(virtual_run: Any, tasks: Any) -> None:
    played = tasks(tokens=lambda seed, *_: 50 if seed == 0 else 2)
    run = virtual_run(played, redundant_groups=1, num_envs=5, asynchrony=0.0)
    run.train(12)
    assert run.now == 24.0
