"""A training step on other architectures than the one of the other tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from agentenv.errors import UsageError
from agentenv_trainers import SAOTrainer

SIZE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZE),
        Qwen2Config(**SIZE),
        Glm4MoeConfig(
            **SIZE,
            head_dim=8,
            moe_intermediate_size=8,
            num_experts_per_tok=2,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        Qwen3MoeConfig(**SIZE, head_dim=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2),
        GraniteConfig(**SIZE, logits_scaling=2.0),  # scales its logits: only TRL's head knows
    ],
    ids=["llama", "qwen2", "glm4_moe", "qwen3_moe", "granite"],
)
def test_a_run_trains_policy_and_critic(
    make_trainer: Callable[..., SAOTrainer], config: PretrainedConfig
) -> None:
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer = make_trainer(policy=policy, max_steps=2, gradient_accumulation_steps=2, beta=0.01)
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert any("self_attn" in name for name in changed)
    assert any("mlp" in name for name in changed)
    for entry in trainer.state.log_history[:2]:
        assert all(math.isfinite(entry[name]) for name in ("loss", "critic_loss", "entropy", "kl"))


def test_log_probs_of_an_architecture_that_scales_its_logits_are_its_own(
    make_trainer: Callable[..., SAOTrainer],
) -> None:
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(GraniteConfig(**SIZE, logits_scaling=3.0))
    trainer = make_trainer(policy=policy)
    trainer.push_weights()
    batch = trainer._generate_and_score_completions([{}] * 8)
    mask = batch["tool_mask"].bool()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logprobs, _, _ = trainer._logprobs(trainer.model, ids, attention, mask)
    with torch.no_grad():
        expected = trainer.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    expected = expected.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(logprobs[mask].detach(), expected[mask], rtol=0, atol=2e-6)


def test_a_controller_is_needed(
    make_config: Callable[..., Any], make_policy: Callable[..., Any], tokenizer: Any
) -> None:
    with pytest.raises(UsageError, match="controller"):
        SAOTrainer(make_policy(), make_config(), None, tokenizer)
