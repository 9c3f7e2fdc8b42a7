"""What the engines get: the plain model's names and weights, whatever is wrapped around the trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3MoeConfig

from agentenv.errors import UsageError
from agentenv.inference.adapters import AdaptedWeights
from agentenv_trainers.adapters import with_trial_adapter
from agentenv_trainers.policy_weights import full_weights, policy_weights

MakePolicy = Callable[..., Qwen3ForCausalLM]
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def adapted(policy: Any, **changes: Any) -> Any:
    """The policy in a PeftModel whose adapters are not zero."""
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"}
    model = peft.get_peft_model(policy, peft.LoraConfig(**{**settings, **changes})).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name or "trainable_tokens_delta" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_of_a_plain_model_they_are_views_of_its_state_dict(
    accelerator: Accelerator, make_policy: MakePolicy
) -> None:
    policy = make_policy()
    weights = policy_weights(accelerator, policy)
    assert weights is not None
    state = policy.state_dict()
    assert list(weights) == list(state)
    assert all(weights[name].data_ptr() == state[name].data_ptr() for name in state)
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_a_compiled_model_has_the_plain_names(accelerator: Accelerator, make_policy: MakePolicy) -> None:
    policy = make_policy()
    weights = policy_weights(accelerator, torch.compile(policy))  # type: ignore[arg-type]
    assert weights is not None
    assert list(weights) == list(policy.state_dict())


def test_a_model_wrapped_for_ddp_has_the_plain_names(
    accelerator: Accelerator, make_policy: MakePolicy
) -> None:
    policy = make_policy()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        weights = policy_weights(accelerator, nn.parallel.DistributedDataParallel(policy))
        merged = policy_weights(accelerator, nn.parallel.DistributedDataParallel(adapted(make_policy())))
    finally:
        torch.distributed.destroy_process_group()
    assert weights is not None
    assert merged is not None
    assert list(weights) == list(merged) == list(policy.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dora": True},
        {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [5, 7]},
        {"target_modules": ["up_proj", "q_proj"], "layers_to_transform": [1], "rank_pattern": {"up_proj": 3}},
    ],
    ids=["lora", "dora", "some", "head_saved", "norm_saved", "tokens", "one_layer"],
)
def test_adapters_are_merged_into_copies_under_the_plain_names(
    accelerator: Accelerator, make_policy: MakePolicy, changes: dict[str, Any]
) -> None:
    names = list(make_policy(tie_word_embeddings=False).state_dict())
    model = adapted(make_policy(tie_word_embeddings=False), **changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = policy_weights(accelerator, model)
    assert weights is not None
    assert list(weights) == names
    # The plain model with these weights says what the adapted one says, which is not what it said before.
    plain = make_policy(tie_word_embeddings=False, seed=3).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(plain(IDS).logits, expected, rtol=1e-4, atol=1e-5)
        original = make_policy(tie_word_embeddings=False).eval()
        assert (original(IDS).logits - expected).abs().max() > 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_merged_weight_is_base_plus_scaled_product(
    accelerator: Accelerator, make_policy: MakePolicy
) -> None:
    model = adapted(make_policy())
    weights = policy_weights(accelerator, model)
    assert weights is not None
    layer = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight + 8 / 2 * (b @ a)  # lora_alpha / r
    torch.testing.assert_close(weights["model.layers.1.mlp.up_proj.weight"], expected.detach())


def test_the_adapter_by_itself_comes_along_as_peft_writes_it(
    accelerator: Accelerator, make_policy: MakePolicy, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(make_policy())
    model.add_adapter("ref", model.peft_config["default"])  # as TRL's reference: it is not the active one
    weights = policy_weights(accelerator, model)
    assert isinstance(weights, AdaptedWeights)
    expected = peft.get_peft_model_state_dict(model)
    assert list(weights.adapter.tensors) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.adapter.tensors.items())
    weights.adapter.save(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(make_policy(), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_other_adapters_than_lora_come_merged_alone(
    accelerator: Accelerator, make_policy: MakePolicy
) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_policy(), peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    assert type(policy_weights(accelerator, model)) is dict
    assert type(policy_weights(accelerator, make_policy())) is dict


def test_a_trial_adapter_changes_what_is_computed_and_neither_model_nor_config(
    make_policy: MakePolicy,
) -> None:
    peft = pytest.importorskip("peft")
    policy, config = make_policy().eval(), peft.LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    trial = with_trial_adapter(policy, config)
    weights = full_weights(trial)
    assert isinstance(weights, AdaptedWeights)
    assert config.target_modules == "all-linear"
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    embeddings = weights["model.embed_tokens.weight"]
    assert embeddings.data_ptr() == policy.get_input_embeddings().weight.data_ptr()  # not a copy
    plain = make_policy(seed=3).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        assert (plain(IDS).logits - policy(IDS).logits).abs().max() > 1e-3


def test_adapters_on_the_fused_experts_are_merged(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    policy = AutoModelForCausalLM.from_config(config)
    names = list(policy.state_dict())
    model = adapted(
        policy,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    weights = policy_weights(accelerator, model)
    assert weights is not None
    assert list(weights) == names
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_only_the_active_adapter_is_merged(accelerator: Accelerator, make_policy: MakePolicy) -> None:
    model = adapted(make_policy())
    expected = policy_weights(accelerator, model)
    model.add_adapter("ref", model.peft_config["default"])  # as TRL's reference
    assert expected is not None
    weights = policy_weights(accelerator, model)
    assert weights is not None
    assert list(weights) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_trained_tokens_of_tied_embeddings_are_merged_to_one_weight(
    accelerator: Accelerator, make_policy: MakePolicy
) -> None:
    model = adapted(make_policy(), trainable_token_indices=[5, 7])
    weights = policy_weights(accelerator, model)
    assert weights is not None
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert not torch.equal(weights["lm_head.weight"], make_policy().lm_head.weight)
    plain = make_policy(seed=3).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_merged_is_refused(accelerator: Accelerator, make_policy: MakePolicy) -> None:
    peft = pytest.importorskip("peft")
    with pytest.warns(UserWarning, match="ensure_weight_tying"):
        untied = adapted(make_policy(), target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(UsageError, match="tie_word_embeddings"):
        policy_weights(accelerator, untied)
    prefix = peft.get_peft_model(
        make_policy(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(UsageError, match="cannot be merged"):
        policy_weights(accelerator, prefix)
    quantized = adapted(make_policy())
    quantized.get_base_model().is_quantized = True
    with pytest.raises(UsageError, match="without quantization"):
        policy_weights(accelerator, quantized)
