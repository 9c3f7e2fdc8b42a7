"""FSDP2 over gloo, for tests: accelerate shards on accelerators only and would take DDP on CPUs, silently."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def enable() -> None:
    """Have accelerate take FSDP in this process where it was launched with it, also on CPUs."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    real = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            # As the branch for accelerators does.
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init  # type: ignore[method-assign]
