"""Keeps sandboxes with a writable root from filling the engine's disk.

Storage drivers on common file systems take no size limit, so the engine is asked from time to time how much each
container has written. One that is over its limit has everything in it killed, at every look until it has removed
enough: its commands are results (137, with a note that says why), so that filling a disk saves no episode from its 0.

Invariants:
- One request to the engine per look, for all sandboxes of a backend, and none where none has a writable root.
- A disk can go over the limit by what is written between two looks, and no further.
"""

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from agentenv.errors import SandboxError

from .base import SandboxSpec
from .engine import engine_errors

__all__ = ["LOOK_S", "DiskWatch"]

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks."""


class Watched(Protocol):
    """A container that has a limit on its disk."""

    container_id: str
    spec: SandboxSpec
    disk_used_mb: int | None

    def kill_all(self) -> None:
        """Kill all that runs in it."""


class DiskWatch:
    """A thread that looks at the sizes of a backend's containers, from the first `start` to `close`.

    Args:
        api: a `docker.APIClient`.
        label: that all containers of the backend have.
        watched: gives the sandboxes with a writable root.
    """

    def __init__(self, api: Any, label: str, watched: Callable[[], Collection[Watched]]) -> None:
        self._api = api
        self._label = label
        self._watched = watched
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look; may be called again."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._work, name="sandbox-disk", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Look no more; idempotent. A look that is under way ends by itself."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(LOOK_S):
            watched = {sandbox.container_id: sandbox for sandbox in self._watched()}
            if not watched:
                continue
            try:
                self._look(watched)
            except SandboxError as error:
                if not self._closed.is_set():
                    logger.warning("%s; sizes are not known until the next look", error)

    def _look(self, watched: dict[str, Watched]) -> None:
        with engine_errors("asking for the sizes of containers"):
            found = self._api.containers(size=True, filters={"label": self._label})
        for item in found:
            sandbox = watched.get(item["Id"])
            if sandbox is None:
                continue
            used_mb = (item.get("SizeRw") or 0) >> 20
            sandbox.disk_used_mb = used_mb if used_mb > sandbox.spec.disk_mb else None
            if sandbox.disk_used_mb is not None:
                logger.warning(
                    "container %s holds %d MiB, over its limit of %d; what runs in it is killed",
                    item["Id"][:12],
                    used_mb,
                    sandbox.spec.disk_mb,
                )
                try:
                    sandbox.kill_all()
                except SandboxError as error:  # it may have gone meanwhile
                    logger.debug("%s", error)
