"""FSDP2 for the models beside the policy: sharded over the processes as accelerate shards the policy.

Accelerate's own ``prepare`` is not used: it looks for the layer classes that were named for the policy, and in mixed
precision it would have a value head compute, and its values leave it, in bfloat16.

Invariants:

* Units are the decoder layers, embeddings that are not tied, modules that were named, and the rest. Gradients are
  averaged in float32, as with DDP.
* All processes start from the main one's weights; the others may hold none (``cpu_ram_efficient_loading``).
* Every forward pass is a call on all processes: they must make the same number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def shard(
    module: nn.Module,
    backbone: PreTrainedModel,
    accelerator: Accelerator,
    *,
    float32: Sequence[nn.Module] = (),
) -> None:
    """Shard a module in place; it becomes an ``FSDPModule``.

    Args:
        module: on any device; it is moved unit by unit.
        backbone: the transformer in it, or itself.
        accelerator: of an FSDP2 run, whose plugin's settings are used.
        float32: modules in it that compute in float32 in every precision.
    """
    plugin = accelerator.state.fsdp_plugin
    precision: MixedPrecisionPolicy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    settings: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": replace(precision, reduce_dtype=torch.float32, output_dtype=None),
    }
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        settings["mesh"] = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    units: list[nn.Module] = [m for m in backbone.modules() if isinstance(m, GradientCheckpointingLayer)]
    inputs, outputs = backbone.get_input_embeddings(), backbone.get_output_embeddings()
    if inputs.weight is not getattr(outputs, "weight", None):
        units.append(inputs)
    exact = {**settings, "mp_policy": MixedPrecisionPolicy()}
    for unit in (*units, *float32, module):
        _receive(unit, accelerator.device)
        fully_shard(unit, **(exact if any(unit is part for part in float32) else settings))


def reshard(module: nn.Module) -> None:
    """Put the shards back in place, where a forward pass left whole parameters."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _receive(unit: nn.Module, device: torch.device) -> None:
    """The main process's parameters and buffers, where they are not sharded yet."""
    received: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for owner in unit.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                continue
            if id(parameter) not in received:
                whole = _from_main(parameter.detach(), device)
                received[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            setattr(owner, name, received[id(parameter)])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, _from_main(buffer, device))


def _from_main(tensor: Tensor, device: torch.device) -> Tensor:
    whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    torch.distributed.broadcast(whole, src=0)
    return whole
