"""The double-sided weights against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv_trainers.objectives import double_sided_regions, double_sided_weights


def weights_of(ratios: list[float], low: float, high: float) -> list[float]:
    policy = torch.log(torch.tensor(ratios))
    return double_sided_weights(policy, torch.zeros(len(ratios)), clip_low=low, clip_high=high).tolist()


def test_the_worked_numbers_of_the_mathematics_bounds() -> None:
    # 1 - 0.3 = 0.7 and 1 + 5.0 = 6.0 lie on the bounds and are masked.
    assert weights_of([0.70, 0.80, 2.0, 6.0], 0.3, 5.0) == pytest.approx([0.0, 0.80, 2.0, 0.0], abs=1e-6)


def test_the_worked_numbers_of_the_swe_bounds() -> None:
    assert weights_of([0.2, 0.21, 1.0, 3.99, 4.0], 0.8, 3.0) == pytest.approx(
        [0.0, 0.21, 1.0, 3.99, 0.0], abs=1e-5
    )


def test_a_ratio_just_inside_a_bound_is_kept_and_on_it_masked() -> None:
    below, above = 6.0 - 1e-9, 6.0
    policy = torch.log(torch.tensor([below, above], dtype=torch.float64))
    weights = double_sided_weights(policy, torch.zeros(2, dtype=torch.float64), clip_low=0.3, clip_high=5.0)
    assert weights[0] > 5.99
    assert weights[1] == 0.0


def test_the_weights_have_no_gradient() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = double_sided_weights(policy, torch.tensor([-1.1, -2.1]), clip_low=0.8, clip_high=3.0)
    assert not weights.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_masked_on_either_side(bad: float) -> None:
    for policy, rollout in ((bad, -1.0), (-1.0, bad), (bad, bad)):
        regions = double_sided_regions(
            torch.tensor([policy]), torch.tensor([rollout]), clip_low=1.0, clip_high=3.0
        )
        weights = double_sided_weights(
            torch.tensor([policy]), torch.tensor([rollout]), clip_low=1.0, clip_high=3.0
        )
        assert weights.tolist() == [0.0]
        assert regions.nonfinite.tolist() == [True]
        assert not (regions.accepted | regions.low | regions.high).any()


def test_a_huge_ratio_does_not_overflow() -> None:
    weights = double_sided_weights(torch.tensor([0.0]), torch.tensor([-1e4]), clip_low=0.8, clip_high=3.0)
    assert weights.tolist() == [0.0]


@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20),
    st.floats(0.0, 1.0),
    st.floats(0.01, 10.0),
)
def test_the_four_regions_are_disjoint_and_cover_every_token(
    pairs: list[tuple[float, float]], low: float, high: float
) -> None:
    policy, rollout = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    regions = torch.stack(double_sided_regions(policy, rollout, clip_low=low, clip_high=high)).int()
    assert (regions.sum(dim=0) == 1).all()


@pytest.mark.parametrize(
    ("low", "high", "name"), [(-0.1, 3.0, "clip_low"), (1.1, 3.0, "clip_low"), (0.8, 0.0, "clip_high")]
)
def test_a_bound_outside_its_range_is_refused_by_name(low: float, high: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        double_sided_weights(torch.zeros(1), torch.zeros(1), clip_low=low, clip_high=high)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_logprobs"):
        double_sided_weights(torch.zeros(2), torch.zeros(3), clip_low=0.8, clip_high=3.0)
