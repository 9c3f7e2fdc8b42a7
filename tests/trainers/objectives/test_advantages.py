"""Advantages per token and per step."""

from __future__ import annotations

import math

import pytest
import torch

from agentenv_trainers.objectives import estimate_advantages, explained_variance

# One episode of two steps, of two and of one token, and one shorter episode.
VALUES = torch.tensor([[0.2, 0.4, 0.6], [0.5, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False]])
STEPS = torch.tensor([[0, 0, 1], [0, 0, 0]])
REWARDS = torch.tensor([1.0, 0.0], dtype=torch.float64)


def test_per_token_every_token_is_a_unit() -> None:
    estimate = estimate_advantages(REWARDS, VALUES, MASK, STEPS, gamma=1.0, gae_lambda=0.0)
    # lambda 0: A = delta = next value - value, and reward - value at the end.
    assert estimate.advantages.tolist()[0] == pytest.approx([0.2, 0.2, 0.4])
    assert estimate.advantages.tolist()[1] == pytest.approx([-0.5, 0.0, 0.0])


def test_step_mean_values_a_step_by_the_mean_of_its_tokens() -> None:
    estimate = estimate_advantages(
        REWARDS, VALUES, MASK, STEPS, gamma=1.0, gae_lambda=0.0, granularity="step_mean"
    )
    # Step values 0.3 and 0.6: A = 0.6 - 0.3 for both tokens of the first step, 1 - 0.6 for the second.
    assert estimate.advantages.tolist()[0] == pytest.approx([0.3, 0.3, 0.4])
    assert estimate.returns.tolist()[0] == pytest.approx([0.6, 0.6, 1.0])
    assert estimate.advantages.tolist()[1] == pytest.approx([-0.5, 0.0, 0.0])


def test_step_last_values_a_step_by_its_last_token() -> None:
    estimate = estimate_advantages(
        REWARDS, VALUES, MASK, STEPS, gamma=1.0, gae_lambda=0.0, granularity="step_last"
    )
    assert estimate.advantages.tolist()[0] == pytest.approx([0.2, 0.2, 0.4])


def test_the_length_adaptive_lambda_counts_the_units_of_the_recursion() -> None:
    per_token = estimate_advantages(REWARDS, VALUES * 0, MASK, STEPS, gamma=1.0, gae_lambda=None, alpha=1.5)
    per_step = estimate_advantages(
        REWARDS, VALUES * 0, MASK, STEPS, gamma=1.0, gae_lambda=None, alpha=1.5, granularity="step_mean"
    )
    # Three tokens: lambda = 1 - 1/4.5; two steps: lambda = 1 - 1/3.
    assert per_token.advantages[0].tolist() == pytest.approx([(7 / 9) ** 2, 7 / 9, 1.0])
    assert per_step.advantages[0].tolist() == pytest.approx([2 / 3, 2 / 3, 1.0])


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(ValueError, match="granularity"):
        estimate_advantages(
            REWARDS,
            VALUES,
            MASK,
            STEPS,
            gamma=1.0,
            gae_lambda=1.0,
            granularity="word",  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rewards": torch.ones(3)}, r"rewards \(3,\) be \[E\]"),
        ({"mask": torch.zeros(2, 3, dtype=torch.bool)}, "mask must be true on the first tokens"),
        (
            {"mask": torch.tensor([[True, False, True], [True, False, False]])},
            "mask must be true on the first",
        ),
        ({"step_ids": torch.tensor([[0, 0, 2], [0, 0, 0]])}, "leave none out"),
        ({"step_ids": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "leave none out"),
        ({"step_ids": torch.tensor([[-1, 0, 1], [0, 0, 0]])}, "not be negative"),
    ],
)
def test_what_would_lose_a_reward_or_belong_to_no_episode_is_refused(
    changes: dict[str, torch.Tensor], says: str
) -> None:
    given = {"rewards": REWARDS, "values": VALUES, "mask": MASK, "step_ids": STEPS, **changes}
    with pytest.raises(ValueError, match=says):
        estimate_advantages(**given, gamma=1.0, gae_lambda=1.0, granularity="step_mean")  # type: ignore[arg-type]


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_prediction() -> None:
    targets = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(targets, targets) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 0.3), targets) == pytest.approx(0.0)
    assert explained_variance(1.0 - targets, targets) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(targets, torch.ones(4)))
