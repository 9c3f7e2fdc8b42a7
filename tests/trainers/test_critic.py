"""The critic, and freezing attention by role over architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from agentenv_trainers import Critic, freeze_attention

SIZE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZE),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=8),
    "qwen3_moe": Qwen3MoeConfig(**SIZE, **EXPERTS, head_dim=8, num_experts=4),
    "glm4_moe": Glm4MoeConfig(
        **SIZE, **EXPERTS, head_dim=8, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1
    ),
}


@pytest.fixture(params=list(ARCHITECTURES))
def policy(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config: PretrainedConfig = ARCHITECTURES[request.param]
    return AutoModelForCausalLM.from_config(config)


def test_training_leaves_attention_bitwise_unchanged_and_moves_the_rest(policy: Any) -> None:
    critic = Critic.from_policy(policy)
    names = freeze_attention(critic)
    assert names == [f"backbone.layers.{i}.self_attn" for i in range(2)]
    optimizer = torch.optim.AdamW(
        [p for p in critic.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    ids = torch.arange(2 * 12).view(2, 12)
    for _ in range(3):
        optimizer.zero_grad()
        ((critic(ids) - 1.0) ** 2).mean().backward()
        optimizer.step()
    unchanged = {name for name, p in critic.named_parameters() if torch.equal(p, before[name])}
    attention = {name for name in before if ".self_attn." in name}
    assert attention
    assert unchanged == attention | {name for name in unchanged if "e_score_correction" in name}
    assert any("mlp" in name for name in before.keys() - unchanged)
    assert any("layernorm" in name for name in before.keys() - unchanged)


def test_a_critic_says_zero_at_first_and_shares_nothing_with_the_policy(policy: Any) -> None:
    critic = Critic.from_policy(policy)
    values = critic(torch.tensor([[1, 2, 3]]))
    assert values.dtype == torch.float32
    assert values.tolist() == [[0.0, 0.0, 0.0]]
    own = {p.data_ptr() for p in policy.parameters()}
    assert not own & {p.data_ptr() for p in critic.parameters()}


def test_padding_on_the_right_changes_no_value(policy: Any) -> None:
    critic = Critic.from_policy(policy).eval()
    nn.init.normal_(critic.head.weight)
    whole = critic(torch.tensor([[5, 6, 7, 8]]))
    padded = critic(torch.tensor([[5, 6, 7, 8, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7]]))
    torch.testing.assert_close(padded[:1, :4], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1)),
        AutoModelForCausalLM.from_config(
            MambaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
    ],
    ids=["no_decoder_layers", "mamba"],
)
def test_an_architecture_without_recognised_attention_is_an_error_and_nothing_is_frozen(
    module: nn.Module,
) -> None:
    with pytest.raises(ValueError, match="no attention is recognised"):
        freeze_attention(module)
    assert all(p.requires_grad for p in module.parameters())


def test_dropout_is_off_in_the_critic(make_policy: Callable[..., Qwen3ForCausalLM]) -> None:
    critic = Critic.from_policy(make_policy(attention_dropout=0.5)).train()
    nn.init.normal_(critic.head.weight)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    assert torch.equal(critic(ids), critic(ids))
