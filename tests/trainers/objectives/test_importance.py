"""The weights of CISPO, TOPR and a proximal policy against numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentenv_trainers.objectives import (
    cispo_weights,
    double_sided_regions,
    double_sided_weights,
    proximal_weights,
    topr_weights,
)

Weights = Callable[[Tensor, Tensor], Tensor]


def log(ratios: list[float] | list[list[float]]) -> Tensor:
    return torch.log(torch.tensor(ratios, dtype=torch.float64))


def cispo(policy: Tensor, rollout: Tensor) -> Tensor:
    return cispo_weights(policy, rollout, clip_low=1.0, clip_high=3.0)


def topr(policy: Tensor, rollout: Tensor) -> Tensor:
    """Each token as a trajectory of its own, of negative return."""
    mask = torch.ones(policy.numel(), 1, dtype=torch.bool)
    positive = torch.zeros(policy.numel(), dtype=torch.bool)
    return topr_weights(policy.view(-1, 1), rollout.view(-1, 1), mask, positive).view_as(policy)


def capped(policy: Tensor, rollout: Tensor) -> Tensor:
    return proximal_weights(policy, rollout, cap=5.0)


ALL = pytest.mark.parametrize("weights", [cispo, topr, capped, proximal_weights])


def test_cispo_clips_the_weight_where_double_sided_drops_the_token() -> None:
    ratios = log([0.5, 0.8, 2.0, 9.0])
    zeros = torch.zeros_like(ratios)
    clipped = cispo_weights(ratios, zeros, clip_low=0.3, clip_high=5.0)
    assert clipped.tolist() == pytest.approx([0.7, 0.8, 2.0, 6.0])
    dropped = double_sided_weights(ratios, zeros, clip_low=0.3, clip_high=5.0)
    assert dropped.tolist() == pytest.approx([0.0, 0.8, 2.0, 0.0])


def test_cispo_with_clip_low_one_has_no_lower_bound() -> None:
    ratios = log([1e-6, 0.5, 1.0, 4.5])
    assert cispo_weights(ratios, ratios * 0, clip_low=1.0, clip_high=3.0).tolist() == pytest.approx(
        [1e-6, 0.5, 1.0, 4.0]
    )


@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20),
    st.floats(0.0, 1.0),
    st.floats(0.01, 10.0),
)
@settings(deadline=None)
def test_cispo_lies_within_its_bounds_and_agrees_with_double_sided_inside(
    pairs: list[tuple[float, float]], low: float, high: float
) -> None:
    policy, rollout = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    weights = cispo_weights(policy, rollout, clip_low=low, clip_high=high)
    assert (weights >= 1 - low - 1e-9).all()
    assert (weights <= 1 + high + 1e-9).all()
    inside = double_sided_regions(policy, rollout, clip_low=low, clip_high=high).accepted
    expected = double_sided_weights(policy, rollout, clip_low=low, clip_high=high)
    torch.testing.assert_close(weights[inside], expected[inside], rtol=1e-12, atol=0.0)


def test_topr_tapers_bad_trajectories_by_the_product_of_their_ratios_and_leaves_good_ones() -> None:
    ratios = log([[0.5, 0.5], [0.5, 4.0], [0.5, 0.5], [9.0, 9.0]])
    positive = torch.tensor([False, False, True, True])
    weights = topr_weights(ratios, ratios * 0, torch.ones(4, 2, dtype=torch.bool), positive)
    # 0.5 * 0.5 = 0.25; 0.5 * 4 = 2, cut to 1; good trajectories have 1 whatever their ratios.
    assert weights.tolist() == pytest.approx(torch.tensor([[0.25] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2]))


def test_topr_reads_only_tokens_of_the_mask_and_is_zero_elsewhere() -> None:
    ratios = log([[0.5, 0.1, 0.5], [0.5, 0.1, 0.5]])
    ratios[:, 1] = math.nan
    mask = torch.tensor([[True, False, True]] * 2)
    weights = topr_weights(ratios, ratios * 0, mask, torch.tensor([False, True]))
    assert weights.tolist() == [pytest.approx([0.25, 0.0, 0.25]), [1.0, 0.0, 1.0]]


def test_topr_of_a_long_trajectory_does_not_gather_rounding() -> None:
    # The engine's log-probs are the policy's in another order, but for the last one: the product is exp(-1/2).
    generator = torch.Generator().manual_seed(0)
    policy = -10 * torch.rand(1, 32_768, generator=generator)
    rollout = policy[:, torch.randperm(32_768, generator=generator)]
    policy = torch.cat([policy, torch.tensor([[-1.5]])], dim=1)
    rollout = torch.cat([rollout, torch.tensor([[-1.0]])], dim=1)
    assert abs((policy - rollout).sum().item() + 0.5) > 1e-5  # in float32 it would show
    mask = torch.ones_like(policy, dtype=torch.bool)
    weights = topr_weights(policy, rollout, mask, torch.tensor([False]))
    assert weights.dtype == torch.float32
    assert weights[0, 0].item() == pytest.approx(math.exp(-0.5), rel=1e-6)


def test_a_broken_log_prob_silences_a_bad_trajectory_but_of_a_good_one_only_its_token() -> None:
    policy = torch.tensor([[-1.0, math.nan], [-1.0, -math.inf], [-1.0, math.nan]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    weights = topr_weights(policy, torch.full((3, 2), -1.0), mask, torch.tensor([False, False, True]))
    assert weights.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]


def test_proximal_weights_are_the_ratio_up_to_the_cap() -> None:
    ratios = log([0.5, 1.0, 4.9, 8.0])
    assert proximal_weights(ratios, ratios * 0, cap=5.0).tolist() == pytest.approx([0.5, 1.0, 4.9, 5.0])
    assert proximal_weights(ratios, ratios * 0).tolist() == pytest.approx([0.5, 1.0, 4.9, 8.0])


def test_proximal_and_clipped_ratio_multiply_to_the_ratio_of_policy_to_rollout() -> None:
    # Decoupled PPO: proximal / rollout = 0.3 / 0.2 and policy / proximal = 0.36 / 0.3 make 0.36 / 0.2 = 1.8.
    rollout, proximal, policy = log([0.2]), log([0.3]), log([0.36])
    assert proximal_weights(proximal, rollout).tolist() == pytest.approx([1.5])
    assert (proximal_weights(proximal, rollout) * torch.exp(policy - proximal)).tolist() == pytest.approx(
        [1.8]
    )


def test_a_ratio_that_overflows_is_capped_or_else_dropped() -> None:
    policy, rollout = torch.tensor([0.0, 0.0]), torch.tensor([-1e4, -1.0])
    assert proximal_weights(policy, rollout, cap=5.0).tolist() == pytest.approx([5.0, math.e])
    assert proximal_weights(policy, rollout).tolist() == pytest.approx([0.0, math.e])
    assert cispo(policy, rollout).tolist() == pytest.approx([4.0, math.e])
    assert topr(policy, rollout).tolist() == [1.0, 1.0]


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_has_weight_zero_on_either_side(weights: Weights, bad: float) -> None:
    policy, rollout = torch.tensor([bad, -1.0, bad, -1.0]), torch.tensor([-1.0, bad, bad, -1.0])
    assert weights(policy, rollout).tolist() == [0.0, 0.0, 0.0, 1.0]


@ALL
def test_the_weights_have_no_gradient(weights: Weights) -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    rollout = torch.tensor([-1.1, -2.1], requires_grad=True)
    assert not weights(policy, rollout).requires_grad


@ALL
def test_weights_keep_shape_and_dtype_and_are_one_where_the_two_agree(weights: Weights) -> None:
    logprobs = torch.tensor([-1.0, -20.0], dtype=torch.bfloat16)
    result = weights(logprobs, logprobs)
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [1.0, 1.0]


@ALL
def test_shapes_that_differ_are_refused(weights: Weights) -> None:
    with pytest.raises(ValueError, match=r"rollout_logprobs \(3, 1\)|rollout_logprobs \(3,\)"):
        weights(torch.zeros(2), torch.zeros(3))


def test_arguments_outside_their_range_are_refused_by_name() -> None:
    pair = torch.zeros(1, 2), torch.zeros(1, 2)
    for low, high, name in ((-0.1, 3.0, "clip_low"), (1.1, 3.0, "clip_low"), (0.8, 0.0, "clip_high")):
        with pytest.raises(ValueError, match=name):
            cispo_weights(*pair, clip_low=low, clip_high=high)
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"cap is {cap}, must be positive and finite"):
            proximal_weights(*pair, cap=cap)
    one = torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask \(1, 3\)"):
        topr_weights(*pair, torch.ones(1, 3, dtype=torch.bool), one)
    with pytest.raises(ValueError, match=r"positive \(2,\)"):
        topr_weights(*pair, torch.ones(1, 2, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        topr_weights(torch.zeros(1), torch.zeros(1), one, one)
