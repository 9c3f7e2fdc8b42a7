"""PEFT adapters (LoRA and its relatives) in a model: found, merged into copies, and named as PEFT's files name them.

Invariants:

* Nothing here imports peft, :func:`with_trial_adapter` aside: a model without adapters needs none.
* Merging works on copies; the trained layers are not touched, so not a bit of them is lost to rounding.
"""

from __future__ import annotations

import copy
import json
from typing import Any, cast

import torch
from torch import nn

from agentenv.errors import UsageError

_TRIAL_SPREAD = 0.04


def without_peft(model: nn.Module) -> nn.Module:
    """The model inside a ``peft.PeftModel``, its adapter layers in place; other models as they are.

    Raises:
        UsageError: the adapter cannot be merged into weights (prompt tuning and its relatives).
    """
    if not hasattr(type(model), "get_base_model"):
        return model
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UsageError(
            f"PEFT type {getattr(config, 'peft_type', None)} cannot be merged into the model's weights, which the "
            "engines are given: use LoRA"
        )
    return cast(nn.Module, cast(Any, model).get_base_model())


def adapter_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that PEFT put in place of ones of the model, by name; only the outermost of nested ones."""
    found: dict[str, nn.Module] = {}
    outer = None
    for name, child in module.named_modules():
        if outer is not None and name.startswith(f"{outer}."):
            continue
        if _is_adapter_layer(child):
            outer, found[name] = name, child
    return found


def merged_copy(layer: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A plain layer that computes what an adapter layer does: base weight + update of the active adapter.

    Args:
        layer: one of :func:`adapter_layers`; not changed.
        memo: as in ``copy.deepcopy``: stand-ins of parameters, by their ``id``.
    """
    copied = cast(Any, copy.deepcopy(layer, memo))
    if hasattr(type(copied), "unload_and_optionally_merge_module"):
        return cast(
            nn.Module,
            copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None),
        )
    copied.merge()
    return cast(nn.Module, copied.get_base_layer())


def merge_adapters(module: nn.Module) -> None:
    """Put plain layers in place of the adapter layers below the module."""
    for name, layer in adapter_layers(module).items():
        module.set_submodule(name, merged_copy(layer))


def lora_config(model: nn.Module) -> dict[str, Any] | None:
    """What PEFT writes into ``adapter_config.json`` for the active adapter; None: the model has no LoRA adapter."""
    if not hasattr(type(model), "get_base_model"):
        return None
    config = cast(Any, model).peft_config[cast(Any, model).active_adapter]
    values = json.loads(
        json.dumps(config.to_dict(), default=lambda v: sorted(v) if isinstance(v, set) else str(v))
    )
    return {**values, "inference_mode": True} if values["peft_type"] == "LORA" else None


def lora_name(model: nn.Module, name: str) -> str | None:
    """The name in ``adapter_model.safetensors`` of an entry of the state dict of the model inside.

    Args:
        model: a ``peft.PeftModel``.
        name: without parts of other wrappers.

    Returns:
        None: the entry is not of the active adapter.
    """
    layer, _, matrix = name.partition(".lora_")
    parts = matrix.split(".")
    active = cast(Any, model).active_adapter
    if active not in parts[1:]:
        return None
    return f"base_model.model.{layer}.lora_{'.'.join(part for part in parts if part != active)}"


def with_trial_adapter(model: nn.Module, config: Any) -> nn.Module:
    """A ``peft.PeftModel`` over the weights of a model, with an adapter at random that changes what it computes.

    Args:
        model: plain; not changed, and its weights are not copied.
        config: a ``peft.LoraConfig``; not changed.
    """
    from peft import get_peft_model

    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    adapted = get_peft_model(cast(Any, copy.deepcopy(model, memo)), copy.deepcopy(config))
    generator = torch.Generator().manual_seed(0)
    for layer in adapter_layers(adapted.get_base_model()).values():
        for name, matrix in getattr(layer, "lora_B", {}).items():
            # A few hundredths of the layer's own output, as training changes it.
            spread = _TRIAL_SPREAD / cast(Any, layer).scaling[name]
            drawn = spread * torch.randn(matrix.weight.shape, generator=generator)
            matrix.weight.data.copy_(drawn)
    return cast(nn.Module, adapted)


def _is_adapter_layer(module: nn.Module) -> bool:
    # The class is asked: PEFT's wrappers answer for the attributes of what they wrap.
    kind = type(module)
    return hasattr(kind, "unload_and_optionally_merge_module") or (
        hasattr(kind, "merge") and hasattr(kind, "get_base_layer")
    )
