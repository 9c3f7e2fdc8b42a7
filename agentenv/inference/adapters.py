"""A LoRA adapter by itself, as engines that have the model already take it.

Invariants:

* Names and files are PEFT's: ``peft.PeftModel.from_pretrained`` and vLLM load the folder.
* Weights that carry an adapter are its merged ones: whoever does not ask for the adapter has a plain state dict.
* Nothing here imports peft.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_RANKS", "AdaptedWeights", "Adapter", "max_rank"]

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for ``--max-lora-rank``."""

_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda value: str(value) != "LORA", "a PEFT type other than LORA"),
    "use_dora": (bool, "DoRA"),
    "modules_to_save": (bool, "layers trained whole (modules_to_save)"),
    "bias": (lambda value: value not in (None, "none"), "trained biases (bias)"),
    "lora_bias": (bool, "a bias in the adapter (lora_bias)"),
    "rank_pattern": (bool, "several ranks (rank_pattern)"),
    "alpha_pattern": (bool, "several scales (alpha_pattern)"),
    "target_parameters": (bool, "adapters on parameters, as of fused experts (target_parameters)"),
    "trainable_token_indices": (bool, "trained tokens (trainable_token_indices)"),
    "layer_replication": (bool, "layer_replication"),
    "alora_invocation_tokens": (bool, "activated LoRA"),
    "use_qalora": (bool, "QALoRA"),
    "use_bdlora": (bool, "block-diagonal LoRA"),
    # These change the model's own weights when training begins.
    "init_lora_weights": (
        lambda value: isinstance(value, str) and value.lower() not in ("gaussian", "eva", "orthogonal"),
        "a start that changes the model's weights (init_lora_weights)",
    ),
}
"""What vLLM does not compute, by the option of ``peft.LoraConfig``; not all its versions say so."""

_EMBEDDINGS = ("lora_embedding_A", "lora_embedding_B", "embed_tokens", "lm_head")


@dataclass(frozen=True, eq=False)
class Adapter:
    """One version of an adapter."""

    config: Mapping[str, Any]
    """Of ``adapter_config.json``."""
    tensors: Mapping[str, Tensor]
    """Of ``adapter_model.safetensors``."""

    @property
    def rank(self) -> int:
        """Of its matrices."""
        return int(self.config["r"])

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def obstacle(self) -> str | None:
        """What vLLM cannot serve of it; None: nothing is known."""
        for option, (is_refused, said) in _REFUSED.items():
            if is_refused(self.config.get(option)):
                return said
        if any(part in name.split(".") for name in self.tensors for part in _EMBEDDINGS):
            return "adapters on the embeddings or the head"
        if self.rank > MAX_RANKS[-1]:
            return f"a rank of {self.rank}, above {MAX_RANKS[-1]}"
        return None

    def save(self, folder: Path) -> None:
        """Write it.

        Args:
            folder: is made.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")


class AdaptedWeights(dict[str, "Tensor"]):
    """A model's state dict with an adapter merged, and that adapter."""

    def __init__(self, weights: Mapping[str, Tensor], adapter: Adapter) -> None:
        super().__init__(weights)
        self.adapter = adapter


def max_rank(rank: int) -> int:
    """The least ``--max-lora-rank`` for a rank up to the largest of :data:`MAX_RANKS`."""
    return next(allowed for allowed in MAX_RANKS if allowed >= rank)
