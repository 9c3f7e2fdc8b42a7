"""How new weights get from the trainer to engines in other processes.

    shared-memory   a checkpoint in /dev/shm; trainer and engine on one machine
    filesystem      a checkpoint in a folder that all machines mount
    nccl            broadcast between GPUs, by TRL's client

The first two also bring a LoRA adapter by itself, to engines that have the model.

Invariants:

* Weights that were published can be loaded any number of times until newer ones are: an engine that was restarted
  gets them without the trainer.
* A checkpoint is complete before its folder has its name, and is not removed while an engine reads it. An adapter's
  folder stays until the engine has loaded something else: vLLM may read it again for any request.
* Nothing is left behind by ``close``; what a killed process left in shared memory goes when the next one opens there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from agentenv.errors import ModelError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from agentenv.inference.adapters import Adapter
    from agentenv.inference.model_skeleton import ModelSkeleton

__all__ = ["TRANSFERS", "FolderTransfer", "NCCLTransfer", "Receiver", "WeightTransfer", "open_transfer"]

logger = logging.getLogger(__name__)

TRANSFERS = ("shared-memory", "filesystem", "nccl")
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "agentenv-weights-"
_LOCK = "lock"
"""File in a folder of weights that its process holds locked: the kernel frees it however that process ends."""


class Receiver(Protocol):
    """What takes weights: see :class:`agentenv.inference.vllm.backend.Backend`."""

    name: str
    incarnation: int
    """How often it has gone and come back."""

    async def load_folder(self, folder: Path) -> None:
        """Take the weights of a checkpoint."""
        ...

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Sample with the adapter of a folder from now on, in place of the one before."""
        ...


class WeightTransfer(Protocol):
    """One way for weights."""

    async def publish(self, skeleton: ModelSkeleton, weights: Mapping[str, Tensor]) -> None:
        """Keep these weights, in place of those before, for any number of :meth:`load`.

        Args:
            skeleton: of the model.
            weights: a state dict of it; the trainer's own, read only during the call.
        """
        ...

    async def publish_adapter(self, adapter: Adapter, name: str) -> None:
        """As :meth:`publish`, for engines that have the model's own weights.

        Args:
            adapter: the trainer's own, read only during the call.
            name: of this version.
        """
        ...

    async def load(self, receiver: Receiver) -> None:
        """Give an engine the weights that were published last.

        Raises:
            ConnectionLostError: the engine has gone.
            ModelError: it did not take them.
        """
        ...

    async def close(self) -> None:
        """Free what was published; idempotent."""
        ...


@dataclass(frozen=True)
class _Published:
    folder: Path
    adapter_name: str | None
    """None: the folder holds whole weights."""


class FolderTransfer:
    """Through checkpoints in a folder, one after the other.

    Args:
        parent: where a folder of its own is made; all engines must see it under the same path.
        durable: write through to the disk before an engine is told.
        reap: remove first what killed processes left there; for a parent that one machine alone has.

    Raises:
        UsageError: that is no folder that can be written to.
    """

    def __init__(self, parent: Path, *, durable: bool = False, reap: bool = False) -> None:
        self._durable = durable
        try:
            if reap:
                _reap(parent)
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _lock(self._root)
        except OSError as error:
            raise UsageError(f"weights can't be written to {parent}: {error.strerror}") from error
        self._root.chmod(0o755)  # engines may run as another user
        # Also where the program ends without close.
        self._remove = weakref.finalize(self, shutil.rmtree, self._root, True)
        self._numbers = itertools.count()
        self._newest: _Published | None = None
        self._readers: dict[Path, int] = {}
        self._in_use: dict[Receiver, Path] = {}
        """Adapters that engines sample with."""

    async def publish(self, skeleton: ModelSkeleton, weights: Mapping[str, Tensor]) -> None:
        """See :class:`WeightTransfer`.

        Raises:
            ModelError: the disk, or shared memory, is full.
        """
        await self._publish(skeleton.num_bytes, lambda folder: skeleton.save(weights, folder), None)

    async def publish_adapter(self, adapter: Adapter, name: str) -> None:
        """See :class:`WeightTransfer`, and :meth:`publish`."""
        await self._publish(adapter.num_bytes, adapter.save, name)

    async def load(self, receiver: Receiver) -> None:
        """See :class:`WeightTransfer`."""
        published = self._newest
        if published is None:
            raise ModelError("no weights were published")
        self._hold(published.folder)
        try:
            if published.adapter_name is None:
                await receiver.load_folder(published.folder)
            else:
                await receiver.load_adapter(published.folder, published.adapter_name)
                self._hold(published.folder)
                former = self._in_use.get(receiver)
                self._in_use[receiver] = published.folder
                if former is not None:
                    await self._release(former)
        finally:
            await self._release(published.folder)

    async def close(self) -> None:
        """Remove the folder."""
        await asyncio.to_thread(self._remove)
        self._lock.close()

    async def _publish(self, num_bytes: int, save: Callable[[Path], None], adapter_name: str | None) -> None:
        folder = self._root / f"{next(self._numbers)}"
        free = shutil.disk_usage(self._root).free
        if free < num_bytes:
            raise ModelError(
                f"weights need {num_bytes / 2**30:.2f} GiB in {self._root.parent}, {free / 2**30:.2f} are free"
            )
        await asyncio.to_thread(self._write, save, folder)
        former, self._newest = self._newest, _Published(folder, adapter_name)
        if former is not None:
            self._hold(former.folder)
            await self._release(former.folder)

    def _hold(self, folder: Path) -> None:
        self._readers[folder] = self._readers.get(folder, 0) + 1

    async def _release(self, folder: Path) -> None:
        self._readers[folder] -= 1
        if not self._readers[folder]:
            del self._readers[folder]
            if self._newest is None or folder != self._newest.folder:
                await asyncio.to_thread(shutil.rmtree, folder, True)

    def _write(self, save: Callable[[Path], None], folder: Path) -> None:
        unfinished = folder.with_name(f"{folder.name}.part")
        try:
            save(unfinished)
            for path in unfinished.iterdir():
                path.chmod(0o644)
                if self._durable:
                    _flush(path)
            unfinished.rename(folder)
            if self._durable:
                _flush(self._root)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ModelError(f"weights could not be written to {self._root}: {error}") from error


class NCCLTransfer:
    """Broadcast over NCCL by TRL's client; trainer and engines have GPUs, and both have vLLM installed.

    Args:
        device: the trainer's, such as ``cuda:0``.
        client: makes a client of the server at a base URL; None: ``trl.generation.vllm_client.VLLMClient``.

    Raises:
        UsageError: that is no GPU.
    """

    def __init__(self, device: str = "cuda", *, client: Any = None) -> None:
        if client is None and not device.startswith("cuda"):
            raise UsageError(f"nccl sends weights between GPUs, the trainer's device is {device}")
        self._device, self._make_client = device, client or _trl_client
        self._clients: dict[str, tuple[int, Any]] = {}
        self._newest: list[tuple[str, Tensor]] | None = None
        # The clients' groups share the trainer's device and know no concurrency.
        self._lock = asyncio.Lock()

    async def publish(self, skeleton: ModelSkeleton, weights: Mapping[str, Tensor]) -> None:
        """See :class:`WeightTransfer`; keeps a copy on the CPU, since the trainer goes on to change its own."""
        named = skeleton.checkpoint_tensors(weights)
        self._newest = await asyncio.to_thread(
            lambda: [(name, t.detach().cpu().clone()) for name, t in named]
        )

    async def publish_adapter(self, adapter: Adapter, name: str) -> None:
        """See :class:`WeightTransfer`.

        Raises:
            UsageError: vLLM takes no adapter over NCCL.
        """
        raise UsageError("nccl brings no adapters: send them by shared-memory or filesystem, or merged")

    async def load(self, receiver: Receiver) -> None:
        """See :class:`WeightTransfer`; an engine that was restarted joins a new group."""
        if self._newest is None:
            raise ModelError("no weights were published")
        async with self._lock:
            await asyncio.to_thread(self._send, receiver.name, receiver.incarnation, self._newest)

    async def close(self) -> None:
        """Leave the groups."""
        clients, self._clients = self._clients, {}
        self._newest = None
        for _, client in clients.values():
            await asyncio.to_thread(client.close_communicator)

    def _send(self, url: str, incarnation: int, weights: list[tuple[str, Tensor]]) -> None:
        metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights]
        try:
            # A server that was restarted is in no group any more, and a broadcast without it would never end.
            known, client = self._clients.get(url, (incarnation, None))
            if client is None or known != incarnation:
                client = self._make_client(url)
                client.init_communicator(device=self._device)
                self._clients[url] = incarnation, client
            client.update_named_params(metadata, ((name, t.to(self._device)) for name, t in weights))
        except Exception as error:
            self._clients.pop(url, None)
            raise ModelError(f"{url} did not take weights over NCCL: {error}") from error


def open_transfer(kind: str, *, folder: str | None = None, device: str = "cpu") -> WeightTransfer:
    """A transfer by name.

    Args:
        kind: one of :data:`TRANSFERS`.
        folder: of "filesystem", which needs it.
        device: of the trainer.

    Raises:
        UsageError: it cannot be used here.
    """
    if kind not in TRANSFERS:
        raise UsageError(f"weight transfer {kind!r} must be one of {', '.join(TRANSFERS)}")
    if (folder is not None) != (kind == "filesystem"):
        raise UsageError(
            f"weight transfer {kind} takes no folder"
            if folder is not None
            else "weight transfer filesystem needs a folder that trainer and engines see under the same path"
        )
    if kind == "nccl":
        return NCCLTransfer(device)
    if folder is not None:
        return FolderTransfer(Path(folder), durable=True)
    if not os.access(_SHARED_MEMORY, os.W_OK):
        raise UsageError(f"there is no {_SHARED_MEMORY} to write to: send weights by filesystem")
    return FolderTransfer(_SHARED_MEMORY, reap=True)


def _lock(folder: Path) -> IO[bytes]:
    """Mark a folder as that of a living process, until the file is closed."""
    # Under another name first: nobody may find it unlocked.
    unlocked = folder / f"{_LOCK}.new"
    lock = unlocked.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)
    return lock


def _reap(parent: Path) -> None:
    """Remove folders of weights whose process has gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _trl_client(url: str) -> Any:
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=url, connection_timeout=60.0)
