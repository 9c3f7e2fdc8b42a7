"""What only the main process does, in a run of several processes.

Invariant: where the main process raises inside :func:`from_main`, all processes raise; none is left waiting for a
broadcast that never comes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, reduce
from torch import Tensor, distributed

from agentenv.errors import RolloutError

_Result = TypeVar("_Result")


class MainProcessFailedError(RolloutError):
    """Raised on the other processes where the main one raised."""


class MainProcessInterrupted(KeyboardInterrupt):
    """Raised on the other processes where the main one was interrupted."""


class Processes(Protocol):
    """Those of a run; an ``Accelerator`` or a ``PartialState``."""

    @property
    def num_processes(self) -> int:
        """How many."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of them."""


@dataclass(frozen=True)
class _Alone:
    num_processes: int = 1
    is_main_process: bool = True


def processes_of_run() -> Processes:
    """Those that this program was launched as, by its environment; several are connected already (a trainer's config
    does that)."""
    return PartialState() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else _Alone()


def disconnect() -> None:
    """Leave the other processes, at the end of a program.

    Threads of gloo that still run while the interpreter shuts down abort the process now and then, and torchrun then
    calls the whole run failed.
    """
    if distributed.is_initialized():
        gc.collect()  # a model wrapped for several processes holds their group, and a trainer is part of a cycle
        distributed.destroy_process_group()


def from_main(processes: Processes, call: Callable[[], _Result]) -> _Result:
    """What ``call`` returns on the main process, on every process; it is called there alone.

    Args:
        processes: of the run; all of them must come here.
        call: does nothing that needs the other processes; its result can be pickled.

    Raises:
        MainProcessFailedError: on the others, where ``call`` raised an error.
        MainProcessInterrupted: on the others, where it was interrupted.
        BaseException: on the main process, whatever ``call`` raised.
    """
    if processes.num_processes == 1:
        return call()
    box: list[Any] = [None, None, None]
    error: BaseException | None = None
    if processes.is_main_process:
        try:
            box[0] = call()
        except BaseException as raised:  # raised again below, when the others know
            error = raised
            kind = "interrupted" if isinstance(raised, KeyboardInterrupt) else "failed"
            box = [None, kind, f"{type(raised).__name__}: {raised}"]
    broadcast_object_list(box)
    if error is not None:
        raise error
    if box[1] == "interrupted":
        raise MainProcessInterrupted(f"the main process was interrupted ({box[2]})")
    if box[1] == "failed":
        raise MainProcessFailedError(f"the main process failed: {box[2]}")
    result: _Result = box[0]
    return result


def mean_and_variance(values: Tensor) -> tuple[float, float]:
    """Mean and (biased) variance over the values of all processes; zeros where there is none.

    Args:
        values: [n] this process's; n may differ between processes.
    """
    values = values.detach().double().flatten()
    count, total = _sums(
        torch.stack([torch.tensor(float(values.numel()), device=values.device), values.sum()])
    )
    if count == 0.0:
        return 0.0, 0.0
    mean = total / count
    (squares,) = _sums(((values - mean) ** 2).sum().reshape(1))
    return mean, squares / count


def _sums(values: Tensor) -> list[float]:
    if PartialState().num_processes > 1:
        values = reduce(values, reduction="sum")
    sums: list[float] = values.tolist()
    return sums
