"""The critic: freezing attention by role over architectures, saving and loading, adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from agentenv.errors import UsageError
from agentenv_trainers import Critic, freeze_attention
from agentenv_trainers.critic import VALUE_HEAD

IDS = torch.tensor([[5, 6, 7, 8, 9]])

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


def values_of(critic: Critic) -> torch.Tensor:
    with torch.no_grad():
        return critic(IDS)


def test_a_saved_critic_is_loaded_with_its_values(policy: Any, tokenizer: Any, tmp_path: Path) -> None:
    critic = Critic.from_policy(policy)
    nn.init.normal_(critic.head.weight)
    critic.head.bias.data.fill_(0.25)
    critic.save_pretrained(tmp_path / "critic", tokenizer)
    loaded = Critic.from_pretrained(tmp_path / "critic", tokenizer)
    assert torch.equal(values_of(loaded), values_of(critic))
    assert loaded.head_is_trained
    assert all(p.requires_grad for p in loaded.parameters())
    # The folder is one of transformers, with the head beside it.
    backbone = AutoModel.from_pretrained(tmp_path / "critic")
    assert type(backbone) is type(policy.base_model)
    assert {n: list(t.shape) for n, t in load_file(tmp_path / "critic" / VALUE_HEAD).items()} == {
        "weight": [1, 16],
        "bias": [1],
    }


def test_a_folder_of_a_causal_lm_makes_a_critic_whose_head_is_zero_and_whose_weights_are_float32(
    policy: Any, tmp_path: Path
) -> None:
    policy.to(torch.bfloat16).save_pretrained(tmp_path)
    critic = Critic.from_pretrained(str(tmp_path))
    assert values_of(critic).tolist() == [[0.0] * 5]
    assert not critic.head_is_trained
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    for name, parameter in policy.base_model.named_parameters():
        assert torch.equal(critic.backbone.get_parameter(name), parameter.float()), name


def test_a_critic_that_was_saved_untrained_is_not_taken_for_a_trained_one(
    make_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path
) -> None:
    Critic.from_policy(make_policy()).save_pretrained(tmp_path)
    assert not Critic.from_pretrained(tmp_path).head_is_trained


def other_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), unk_token="t0"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["t0", "t1"], r"2 tokens against 24; first at id 2, which is None for the critic and 't2'"),
        (
            [f"t{i}" for i in range(23)] + ["x"],
            r"24 tokens against 24; first at id 23, which is 'x' for the critic and 't23'",
        ),
    ],
    ids=["fewer", "one_other"],
)
def test_a_critic_of_another_vocabulary_is_refused_and_the_difference_named(
    make_policy: Callable[..., Qwen3ForCausalLM],
    tokenizer: Any,
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    Critic.from_policy(make_policy()).save_pretrained(tmp_path, other_tokenizer(*words))
    with pytest.raises(UsageError, match=message):
        Critic.from_pretrained(tmp_path, tokenizer)
    Critic.from_pretrained(tmp_path)  # not compared where no tokenizer is given


def test_a_critic_too_small_for_the_policys_tokenizer_is_refused(
    make_policy: Callable[..., Qwen3ForCausalLM], tokenizer: Any, tmp_path: Path
) -> None:
    Critic.from_policy(make_policy(vocab_size=23)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="tokenizer has 24 tokens, but the critic embeds only 23"):
        Critic.from_pretrained(tmp_path, tokenizer)


def test_a_folder_with_weights_missing_or_a_head_that_does_not_fit_is_refused(
    make_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path
) -> None:
    Critic.from_policy(make_policy()).save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1, 8), "bias": torch.zeros(1)}, tmp_path / VALUE_HEAD)
    with pytest.raises(UsageError, match=r"'weight': \(1, 8\).* needs .*'weight': \(1, 32\)"):
        Critic.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks weights of Qwen3Model: norm\.weight"):
        Critic.from_pretrained(tmp_path)


@pytest.mark.parametrize("broken", ["model.safetensors", "value_head.safetensors"])
def test_a_critic_whose_file_was_cut_off_is_named(policy: Any, tmp_path: Path, broken: str) -> None:
    Critic.from_policy(policy).save_pretrained(tmp_path)
    (tmp_path / broken).write_bytes((tmp_path / broken).read_bytes()[:6])
    with pytest.raises(UsageError, match=f"{tmp_path}.* cannot be"):
        Critic.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "empty"])
def test_a_critic_that_is_not_there_is_named(tmp_path: Path, tokenizer: Any, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"critic '.*{name}' cannot be loaded"):
        Critic.from_pretrained(tmp_path / name, tokenizer)


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.5, "target_modules": "all-linear"}
    return peft.LoraConfig(**{**settings, **changes})


def test_with_adapters_only_they_and_the_head_train_and_those_inside_attention_are_frozen_with_it(
    make_policy: Callable[..., Qwen3ForCausalLM],
) -> None:
    critic = Critic.from_policy(make_policy())
    critic.add_adapters(lora())
    freeze_attention(critic)
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    optimizer = torch.optim.SGD([p for p in critic.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):  # at first the head is zero, then B is
        optimizer.zero_grad()
        ((critic(IDS) - 1.0) ** 2).mean().backward()
        optimizer.step()
    moved = {name for name, p in critic.named_parameters() if not torch.equal(p, before[name])}
    adapters = {name for name in before if "lora_" in name and "mlp" in name}
    assert len(adapters) == 2 * 3 * 2  # layers, projections, A and B
    assert moved == adapters | {"head.weight", "head.bias"}
    assert any("self_attn" in name and "lora_" in name for name in before)
    assert torch.equal(values_of(critic), values_of(critic))  # its dropout is off, too


def test_a_critic_with_adapters_is_saved_merged_and_stays_as_it_is(
    make_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path
) -> None:
    critic = Critic.from_policy(make_policy())
    critic.add_adapters(lora(use_dora=True))
    for name, parameter in critic.named_parameters():
        if "lora_B" in name or "head" in name:
            nn.init.normal_(parameter, std=0.1)
    before = {name: t.clone() for name, t in critic.state_dict().items()}
    critic.save_pretrained(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in critic.state_dict().items())
    loaded = Critic.from_pretrained(tmp_path)
    assert not any("lora" in name for name in loaded.state_dict())
    torch.testing.assert_close(values_of(loaded), values_of(critic), rtol=1e-5, atol=1e-6)
    plain = Critic.from_policy(make_policy())
    plain.head.load_state_dict(critic.head.state_dict())
    assert (values_of(plain) - values_of(loaded)).abs().max() > 1e-3  # the adapters did count


def test_a_critic_of_a_policy_with_adapters_starts_from_the_merged_weights(
    make_policy: Callable[..., Qwen3ForCausalLM],
) -> None:
    peft = pytest.importorskip("peft")
    policy = peft.get_peft_model(make_policy(), lora(lora_dropout=0.0))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    critic = Critic.from_policy(policy)
    with torch.no_grad():
        expected = policy(IDS, output_hidden_states=True).hidden_states[-1]
        hidden = critic.backbone(IDS).last_hidden_state
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert all(p.requires_grad for p in critic.parameters())
    assert not any("lora" in name for name, _ in critic.named_parameters())


def test_adapters_are_added_once_and_an_adapters_folder_is_no_critic(
    make_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    critic = Critic.from_policy(make_policy())
    critic.add_adapters(lora())
    with pytest.raises(UsageError, match="adapters already"):
        critic.add_adapters(lora())
    peft.get_peft_model(make_policy(), lora()).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="is a PEFT adapter: merge it"):
        Critic.from_pretrained(tmp_path)
