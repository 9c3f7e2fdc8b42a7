"""Skip-observation GAE against plain GAE, token by token, on the sequence without observations."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv_trainers.objectives import (
    discounted_suffix_sums,
    length_adaptive_lambda,
    skip_observation_gae,
)


def plain_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """The textbook recursion, right to left."""
    advantages, last, following = [], 0.0, bootstrap
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * following - value
        last = delta + gamma * lam * last
        advantages.append(last)
        following = value
    return advantages[::-1]


def test_a_worked_example_with_a_gap() -> None:
    # Actions at 0, 1 and 3; the observation at 2 carries values and rewards that must not be read.
    rewards = torch.tensor([[0.0, 0.0, 9.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.25, 7.0, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True]])
    advantages, returns = skip_observation_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.5)
    # A3 = 1 - 0.5; A1 = (0.5 - 0.25) + 0.5 * 0.5; A0 = (0.25 - 0.5) + 0.5 * 0.5
    assert advantages.tolist() == [[0.0, 0.5, 0.0, 0.5]]
    assert returns.tolist() == [[0.5, 0.75, 0.0, 1.0]]


def test_the_reward_of_the_last_action_reaches_the_first_over_any_number_of_observation_tokens() -> None:
    for gap in (0, 3, 50):
        mask = torch.tensor([[True] + [False] * gap + [True] + [False] * gap])
        rewards = torch.zeros(mask.shape, dtype=torch.float64)
        rewards[0, 1 + gap] = 1.0
        advantages, _ = skip_observation_gae(
            rewards, torch.zeros_like(rewards), mask, gamma=0.9, gae_lambda=1.0
        )
        assert advantages[0, 0].item() == pytest.approx(0.9)
        assert advantages[0, 1 + gap].item() == pytest.approx(1.0)
        assert advantages.count_nonzero() == 2


@st.composite
def batches(
    draw: st.DrawFn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    mask[torch.arange(rows), torch.randint(0, width, (rows,), generator=generator)] = True
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lambdas = torch.rand(rows, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    return rewards, values, mask, lambdas, bootstrap, draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))


@given(batches())
@settings(max_examples=1000, deadline=None)
def test_it_equals_plain_gae_on_the_sequence_without_observations(
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float],
) -> None:
    rewards, values, mask, lambdas, bootstrap, gamma = batch
    advantages, returns = skip_observation_gae(
        rewards, values, mask, gamma=gamma, gae_lambda=lambdas, bootstrap_values=bootstrap
    )
    for row in range(rewards.size(0)):
        kept = mask[row]
        expected = torch.tensor(
            plain_gae(
                rewards[row, kept].tolist(),
                values[row, kept].tolist(),
                gamma,
                float(lambdas[row]),
                float(bootstrap[row]),
            ),
            dtype=torch.float64,
        )
        torch.testing.assert_close(advantages[row, kept], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(returns[row, kept], expected + values[row, kept], rtol=1e-9, atol=1e-9)
        assert not advantages[row, ~kept].any()
        assert not returns[row, ~kept].any()


def test_at_lambda_one_the_returns_are_the_sum_of_rewards_whatever_the_values() -> None:
    mask = torch.ones(1, 5000, dtype=torch.bool)
    rewards = torch.zeros(1, 5000)
    rewards[0, -1] = 1.0
    values = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    _, returns = skip_observation_gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    assert (returns - 1.0).abs().max() < 1e-6


def test_values_after_the_end_count_only_where_they_are_given() -> None:
    mask, zeros = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    _, returns = skip_observation_gae(
        zeros, zeros, mask, gamma=0.5, gae_lambda=1.0, bootstrap_values=torch.tensor([0.0, 8.0])
    )
    assert returns.tolist() == [[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]


def test_a_row_without_an_action_token_is_refused_by_number() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        skip_observation_gae(torch.zeros(2, 2), torch.zeros(2, 2), mask, gamma=1.0, gae_lambda=1.0)


def test_shapes_that_differ_are_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="one shape"):
        skip_observation_gae(torch.zeros(2, 2), torch.zeros(2, 3), mask, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match="bootstrap_values"):
        skip_observation_gae(
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            mask,
            gamma=1.0,
            gae_lambda=1.0,
            bootstrap_values=torch.zeros(3),
        )
    with pytest.raises(ValueError, match="gae_lambda"):
        skip_observation_gae(torch.zeros(2, 3), torch.zeros(2, 3), mask, gamma=1.0, gae_lambda=torch.ones(3))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1024, 1025, 5000])
def test_the_scan_by_doubling_equals_the_recursion(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    terms = torch.randn(2, length, generator=generator, dtype=torch.float64)
    decay = torch.tensor([0.999, 0.3], dtype=torch.float64)
    expected, following = torch.zeros_like(terms), torch.zeros(2, dtype=torch.float64)
    for index in reversed(range(length)):
        following = terms[:, index] + decay * following
        expected[:, index] = following
    torch.testing.assert_close(discounted_suffix_sums(terms, decay), expected, rtol=1e-9, atol=1e-9)


def test_64_rows_of_32k_tokens_need_no_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(64, 32768, generator=generator) < 0.3
    rewards, values = torch.zeros(64, 32768), torch.randn(64, 32768, generator=generator)
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        skip_observation_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
        best = min(best, time.process_time() - started)
    # About 0.06 s of one core; a Python loop over tokens takes tens of seconds.
    assert best < 0.5


def test_length_adaptive_lambda_is_one_minus_one_over_alpha_l_and_never_negative() -> None:
    lengths = torch.tensor([1, 2, 100, 100_000])
    expected = [1 / 3, 2 / 3, 1 - 1 / 150, 1 - 1 / 150_000]
    assert length_adaptive_lambda(lengths, alpha=1.5).tolist() == pytest.approx(expected)
    assert length_adaptive_lambda(torch.tensor([1]), alpha=0.5).tolist() == [0.0]
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(lengths, alpha=0.0)


def test_with_alpha_one_and_a_half_the_reward_reaches_the_first_token_with_half_its_weight() -> None:
    for length in (50, 5000):
        mask = torch.ones(1, length, dtype=torch.bool)
        rewards = torch.zeros(1, length, dtype=torch.float64)
        rewards[0, -1] = 1.0
        advantages, _ = skip_observation_gae(
            rewards,
            torch.zeros_like(rewards),
            mask,
            gamma=1.0,
            gae_lambda=length_adaptive_lambda(torch.tensor([length]), alpha=1.5),
        )
        assert advantages[0, 0].item() == pytest.approx(0.513, abs=0.006)  # exp(-1 / 1.5) = 0.5134
