"""Memory estimates: parameters as published and as transformers builds them, and sums worked out by hand."""

import json
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv.planning import MODELS, ModelShape, estimate, read_shape

TOY = ModelShape("toy", 2, 8, 16, 2, 1, 4, 10, is_tied=False)
"""Attention 2 * 8 * 8 + 2 * 8 * 4 = 192, MLP 3 * 8 * 16 = 384, norms 16: 592 a layer; 80 + 80 + 1,184 + 8 = 1,352."""


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
    ],
)
def test_the_sizes_have_as_many_parameters_as_their_model_cards_say(size: str, parameters: int) -> None:
    assert MODELS[size].parameters == parameters


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_parameters_are_counted_as_transformers_builds_them(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=101,
        tie_word_embeddings=kind == "qwen3",
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)).parameters == model.num_parameters()


def test_a_toy_by_hand() -> None:
    memory = estimate(TOY, context=100, num_envs=3, reference=True)
    assert TOY.parameters == 1352
    assert memory.policy == 16 * 1352
    assert memory.critic == 16 * (1352 - 80)  # without its head
    assert memory.reference == memory.engine == 4 * 1352
    assert memory.kv == 3 * 100 * 2 * 2 * 1 * 4 * 4
    assert memory.activations == 2 * 100 * (2 * 8 + 8 * 8 + 4 * 16)
    assert memory.states == memory.policy + memory.critic + memory.reference


def test_half_precision_halves_policy_engine_and_cache_and_leaves_the_critic() -> None:
    whole, half = estimate(TOY), estimate(TOY, precision="bfloat16")
    assert (half.policy, half.engine, half.kv) == (whole.policy // 2, whole.engine // 2, whole.kv // 2)
    assert half.critic == whole.critic


def test_adapters_have_neither_gradients_nor_moments_of_the_whole() -> None:
    memory = estimate(TOY, lora=True)
    assert (memory.policy, memory.critic, memory.reference) == (4 * 1352, 4 * (1352 - 80), 0)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, "0.5B, 1.5B, 7B, 14B, 32B or a model's folder"),
        ("no json", "a model's folder is needed"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not counted"),
        ({"model_type": "llama", "hidden_size": 8}, "num_attention_heads"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(config: object, named: str, tmp_path: Path) -> None:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=named):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("options", [{"context": 0}, {"num_envs": 0}])
def test_a_size_out_of_range_is_named(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        estimate(TOY, **options)  # type: ignore[arg-type]
