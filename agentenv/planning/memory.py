"""GPU memory of SAO by model: what trainer and engines hold, in bytes.

Counted, for P parameters of w bytes each (4 in float32, 2 in bfloat16):

* policy: weights, gradients and Adam's two moments, 4 w P (torch's AdamW keeps the moments in the parameters' type);
* critic: the same for a copy of the policy without its head, always in float32; its frozen attention is counted as
  trained, as it is while the critic is pretrained;
* reference: w P, where `beta` is above 0;
* engine: w P once for vLLM, which has the trainer's type;
* keys and values: 2 w layers x KV heads x head size for each token in flight;
* activations: of one episode, with gradient checkpointing: bfloat16 inputs of all layers and the insides of one.

Not counted: CUDA contexts and graphs, fragmentation, temporary copies while weights are sent, activations of an engine.

Invariant: parameters are counted from the model's config, the same way for every model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentenv.errors import UsageError

__all__ = ["MODELS", "Memory", "ModelShape", "Precision", "estimate", "read_shape"]

Precision = Literal["float32", "bfloat16"]
WEIGHT_BYTES: Mapping[Precision, int] = {"float32": 4, "bfloat16": 2}
_CRITIC_BYTES = 16
_DENSE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with gated MLPs and grouped-query attention."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    """Embeddings and head are one matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def head_parameters(self) -> int:
        """Of the language-model head, where it is one of its own."""
        return 0 if self.is_tied else self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        if self.qkv_bias:
            attention += queries + 2 * keys
        if self.qk_norm:
            attention += 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.head_parameters + self.layers * layer + self.hidden

    def kv_bytes(self, precision: Precision) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * WEIGHT_BYTES[precision]


@dataclass(frozen=True)
class Memory:
    """Bytes over all GPUs."""

    policy: int
    critic: int
    reference: int
    activations: int
    """On every GPU that trains."""
    engine: int
    """Weights of one copy."""
    kv: int
    """Keys and values of all tokens in flight."""

    @property
    def states(self) -> int:
        """What FSDP shares out over the GPUs that train."""
        return self.policy + self.critic + self.reference


def estimate(
    shape: ModelShape,
    *,
    precision: Precision = "float32",
    context: int = 16_384,
    num_envs: int = 32,
    reference: bool = False,
    lora: bool = False,
) -> Memory:
    """What a run holds; see the module docstring.

    Args:
        shape: of policy and critic.
        precision: of the policy's weights, and so of the engine's.
        context: tokens of the longest episode.
        num_envs: episodes in flight, each counted with its whole context.
        reference: whether a copy of the starting policy is kept.
        lora: adapters of policy and critic are trained; they themselves are counted as nothing.

    Raises:
        UsageError: a size below 1.
    """
    for name, value in (("--context", context), ("--num-envs", num_envs)):
        if value < 1:
            raise UsageError(f"{name} is {value}, must be at least 1")
    weight, count = WEIGHT_BYTES[precision], shape.parameters
    backbone = count - shape.head_parameters
    inside = 8 * shape.hidden + 4 * shape.intermediate
    return Memory(
        policy=weight * count if lora else 4 * weight * count,
        critic=4 * backbone if lora else _CRITIC_BYTES * backbone,
        reference=weight * count if reference else 0,
        activations=2 * context * (shape.layers * shape.hidden + inside),
        engine=weight * count,
        kv=num_envs * context * shape.kv_bytes(precision),
    )


def read_shape(model: str) -> ModelShape:
    """A size of :data:`MODELS`, or a model's folder.

    Raises:
        UsageError: neither, or a model of another kind.
    """
    if model in MODELS:
        return MODELS[model]
    path = Path(model, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model {model}: one of {', '.join(MODELS)} or a model's folder is needed ({error})"
        ) from None
    return _shape(Path(model).resolve().name, config)


def _shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    kind = config.get("model_type")
    if kind not in _DENSE:
        raise UsageError(f"--model {name}: model_type {kind!r} is not counted; {', '.join(_DENSE)} are")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind == "qwen3",
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"--model {name}: config.json: {error!r}") from None


def _qwen(name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelShape:
    tied = hidden < 2048
    return _shape(
        name,
        {
            "model_type": "qwen2",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 151_936 if tied else 152_064,
            "tie_word_embeddings": tied,
        },
    )


MODELS: Mapping[str, ModelShape] = {
    "0.5B": _qwen("Qwen/Qwen2.5-0.5B-Instruct", 24, 896, 4864, 14, 2),
    "1.5B": _qwen("Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 8960, 12, 2),
    "7B": _qwen("Qwen/Qwen2.5-7B-Instruct", 28, 3584, 18_944, 28, 4),
    "14B": _qwen("Qwen/Qwen2.5-14B-Instruct", 48, 5120, 13_824, 40, 8),
    "32B": _qwen("Qwen/Qwen2.5-32B-Instruct", 64, 5120, 27_648, 40, 8),
}
"""Sizes by which a model can be named, with the shapes of a family that has them all."""
