"""PEFT adapters (LoRA and its relatives) in a model: found, and merged into copies.

Invariants:

* Nothing here imports peft: a model without adapters needs none.
* Merging works on copies; the trained layers are not touched, so not a bit of them is lost to rounding.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import nn

from agentenv.errors import UsageError


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


def _is_adapter_layer(module: nn.Module) -> bool:
    # The class is asked: PEFT's wrappers answer for the attributes of what they wrap.
    kind = type(module)
    return hasattr(kind, "unload_and_optionally_merge_module") or (
        hasattr(kind, "merge") and hasattr(kind, "get_base_layer")
    )
