"""The k3 estimate against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agentenv_trainers.objectives import k3_divergence


def test_it_is_zero_where_the_two_agree_and_e_minus_two_at_a_difference_of_one() -> None:
    policy = torch.tensor([-1.0, -2.0, -3.0])
    reference = torch.tensor([-1.0, -1.0, -4.0])
    mask = torch.ones(3, dtype=torch.bool)
    # d = 0, 1, -1: exp(d) - d - 1 = 0, e - 2, 1 / e
    assert k3_divergence(policy, reference, mask).tolist() == pytest.approx([0.0, math.e - 2, 1 / math.e])


def test_its_gradient_pulls_the_policy_towards_the_reference() -> None:
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    k3_divergence(policy, torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool)).sum().backward()
    assert policy.grad is not None
    assert policy.grad[0] < 0 < policy.grad[1]  # descent raises the first log-prob and lowers the second


def test_what_is_outside_the_mask_counts_nothing_whatever_it_is() -> None:
    policy = torch.tensor([math.nan, -1.0], requires_grad=True)
    result = k3_divergence(policy, torch.tensor([-1.0, -math.inf]), torch.tensor([False, False]))
    assert result.tolist() == [0.0, 0.0]
