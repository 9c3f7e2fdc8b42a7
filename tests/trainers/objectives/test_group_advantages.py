"""Group-relative advantages against numbers worked by hand, and against groups without their absent members."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv_trainers.objectives import AdvantageScale, group_advantages, zero_variance_share


def advantages_of(
    rewards: list[float],
    groups: list[int],
    scale: AdvantageScale = "group",
    absent: tuple[int, ...] = (),
) -> list[float]:
    present = torch.tensor([index not in absent for index in range(len(rewards))], dtype=torch.bool)
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.long),
        present,
        scale=scale,
    )
    assert result.dtype == torch.float64
    return result.tolist()


def test_half_of_a_group_succeeds() -> None:
    # Mean 1/2; squared deviations 4 * 1/4 = 1, over n - 1 = 3: std = sqrt(1/3).
    high = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert high == pytest.approx(0.8659, abs=5e-5)
    assert advantages_of([1, 0, 0, 1], [7, 7, 7, 7]) == pytest.approx([high, -high, -high, high])


def test_each_group_has_its_own_mean_and_deviation_in_whatever_order_its_members_come() -> None:
    # Group 5 holds 0 and 2: mean 1, std sqrt(2); group -1 holds 10, 10 and 13: mean 11, std sqrt((1 + 1 + 4) / 2).
    first, second = math.sqrt(2) + 1e-4, math.sqrt(3) + 1e-4
    assert advantages_of([0, 10, 2, 13, 10], [5, -1, 5, -1, -1]) == pytest.approx(
        [-1 / first, -1 / second, 1 / first, 2 / second, -1 / second]
    )


def test_batch_scale_divides_by_one_deviation_for_all_groups() -> None:
    # Rewards 0, 2, 4 and 4: mean 2.5, squared deviations 6.25 + 0.25 + 2.25 + 2.25 = 11, over 3.
    std = math.sqrt(11 / 3) + 1e-4
    assert advantages_of([0, 2, 4, 4], [0, 0, 1, 1], "batch") == pytest.approx([-1 / std, 1 / std, 0, 0])


def test_no_scale_leaves_the_deviation_from_the_groups_mean() -> None:
    assert advantages_of([0, 2, 4, 7], [0, 0, 1, 1], "none") == [-1.0, 1.0, -1.5, 1.5]


def test_an_absent_member_is_no_reward_of_zero() -> None:
    # Of 1, absent, 0, 1 the mean is 2/3 and the std sqrt((1/9 + 4/9 + 1/9) / 2) = sqrt(1/3). As a reward of 0 the
    # absent one would make them 1/2 and sqrt(1/3), and would be pushed down itself.
    std = math.sqrt(1 / 3) + 1e-4
    result = advantages_of([1, math.nan, 0, 1], [3, 3, 3, 3], absent=(1,))
    assert result == pytest.approx([1 / 3 / std, 0.0, -2 / 3 / std, 1 / 3 / std])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_lone_survivor_and_a_wholly_absent_group_train_nothing(scale: AdvantageScale) -> None:
    rewards = [5.0, math.inf, math.nan, math.nan, 0.0, 2.0]
    result = advantages_of(rewards, [0, 0, 1, 1, 2, 2], scale, absent=(1, 2, 3))
    assert result[:4] == [0.0, 0.0, 0.0, 0.0]
    # The lone 5 takes no part in the deviation of the batch either: it is that of 0 and 2, sqrt(2).
    divisor = 1.0 if scale == "none" else math.sqrt(2) + 1e-4
    assert result[4:] == pytest.approx([-1 / divisor, 1 / divisor])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_where_nobody_has_a_partner_everything_is_zero(scale: AdvantageScale) -> None:
    assert advantages_of([1, 2, 3], [0, 1, 2], scale) == [0.0, 0.0, 0.0]
    assert advantages_of([1, 2], [0, 0], scale, absent=(0, 1)) == [0.0, 0.0]
    assert advantages_of([], [], scale) == []


def test_members_that_are_all_equal_have_exactly_zero_though_their_mean_is_rounded() -> None:
    assert sum([0.1] * 3) / 3 != 0.1
    assert advantages_of([0.1] * 3, [0] * 3, "none") == [0.0, 0.0, 0.0]


BATCHES = st.lists(
    st.tuples(st.floats(-10, 10, width=32), st.integers(0, 3), st.booleans()), min_size=1, max_size=16
)
SCALES = st.sampled_from(["group", "batch", "none"])


@given(BATCHES, SCALES)
@settings(deadline=None)
def test_absent_members_change_nothing_for_those_that_are_present(
    batch: list[tuple[float, int, bool]], scale: AdvantageScale
) -> None:
    rewards, groups, present = (list(column) for column in zip(*batch, strict=True))
    absent = tuple(index for index, there in enumerate(present) if not there)
    result = advantages_of(rewards, groups, scale, absent)
    kept = [index for index, there in enumerate(present) if there]
    without = advantages_of([rewards[i] for i in kept], [groups[i] for i in kept], scale)
    assert [result[index] for index in kept] == pytest.approx(without, rel=1e-9, abs=1e-12)
    assert all(result[index] == 0.0 for index in absent)


@given(BATCHES, SCALES, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_and_names_of_the_groups_do_not_matter(
    batch: list[tuple[float, int, bool]], scale: AdvantageScale, random: object
) -> None:
    rewards, groups, present = (list(column) for column in zip(*batch, strict=True))
    absent = tuple(index for index, there in enumerate(present) if not there)
    order = list(range(len(batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = advantages_of(
        [rewards[i] for i in order],
        [1000 - 7 * groups[i] for i in order],
        scale,
        tuple(place for place, i in enumerate(order) if i in absent),
    )
    expected = advantages_of(rewards, groups, scale, absent)
    assert moved == pytest.approx([expected[i] for i in order], rel=1e-9, abs=1e-12)


@given(BATCHES, SCALES)
@settings(deadline=None)
def test_the_advantages_of_a_group_add_up_to_nothing(
    batch: list[tuple[float, int, bool]], scale: AdvantageScale
) -> None:
    rewards, groups, present = (list(column) for column in zip(*batch, strict=True))
    absent = tuple(index for index, there in enumerate(present) if not there)
    result = advantages_of(rewards, groups, scale, absent)
    for group in set(groups):
        assert sum(a for a, g in zip(result, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-8)


def test_the_share_of_groups_without_any_difference() -> None:
    # Groups of (1, 1), (0, 1), (0.1, 0.1, 0.1) and of one survivor, which is not counted: 2 of 3.
    rewards = torch.tensor([1, 1, 0, 1, 0.1, 0.1, 0.1, 5, math.nan])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 3])
    present = torch.tensor([True] * 8 + [False])
    assert zero_variance_share(rewards, groups, present) == pytest.approx(2 / 3)
    assert math.isnan(zero_variance_share(rewards[:1], groups[:1], present[:1]))


def test_the_result_has_the_dtype_of_the_rewards() -> None:
    rewards = torch.tensor([0.0, 1.0])
    both = torch.tensor([True, True])
    assert group_advantages(rewards, torch.tensor([0, 0]), both).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_row(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards of present members must be finite, .* in rows \[1\]"):
        advantages_of([0.0, bad, 1.0], [0, 0, 0])


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    rewards, groups, present = (
        torch.zeros(3),
        torch.zeros(3, dtype=torch.long),
        torch.ones(3, dtype=torch.bool),
    )
    with pytest.raises(ValueError, match="scale is 'std', must be one of 'group', 'batch', 'none'"):
        group_advantages(rewards, groups, present, scale="std")  # type: ignore[arg-type]
    for arguments, match in (
        ((rewards[:2], groups, present), r"one shape \[B\]"),
        ((rewards.view(1, 3), groups.view(1, 3), present.view(1, 3)), r"one shape \[B\]"),
        ((groups, groups, present), "rewards are torch.int64, must be floating point"),
        ((rewards, rewards, present), "group_ids are torch.float32, must be integers"),
        ((rewards, groups, rewards), "present is torch.float32, must be bool"),
    ):
        with pytest.raises(ValueError, match=match):
            group_advantages(*arguments)
