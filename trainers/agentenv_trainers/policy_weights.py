"""The weights of a trained model as one plain state dict on the CPU: what engines load and folders hold.

Invariants:

* Names are those of the plain model's ``state_dict``, whatever was wrapped around it (DDP, PEFT, FSDP2, compile).
* The trained model does not change by a bit.
* Tensors that lie on the CPU already are views of the live weights; merged and gathered ones are copies.
* Of a model that trains a LoRA adapter they carry that adapter by itself, for engines that take no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentenv.errors import UsageError
from agentenv.inference.adapters import AdaptedWeights, Adapter
from agentenv_trainers.adapters import adapter_layers, lora_config, lora_name, merged_copy, without_peft

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of module names that activation checkpointing of FSDP and torch.compile put in."""


def policy_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor] | None:
    """The full state dict, adapters merged and shards gathered; :class:`AdaptedWeights` of a model with a LoRA adapter.

    Args:
        accelerator: of the training run.
        model: plain, or in any of the wrappers above.

    Returns:
        The state dict on the main process, None on the others. All processes must call: with FSDP2 each
        sends its shards.

    Raises:
        UsageError: adapters that cannot be merged: of prompt tuning, on quantized weights, or on one of two
            tied embeddings.
    """
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    return full_weights(unwrapped, keep=accelerator.is_main_process)


def full_weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor] | None:
    """See :func:`policy_weights`.

    Args:
        model: plain or a ``peft.PeftModel``; its parameters may be shards.
        keep: False: only send this process's shards.
    """
    module = without_peft(model)
    layers = {_plain_name(name): layer for name, layer in adapter_layers(module).items()}
    if layers:
        _check_mergeable(module, layers)
    weights: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # tied weights have two names and are gathered once
    merged: set[str] = set()
    lora = lora_config(model)
    adapter: dict[str, Tensor] = {}
    # Asked first: a sharded module puts its shards back in place for it.
    for name, tensor in module.state_dict(keep_vars=True).items():
        name = _plain_name(name)
        layer_name = _owner(name, layers)
        if lora is not None and (alone := lora_name(model, name)) is not None:
            whole = _whole(tensor)
            if keep:
                adapter[alone] = whole.cpu()
        if layer_name is None:
            if id(tensor) not in gathered:
                whole = _whole(tensor)
                gathered[id(tensor)] = whole.cpu() if keep else torch.empty(0)
            weights[name] = gathered[id(tensor)]
        elif layer_name not in merged:
            merged.add(layer_name)
            weights.update(_merged_entries(layer_name, layers[layer_name], keep))
    if not keep:
        return None
    return weights if lora is None else AdaptedWeights(weights, Adapter(lora, adapter))


def _merged_entries(name: str, layer: nn.Module, keep: bool) -> Iterator[tuple[str, Tensor]]:
    shards = [t for t in chain(layer.parameters(), layer.buffers()) if isinstance(t, DTensor)]
    memo: dict[int, Any] = {}
    for shard in shards:
        whole = _whole(shard)
        if keep:
            memo[id(shard)] = nn.Parameter(whole, requires_grad=False)
    if keep:
        for entry, tensor in merged_copy(layer, memo).state_dict().items():
            yield f"{name}.{entry}", tensor.detach().cpu()


def _whole(tensor: Tensor) -> Tensor:
    """The tensor without gradient, put together from its shards; a call on all processes."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # With offloading the shards lie on the CPU, where the mesh's backend cannot gather them.
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


def _owner(name: str, layers: dict[str, nn.Module]) -> str | None:
    """The adapter layer that an entry of the state dict belongs to."""
    parts = name.split(".")
    return next((p for p in (".".join(parts[:i]) for i in range(1, len(parts))) if p in layers), None)


def _plain_name(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _check_mergeable(module: nn.Module, layers: dict[str, nn.Module]) -> None:
    if getattr(module, "is_quantized", False):
        raise UsageError(
            "adapters on a quantized model cannot be merged into weights that engines load: load the model "
            "without quantization"
        )
    if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
        return
    embeddings = [
        getattr(module, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    adapted = [e for e in embeddings if any(e is layer for layer in layers.values())]
    # PEFT itself keeps trained tokens tied.
    if any(type(embedding).__name__ != "TrainableTokensWrapper" for embedding in adapted):
        raise UsageError(
            "adapters on the embeddings of a model that ties them (tie_word_embeddings): merged, input and output "
            "would differ and engines could not load them; leave embed_tokens and lm_head out of the adapter"
        )
