"""What is left to TRL's GRPOTrainer, and what must equal it, on the real trainer with log-probs set by hand.

A tiny policy is trained on nothing: only the trainer's own loss and advantages are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentenv_trainers.objectives import group_advantages, proximal_weights

RATIOS = [0.5, 1.0, 1.5]

MakeTrainer = Callable[..., GRPOTrainer]


@pytest.fixture
def make_trl_trainer(
    tmp_path: Path, make_policy: Callable[..., Qwen3ForCausalLM], tokenizer: PreTrainedTokenizerFast
) -> MakeTrainer:
    """TRL's own trainer; keyword arguments are its settings, ``reward`` a function of its own."""

    def make(
        *, reward: Any = lambda completions, **_: [0.0] * len(completions), **changes: Any
    ) -> GRPOTrainer:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "trl"),
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 2,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "report_to": "none",
        }
        return GRPOTrainer(
            model=make_policy(),
            reward_funcs=reward,
            args=GRPOConfig(**{**settings, **changes}),
            train_dataset=Dataset.from_list([{"prompt": "t2 t3"}] * 8),
            processing_class=tokenizer,
        )

    return make


def loss_and_gradient(
    trainer: GRPOTrainer, ratios: list[float], advantage: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[float]]:
    """The loss of one row of tokens with these ratios, and its gradient with respect to each log-prob."""
    width = len(ratios)
    old = torch.full((1, width), -1.0)
    policy = (old + torch.log(torch.tensor([ratios]))).requires_grad_()

    def logprobs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return policy, torch.zeros(1, width), None

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", logprobs)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": torch.ones(1, 1, dtype=torch.long),
        "prompt_mask": torch.ones(1, 1, dtype=torch.long),
        "completion_ids": torch.ones(1, width, dtype=torch.long),
        "completion_mask": torch.ones(1, width, dtype=torch.long),
        "advantages": torch.tensor([advantage]),
        "old_per_token_logps": old,
        "num_items_in_batch": torch.tensor(float(width)),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert policy.grad is not None
    return loss.item(), policy.grad[0].tolist()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_with_epsilon_high_c_weighs_each_token_by_the_smaller_of_ratio_and_c(
    make_trl_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, advantage: float
) -> None:
    trainer = make_trl_trainer(loss_type="cispo", epsilon_high=5.0)
    _, gradient = loss_and_gradient(trainer, [0.5, 1.0, 5.5, 8.0], advantage, monkeypatch)
    # Descent moves a log-prob by advantage * weight / 4 tokens, whatever the advantage's sign: no lower bound.
    weights = [-4 * value / advantage for value in gradient]
    assert weights == pytest.approx([0.5, 1.0, 5.0, 5.0], rel=1e-5)
    log_ratios = torch.log(torch.tensor([0.5, 1.0, 5.5, 8.0]))
    assert proximal_weights(log_ratios, torch.zeros(4), cap=5.0).tolist() == pytest.approx(weights, rel=1e-5)


def test_dapo_is_the_clipped_objective_of_ppo_for_a_good_action(
    make_trl_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trl_trainer(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
    loss, gradient = loss_and_gradient(trainer, RATIOS, 1.0, monkeypatch)
    # min(r A, clip(r, 0.8, 1.28) A) = 0.5, 1.0, 1.28; the mean over 3 tokens with a minus.
    assert loss == pytest.approx(-(0.5 + 1.0 + 1.28) / 3)
    # What was clipped has no gradient; of the others it is -r A / 3.
    assert gradient == pytest.approx([-0.5 / 3, -1.0 / 3, 0.0])


def test_dapo_is_the_clipped_objective_of_ppo_for_a_bad_action(
    make_trl_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trl_trainer(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
    loss, gradient = loss_and_gradient(trainer, RATIOS, -1.0, monkeypatch)
    # min(-r, -clip(r, 0.8, 1.28)) = -0.8, -1.0, -1.5: now the low ratio is the clipped one.
    assert loss == pytest.approx((0.8 + 1.0 + 1.5) / 3)
    assert gradient == pytest.approx([0.0, 1.0 / 3, 1.5 / 3])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_equal_those_of_trl_on_full_groups(
    make_trl_trainer: MakeTrainer, scale: str
) -> None:
    rewards = [0.0, 1.0, 1.0, 0.5, 3.0, 0.25, 0.25, 0.25]
    result = _advantages_of_trl(make_trl_trainer, rewards, scale)
    ours = group_advantages(
        torch.tensor(rewards),
        torch.tensor([0] * 4 + [1] * 4),
        torch.ones(8, dtype=torch.bool),
        scale=scale,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(result, ours, rtol=1e-5, atol=1e-6)
    # By hand, of the second group: mean 0.9375; squared deviations 2.0625 ** 2 + 3 * 0.6875 ** 2 = 5.671875, over 3.
    if scale == "group":
        assert result[4].item() == pytest.approx(2.0625 / (math.sqrt(5.671875 / 3) + 1e-4), rel=1e-5)
    if scale == "none":
        assert result[4].item() == pytest.approx(2.0625)


def test_a_completion_that_trl_cannot_score_is_treated_as_an_absent_member(
    make_trl_trainer: MakeTrainer,
) -> None:
    rewards = [0.0, None, 1.0, 1.0, None, None, None, 1.0]
    present = torch.tensor([reward is not None for reward in rewards])
    ours = group_advantages(
        torch.tensor([math.nan if reward is None else reward for reward in rewards]),
        torch.tensor([0] * 4 + [1] * 4),
        present,
    )
    # Mean 2/3 and std sqrt(1/3) of the three that are left; the lone one of the second group trains nothing.
    std = math.sqrt(1 / 3) + 1e-4
    assert ours.tolist() == pytest.approx([-2 / 3 / std, 0, 1 / 3 / std, 1 / 3 / std, 0, 0, 0, 0])
    torch.testing.assert_close(
        _advantages_of_trl(make_trl_trainer, rewards, "group"), ours, rtol=1e-5, atol=1e-6
    )


def _advantages_of_trl(make_trainer: MakeTrainer, rewards: list[Any], scale: str) -> Tensor:
    """TRL's advantages of two groups of four with these rewards, for completions of two tokens."""
    trainer = make_trainer(
        reward=lambda completions, **_: rewards, scale_rewards=scale, per_device_train_batch_size=8
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "t2"}] * 4 + [{"prompt": "t3"}] * 4)
    return batch["advantages"]
