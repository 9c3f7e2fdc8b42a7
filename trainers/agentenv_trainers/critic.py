"""The critic: a copy of the policy's backbone with one value per token.

Invariants:

* The critic shares no parameter with the policy.
* Attention is frozen by its role in a decoder layer, not by the class of one model family; where no attention
  is found that is an error, never a silent no-op.
* A forward pass is deterministic: dropout is off, so that targets and predictions come from one function.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


class Critic(nn.Module):
    """Backbone and scalar head.

    The head is float32 and starts at zero, so that an untrained critic says 0 everywhere instead of noise.

    Args:
        backbone: a transformer without language-model head (``AutoModel``); it becomes the critic's own.

    Raises:
        ValueError: the backbone's config names no hidden size.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        hidden_size = getattr(backbone.config.get_text_config(), "hidden_size", None)
        if hidden_size is None:
            raise ValueError(
                f"config of {type(backbone).__name__} has no hidden_size: no value head can be built"
            )
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32, device=backbone.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        _disable_dropout(self)

    @classmethod
    def from_policy(cls, policy: PreTrainedModel) -> Critic:
        """A critic that starts from a copy of the policy's backbone, all parameters trainable and in float32.

        In bfloat16 an AdamW step of a usual learning rate is rounded away; autocast still computes in bfloat16.

        Raises:
            ValueError: the policy has no separate backbone (``base_model``).
        """
        backbone = policy.base_model
        if backbone is policy:
            raise ValueError(f"{type(policy).__name__} has no separate backbone (base_model_prefix)")
        critic = cls(cast(PreTrainedModel, copy.deepcopy(backbone)))
        critic.requires_grad_(True)
        return critic.float()

    @property
    def _no_split_modules(self) -> object:
        """Layers that a sharding wrapper must keep whole."""
        return self.backbone._no_split_modules

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, T] float32: value of the state after each token, so position t - 1 is the value that token t
        met.

        Args:
            input_ids: [B, T], padded on the right.
            attention_mask: [B, T]; may be left out, as right padding cannot reach earlier tokens of a causal
                model.
        """
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        # The head stays in float32 under autocast: a value in bfloat16 has two decimal digits.
        with torch.autocast(hidden.device.type, enabled=False):
            return cast(Tensor, self.head(hidden.to(self.head.weight.dtype)).squeeze(-1))


def freeze_attention(module: nn.Module) -> list[str]:
    """Freeze every attention parameter below the module, by role.

    Attention is a direct child of a decoder layer whose class name ends in "Attention" or whose attribute
    name contains "attn" (linear-attention mixers included). Norms inside it (q_norm, k_norm) are attention
    parameters too.
    Source: SAO, arXiv 2607.07508 (the critic's attention is frozen during RL).

    Args:
        module: a critic, a model or a backbone.

    Returns:
        Names of the frozen sub-modules, in order.

    Raises:
        ValueError: no attention is recognised.
    """
    names = []
    for name, child in _attention_modules(module):
        child.requires_grad_(False)
        names.append(name)
    if not names:
        backbone = getattr(module, "backbone", module)
        raise ValueError(
            f"no attention is recognised in {type(backbone).__name__}: expected decoder layers with a child "
            "whose class name ends in 'Attention' or whose name contains 'attn'. Pass "
            "freeze_critic_attention=False to train all parameters of the critic"
        )
    return names


def _attention_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for layer_name, layer in module.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for child_name, child in layer.named_children():
            if type(child).__name__.endswith("Attention") or "attn" in child_name:
                yield (f"{layer_name}.{child_name}" if layer_name else child_name), child


def _disable_dropout(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(getattr(child, "attention_dropout", None), float):
            setattr(child, "attention_dropout", 0.0)  # noqa: B010 - not in the type of every module
