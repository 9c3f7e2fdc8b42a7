"""The running-mean baseline against numbers worked by hand and against a plain list."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv_trainers.objectives import RunningMeanBaseline


def test_a_batch_is_compared_with_the_last_rewards_before_it() -> None:
    baseline = RunningMeanBaseline(3, per_task=False)
    # Nothing is known: the mean of the batch itself, 1/2.
    assert baseline.advantages([1.0, 0.0], ["a", "b"]) == [0.5, -0.5]
    # Known are 1, 0: mean 1/2, not changed by what this batch holds.
    assert baseline.advantages([1.0, 1.0], ["a", "c"]) == [0.5, 0.5]
    # Of 1, 0, 1, 1 the last three remain: mean 2/3.
    assert baseline.advantages([0.0], ["a"]) == pytest.approx([-2 / 3])


def test_per_task_each_task_has_its_own_last_rewards() -> None:
    baseline = RunningMeanBaseline(2, per_task=True)
    baseline.advantages([1.0, 1.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b", "b"])
    # a remembers 1, 0 of its three; b 0, 1.
    assert baseline.advantages([1.0, 0.0], ["a", "b"]) == [0.5, -0.5]
    # a now remembers 0, 1; b 1, 0.
    assert baseline.advantages([0.0], ["a"]) == [-0.5]


def test_a_new_task_is_compared_with_all_that_is_remembered_of_the_others() -> None:
    baseline = RunningMeanBaseline(2, per_task=True)
    baseline.advantages([0.0, 1.0, 1.0, 1.0], ["a", "a", "a", "b"])
    # Remembered are 1, 1 of a and 1 of b; the 0 has left.
    assert baseline.advantages([0.5, 0.0], ["new", "a"]) == [-0.5, -1.0]
    assert baseline.advantages([0.5], ["new"]) == [0.0]


def test_the_first_batch_per_task_is_compared_with_its_own_mean() -> None:
    assert RunningMeanBaseline(8, per_task=True).advantages([0.0, 3.0, 3.0], ["a", "b", "b"]) == [-2, 1, 1]


def test_an_empty_batch_changes_nothing() -> None:
    baseline = RunningMeanBaseline(2, per_task=False)
    assert baseline.advantages([], []) == []
    assert baseline.advantages([4.0], ["a"]) == [0.0]


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-5, 5, width=32), st.sampled_from("abc")), min_size=1, max_size=6),
        max_size=6,
    ),
    st.integers(1, 4),
    st.booleans(),
)
def test_it_equals_the_plain_computation_and_goes_on_after_a_restart(
    batches: list[list[tuple[float, str]]], window: int, per_task: bool
) -> None:
    baseline = RunningMeanBaseline(window, per_task)
    seen: list[tuple[float, str]] = []
    for batch in batches:
        expected = []
        for reward, task in batch:
            tasks = {t for _, t in seen}
            if per_task and task not in tasks:
                known = [r for t in tasks for r in [r for r, other in seen if other == t][-window:]]
            else:
                known = [r for r, other in seen if not per_task or other == task][-window:]
            known = known or [r for r, _ in batch]
            expected.append(reward - math.fsum(known) / len(known))
        got = baseline.advantages([r for r, _ in batch], [t for _, t in batch])
        assert got == pytest.approx(expected, abs=1e-12)
        seen += batch
        state = json.loads(json.dumps(baseline.state_dict()))
        baseline = RunningMeanBaseline(window, per_task)
        baseline.load_state_dict(state)


def test_a_smaller_window_keeps_the_newest_of_a_saved_state() -> None:
    before = RunningMeanBaseline(4, per_task=False)
    before.advantages([0.0, 0.0, 1.0, 2.0], ["a"] * 4)
    after = RunningMeanBaseline(2, per_task=False)
    after.load_state_dict(before.state_dict())
    assert after.advantages([0.0], ["a"]) == [-1.5]


def test_a_state_of_the_other_kind_is_refused() -> None:
    state = RunningMeanBaseline(4, per_task=True).state_dict()
    with pytest.raises(ValueError, match="per_task is False, must be True"):
        RunningMeanBaseline(4, per_task=False).load_state_dict(state)


def test_bad_arguments_are_refused_and_leave_no_trace() -> None:
    with pytest.raises(ValueError, match="window is 0, must be at least 1"):
        RunningMeanBaseline(0, per_task=False)
    baseline = RunningMeanBaseline(2, per_task=False)
    with pytest.raises(ValueError, match="2 rewards and 1 task_ids"):
        baseline.advantages([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        baseline.advantages([1.0, math.nan], ["a", "a"])
    assert baseline.advantages([7.0], ["a"]) == [0.0]
