"""FSDP2 for the critic: its layers sharded over the processes as accelerate shards the policy's.

Accelerate's own ``prepare`` is not used: it looks for the layer classes that were named for the policy, and in mixed
precision it would have the value head compute, and the values leave it, in bfloat16.

Invariants:

* Units are the decoder layers, the embeddings, the value head, and the rest. The head is float32 in every precision;
  so are the gradients that are averaged, as with DDP.
* All processes start from the main one's weights; the others may hold none (``cpu_ram_efficient_loading``).
* Every forward pass is a call on all processes: they must make the same number of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentenv_trainers.critic import Critic


def shard(critic: Critic, accelerator: Accelerator) -> None:
    """Shard a critic in place; it becomes an ``FSDPModule``.

    Args:
        critic: on any device; it is moved unit by unit.
        accelerator: of an FSDP2 run, whose plugin's settings are used.
    """
    plugin = accelerator.state.fsdp_plugin
    precision: MixedPrecisionPolicy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    settings: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": replace(precision, reduce_dtype=torch.float32, output_dtype=None),
    }
    full = MixedPrecisionPolicy()
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        settings["mesh"] = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    layers = [m for m in critic.backbone.modules() if isinstance(m, GradientCheckpointingLayer)]
    for unit in (*layers, critic.backbone.get_input_embeddings(), critic.head, critic):
        _receive(unit, accelerator.device)
        fully_shard(unit, **(settings if unit is not critic.head else {**settings, "mp_policy": full}))


def reshard(module: nn.Module) -> None:
    """Put the shards back in place, where a forward pass left whole parameters."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _receive(unit: nn.Module, device: torch.device) -> None:
    """The main process's parameters and buffers, where they are not sharded yet."""
    for owner in unit.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                whole = _from_main(parameter.detach(), device)
                setattr(owner, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, _from_main(buffer, device))


def _from_main(tensor: Tensor, device: torch.device) -> Tensor:
    whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    torch.distributed.broadcast(whole, src=0)
    return whole
