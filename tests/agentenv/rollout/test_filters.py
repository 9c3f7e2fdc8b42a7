"""Dynamic filtering: groups that teach nothing are replaced, counted, and a filter that fails ends the run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentenv.errors import RolloutError, UsageError
from agentenv.trajectory import Trajectory


def _mixed_where_odd(seed: int, member: int) -> float:
    """Rewards 0 and 1 within the groups of odd tasks, all alike within those of even ones."""
    return float(member % 2) if seed % 2 else 1.0


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_groups_without_variance_are_replaced_and_counted(virtual_run: Any, tasks: Any, alpha: float) -> None:
    run = virtual_run(
        tasks(reward=_mixed_where_odd),
        batch_size=6,
        group_size=2,
        filter_zero_variance=True,
        asynchrony=alpha,
    )
    batches = run.train(4, train_s=10.0)
    for batch in batches:
        groups = Counter(trajectory.seed for trajectory in batch)
        assert set(groups.values()) == {2} and len(groups) == 3
        assert all(seed % 2 for seed in groups)
    counts = run.counts()
    assert set(counts["discarded"]) == {"filtered"}
    # Twelve odd tasks were trained: the twelve even ones up to the last of them were filtered.
    assert counts["discarded"]["filtered"] >= 22
    assert run.controller.metrics()["discarded_tokens/filtered"] == counts["discarded"]["filtered"]


def test_the_next_task_starts_the_moment_a_group_is_filtered(virtual_run: Any, tasks: Any) -> None:
    played = tasks(
        step_s=lambda seed, member, turn: {0: 1.0, 1: 9.0, 2: 3.0}.get(seed, 2.0),
        reward=lambda seed, member: 0.0 if seed in (0, 2) else float(member),
    )
    run = virtual_run(played, batch_size=4, group_size=2, filter_zero_variance=True, asynchrony=0.0)
    batch = run.controller.get_batch(0)
    # Task 0 is filtered at 2 s (token and step); task 2, from 2 s to 6 s, is filtered; task 3 is there at 9 s, task 1
    # at 10 s. Waves would have taken 10 + 4 + 3 s.
    assert played.times("reset", 2) == [2.0, 2.0] and played.times("reset", 3) == [6.0, 6.0]
    assert {trajectory.seed for trajectory in batch} == {1, 3}
    assert run.now == 10.0


def test_a_filter_of_the_user_sees_whole_groups_and_joins_the_other(virtual_run: Any, tasks: Any) -> None:
    seen: list[list[Trajectory]] = []

    def keep(group: list[Trajectory]) -> bool:
        seen.append(list(group))
        return group[0].seed % 3 == 0

    run = virtual_run(
        tasks(reward=_mixed_where_odd),
        keep_group=keep,
        batch_size=4,
        group_size=4,
        filter_zero_variance=True,
        asynchrony=0.0,
    )
    trained = [batch[0].seed for batch in run.train(3)]
    assert trained == [3, 9, 15]
    # Groups without variance never came to it.
    assert [group[0].seed for group in seen] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert all(len(group) == 4 and len({t.seed for t in group}) == 1 for group in seen)
    assert run.counts()["discarded"] == {"filtered": 4 * 13}


def test_the_filter_judges_the_rewards_of_the_reward_function(virtual_run: Any, tasks: Any) -> None:
    async def reward(trajectory: Trajectory) -> float:
        return _mixed_where_odd(trajectory.seed, int(trajectory.reward))

    played = tasks(reward=lambda seed, member: float(member))
    run = virtual_run(
        played, reward_fn=reward, batch_size=4, group_size=2, filter_zero_variance=True, asynchrony=0.0
    )
    assert {trajectory.seed for trajectory in run.controller.get_batch(0)} == {1, 3}


def test_redundant_groups_make_up_for_filtered_ones_beforehand(virtual_run: Any, tasks: Any) -> None:
    settings = {"batch_size": 4, "group_size": 2, "filter_zero_variance": True, "asynchrony": 0.0}
    took = []
    for redundant_groups in (0, 2):
        played = tasks(reward=_mixed_where_odd, step_s=lambda *_: 4.0)
        run = virtual_run(played, redundant_groups=redundant_groups, **settings)
        assert {trajectory.seed for trajectory in run.controller.get_batch(0)} == {1, 3}
        took.append(run.now)
    assert took == [15.0, 5.0]


def test_a_filter_that_refuses_everything_ends_at_the_deadline_and_says_what_was_filtered(
    virtual_run: Any, tasks: Any
) -> None:
    played = tasks(reward=lambda *_: 0.0)
    run = virtual_run(played, group_size=2, filter_zero_variance=True, batch_timeout_s=20.0)
    with pytest.raises(RolloutError, match=r"no batch for step 0 within 20 s.*'filtered': \d+"):
        run.controller.get_batch(0)
    assert run.now == 20.0


@pytest.mark.parametrize("with_reward", [False, True])
def test_a_filter_that_raises_ends_the_run_at_once_with_its_exception(
    virtual_run: Any, tasks: Any, with_reward: bool
) -> None:
    def keep(group: list[Trajectory]) -> bool:
        raise KeyError("family")

    async def reward(trajectory: Trajectory) -> float:
        return 1.0

    run = virtual_run(tasks(), keep_group=keep, reward_fn=reward if with_reward else None)
    with pytest.raises(RolloutError, match=r"KeyError\('family'\)") as caught:
        run.controller.get_batch(0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert run.now < 5.0
    with pytest.raises(RolloutError, match="family"):
        run.controller.get_batch(1)
    run.counts()


def test_the_message_names_the_filter_that_raised(virtual_run: Any, tasks: Any) -> None:
    def keep(group: list[Trajectory]) -> bool:
        raise KeyError("family")

    run = virtual_run(tasks(), keep_group=keep)
    with pytest.raises(RolloutError, match=r"keep_group.*KeyError\('family'\)"):
        run.controller.get_batch(0)


def test_a_filter_on_partial_groups_is_refused(virtual_run: Any, tasks: Any) -> None:
    with pytest.raises(UsageError, match=r"keep_group.*partial_groups"):
        virtual_run(tasks(), keep_group=lambda group: True, partial_groups=True)
