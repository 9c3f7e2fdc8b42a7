"""Engines over vLLM for a policy: servers that run already, one that is started here, or vLLM in this process.

Invariant: whatever cannot work is a UsageError, and nothing that was started is left running then.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentenv.errors import UsageError
from agentenv.inference.adapters import AdaptedWeights, Adapter, max_rank
from agentenv.inference.model_skeleton import ModelSkeleton
from agentenv.inference.vllm.connect import AdaptersRefusedError, connect
from agentenv.inference.vllm.engine import VLLMEngine
from agentenv.inference.vllm.in_process import InProcessBackend
from agentenv.inference.vllm.server_process import ServerProcess, find_vllm
from agentenv.inference.weight_sync import WeightSync, probe_tolerance
from agentenv.inference.weight_transfer import open_transfer

__all__ = ["LORA_SYNCS", "VLLMOptions", "check_vllm", "open_vllm"]

LORA_SYNCS = ("auto", "adapter", "merged")
DTYPES = ("float32", "bfloat16", "float16")
_OPTIONS = {
    "urls": "--vllm_url",
    "python": "--vllm_python",
    "arguments": "--vllm_args",
    "devices": "--vllm_devices",
}
"""Fields and how command lines call them."""


@dataclass(frozen=True)
class VLLMOptions:
    """Which vLLM, and how weights get there."""

    urls: tuple[str, ...] = ()
    """Of servers that run; empty: one is started."""
    python: str | None = None
    """Interpreter that has vLLM, for the server that is started; None: the running one."""
    arguments: str = ""
    """More of that server's."""
    devices: str | None = None
    """GPUs of that server, as CUDA_VISIBLE_DEVICES has them; None: all."""
    dtype: str | None = None
    """Type that vLLM computes in, one of DTYPES; None: the trainer's."""
    transfer: str = "shared-memory"
    """One of :data:`agentenv.inference.weight_transfer.TRANSFERS`."""
    folder: str | None = None
    """Of the transfer by filesystem."""
    start_timeout_s: float = 900.0
    """How long a server may take to start, and one that has gone to come back."""
    update_timeout_s: float = 200.0
    """How long one of several servers may take for new weights before the others go on without it."""
    lora_sync: str = "auto"
    """How a LoRA adapter gets there, one of LORA_SYNCS: alone, merged into whole weights, or alone where vLLM can serve
    it."""
    in_process: bool = False
    """No server: vLLM runs in this process."""

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise UsageError(f"--vllm_start_timeout_s is {self.start_timeout_s}, must be above 0")
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"--vllm_dtype is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.lora_sync not in LORA_SYNCS:
            raise UsageError(f"--lora_sync is {self.lora_sync!r}, must be one of {', '.join(LORA_SYNCS)}")
        given = [option for name, option in _OPTIONS.items() if getattr(self, name)]
        own = [option for option in given if option != "--vllm_url"]
        if self.urls and own:
            raise UsageError(f"{own[0]} is for a server that is started here; --vllm_url names running ones")
        if len(set(self.urls)) < len(self.urls):
            raise UsageError("--vllm_url names a server twice")
        if self.in_process:
            not_taken = [option for option in given if option != "--vllm_args"]
            if not_taken:
                raise UsageError(f"--engine vllm-in-process takes no {not_taken[0]}")
            if self.transfer == "nccl":
                raise UsageError("--engine vllm-in-process takes no --weight_transfer nccl")


def check_vllm(options: VLLMOptions) -> None:
    """Whether engines can be opened, as far as is seen without a model; cheap.

    Raises:
        UsageError: they can't.
    """
    if not options.urls:
        find_vllm(options.python)
    if options.transfer == "nccl" and not torch.cuda.is_available():
        raise UsageError("--weight_transfer nccl: the trainer has no GPU; use shared-memory or filesystem")


def open_vllm(
    policy: Any,
    options: VLLMOptions,
    *,
    max_batch: int,
    max_length: int,
    trial: AdaptedWeights | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[VLLMEngine]:
    """One engine for each server, each with the policy's weights.

    Args:
        policy: an :class:`agentenv.inference.policy.Policy` as it was loaded.
        options: which servers.
        max_batch: most requests side by side at a server that is started here.
        max_length: tokens of the longest episode.
        trial: the policy's weights with an adapter such as the run will train; None: it trains whole weights.
        note: told in a line what takes long, and how a LoRA adapter will be sent.

    Raises:
        UsageError: ``lora_sync`` is "adapter" and vLLM cannot serve the trial's; otherwise see
            :func:`agentenv.inference.vllm.connect.connect`.
    """
    check_vllm(options)
    if trial is not None and not _may_send_alone(trial.adapter, options, note):
        trial = None
    skeleton = ModelSkeleton(policy.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transfer = open_transfer(options.transfer, folder=options.folder, device=device)
    own, theirs = _own_dtype(skeleton), _dtype(skeleton, options)
    sync = WeightSync(
        skeleton,
        transfer,
        tolerance=max(probe_tolerance(own), probe_tolerance(theirs)),
        adapters_only=trial is not None,
    )
    opening = _Opening(policy, skeleton, sync, options, max_batch, max_length, note)
    try:
        try:
            backends = opening.open(trial)
        except AdaptersRefusedError as error:
            if options.lora_sync == "adapter":
                raise
            note(f"LoRA: {error}; merged weights are sent instead")
            trial, sync.adapters_only = None, False
            backends = opening.open(None)
    except BaseException:
        opening.stop()
        asyncio.run(sync.close())
        raise
    if trial is not None:
        note(
            f"LoRA: the adapter alone is sent, {_size(trial.adapter.num_bytes)} for each version in place of "
            f"{_size(skeleton.num_bytes)}"
        )
    eos = policy.tokenizer.eos_token_id
    return [
        VLLMEngine(
            backend,
            sync,
            eos_token_ids=() if eos is None else (int(eos),),
            max_length=max_length,
            restart_timeout_s=options.start_timeout_s,
            update_timeout_s=options.update_timeout_s,
        )
        for backend in backends
    ]


@dataclass
class _Opening:
    """Backends on their way; a second :meth:`open` uses what the first has started, where that still runs."""

    policy: Any
    skeleton: ModelSkeleton
    sync: WeightSync
    options: VLLMOptions
    max_batch: int
    max_length: int
    note: Callable[[str], None]
    server: ServerProcess | None = None

    def open(self, trial: AdaptedWeights | None) -> list[Any]:
        """Raises as :func:`connect`."""
        sizes = {"max_batch": self.max_batch, "max_length": self.max_length}
        rank = None if trial is None else max_rank(trial.adapter.rank)
        if self.options.in_process:
            self.note("loading the policy into vLLM; it may take a minute")
            return [open_in_process(self.policy, self.skeleton, self.options, **sizes, max_lora_rank=rank)]
        if not self.options.urls and (self.server is None or not self.server.is_running):
            self.stop()
            self.note("starting a vLLM server; it may take minutes")
            self.server = start_server(self.policy, self.skeleton, self.options, **sizes, max_lora_rank=rank)
        return asyncio.run(self._connect_all(trial))

    async def _connect_all(self, trial: AdaptedWeights | None) -> list[Any]:
        return [
            await connect(
                url,
                model=self.policy.source,
                tokenizer=self.policy.tokenizer,
                max_length=self.max_length,
                weight_sync=self.sync,
                weights=self.policy.model.state_dict(),
                trial=trial,
                api_key=os.environ.get("VLLM_API_KEY"),
                owner=self.server,
                start_timeout_s=self.options.start_timeout_s,
            )
            for url in (self.options.urls if self.server is None else (self.server.url,))
        ]

    def stop(self) -> None:
        """End the server that was started."""
        if self.server is not None:
            self.server.stop()


def _may_send_alone(adapter: Adapter, options: VLLMOptions, note: Callable[[str], None]) -> bool:
    """Whether an adapter is to be sent by itself, as far as is seen without vLLM.

    Raises:
        UsageError: it has to be, and can't.
    """
    if options.lora_sync == "merged":
        note("LoRA: merged weights are sent (--lora_sync merged)")
        return False
    obstacle = adapter.obstacle()
    why = f"vLLM cannot serve {obstacle}" if obstacle is not None else None
    if options.transfer == "nccl":
        why = "--weight_transfer nccl brings no adapters"
    if options.lora_sync == "adapter" and why is not None:
        raise UsageError(f"--lora_sync adapter: {why}; send merged weights (--lora_sync merged)")
    if options.lora_sync == "auto" and not options.urls and find_vllm(options.python)[1]:
        # benchmarks/lora_sync.py; a server that the user has started for adapters is taken at its word.
        why = "on processors vLLM samples several times slower with adapters (--lora_sync adapter sends them)"
    if why is None:
        return True
    note(f"LoRA: {why}; merged weights are sent instead")
    return False


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"


def start_server(
    policy: Any,
    skeleton: ModelSkeleton,
    options: VLLMOptions,
    *,
    max_batch: int,
    max_length: int,
    max_lora_rank: int | None = None,
) -> ServerProcess:
    """A server of the policy; see :func:`checkpoint_of`."""
    _, on_processor = find_vllm(options.python)
    model, folder = checkpoint_of(policy, skeleton, on_processor=on_processor)
    arguments = shlex.split(options.arguments)
    if options.transfer == "nccl":
        arguments = ["--weight-transfer-config", '{"backend": "nccl"}', *arguments]
    return ServerProcess(
        model,
        dtype=_dtype(skeleton, options),
        max_length=max_length,
        max_requests=max_batch,
        python=options.python,
        arguments=arguments,
        max_lora_rank=max_lora_rank,
        devices=options.devices,
        folder=folder,
    )


def open_in_process(
    policy: Any,
    skeleton: ModelSkeleton,
    options: VLLMOptions,
    *,
    max_batch: int,
    max_length: int,
    max_lora_rank: int | None = None,
) -> InProcessBackend:
    """vLLM in this process; see :func:`checkpoint_of`.

    Raises:
        AdaptersRefusedError: it was to take adapters, and could not be loaded; without them it may be.
    """
    _, on_processor = find_vllm()
    try:
        arguments = json.loads(options.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise UsageError(
            f"--vllm_args {options.arguments!r}: --engine vllm-in-process takes a JSON object of vLLM's "
            f"AsyncEngineArgs ({error})"
        ) from None
    if max_lora_rank is not None:
        arguments = {"enable_lora": True, "max_lora_rank": max_lora_rank, **arguments}
        if not arguments["enable_lora"] or arguments["max_lora_rank"] < max_lora_rank:
            raise AdaptersRefusedError(
                f"--vllm_args has enable_lora {arguments['enable_lora']} and max_lora_rank "
                f"{arguments['max_lora_rank']}, {max_lora_rank} is needed"
            )
    model, folder = checkpoint_of(policy, skeleton, on_processor=on_processor)
    try:
        return InProcessBackend(
            model,
            dtype=_dtype(skeleton, options),
            max_length=max_length,
            max_requests=max_batch,
            arguments=arguments,
            folder=folder,
        )
    except UsageError as error:
        # What its core says of a model that takes no adapters does not reach this process.
        raise error if max_lora_rank is None else AdaptersRefusedError(str(error)) from error


def _own_dtype(skeleton: ModelSkeleton) -> str:
    return str(skeleton.dtype).removeprefix("torch.")


def _dtype(skeleton: ModelSkeleton, options: VLLMOptions) -> str:
    return options.dtype or _own_dtype(skeleton)


def checkpoint_of(
    policy: Any, skeleton: ModelSkeleton, *, on_processor: bool
) -> tuple[str, tempfile.TemporaryDirectory[str] | None]:
    """What vLLM can load the policy from, and the folder that has to last as long, if one was made.

    A vLLM on processors keeps a copy of the head of a model whose embeddings are tied, which no new weights reach: it
    is given a checkpoint with the two apart.
    """
    if not (on_processor and skeleton.is_tied):
        return policy.source, None
    folder = tempfile.TemporaryDirectory(prefix="agentenv-model-")
    model = Path(folder.name) / Path(policy.source).name
    skeleton.save(policy.model.state_dict(), model)
    policy.tokenizer.save_pretrained(model)
    return str(model), folder
