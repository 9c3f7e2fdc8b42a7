"""A service as a process: listening, expiring leases, draining.

Invariants:
- SIGTERM and SIGINT drain: no new leases; those that there are go on until they are released, or until the deadline,
  which cuts them. A second signal cuts at once. Every container is removed before the process ends.
- A lease that is over is ended within a second.
"""

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn

from agentenv.errors import SandboxError, UsageError
from agentenv.serving import server_config
from agentenv_envs.swe.sandbox.base import SandboxBackend

from .app import create_app
from .leases import Leases
from .limits import ServiceLimits, Tokens
from .task_images import TaskImages

__all__ = ["Service"]

logger = logging.getLogger(__name__)

TICK_S = 0.05
EXPIRE_EVERY_S = 1.0
REAP_EVERY_S = 300.0


class _Server(uvicorn.Server):
    """uvicorn, but a signal is a wish to drain."""

    signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1


class Service:
    """Leases over a backend, served over HTTP.

    Args:
        backend: where sandboxes come from; closed in the end.
        tokens: the clients.
        limits: what they may ask for.
        drain_s: seconds that leases have after the first signal.
        images: makes images of rows; by default with the backend.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        tokens: Tokens,
        limits: ServiceLimits,
        *,
        drain_s: float = 30.0,
        images: TaskImages | None = None,
    ) -> None:
        if drain_s < 0:
            raise UsageError(f"--drain-s {drain_s}: 0 or more is needed")
        self.leases = Leases(backend, limits)
        self._images = images or TaskImages(backend, limits)
        self._drain_s = drain_s
        app = create_app(self.leases, tokens, self._images)
        self._server = _Server(server_config(app, max_connections=8 * limits.max_sandboxes + 64, stop_s=5))

    def stop(self, *, now: bool = False) -> None:
        """What a signal does; from any thread. `now` is what the second one does."""
        self._server.signals += 2 if now else 1

    async def serve(self, listener: socket.socket) -> None:
        """Serve until a signal has come and all leases have ended."""
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            watch.cancel()
            self._images.close()
            await asyncio.to_thread(self.leases.close)
            listener.close()

    async def _watch(self) -> None:
        """Expire and reap until a signal comes; then drain."""
        expire_at, reap_at = 0.0, time.monotonic() + REAP_EVERY_S
        while self._server.signals == 0:
            expire_at, reap_at = await self._tend(expire_at, reap_at)
            await asyncio.sleep(TICK_S)
        logger.warning("stopping: %d leases have %g s", self.leases.count(), self._drain_s)
        self.leases.drain()
        deadline = time.monotonic() + self._drain_s
        while self.leases.count() and time.monotonic() < deadline and self._server.signals < 2:
            expire_at, _ = await self._tend(expire_at, float("inf"))
            await asyncio.sleep(TICK_S)
        await asyncio.to_thread(self.leases.close)  # those who wait for a command hear that it was cut
        self._server.should_exit = True

    async def _tend(self, expire_at: float, reap_at: float) -> tuple[float, float]:
        now = time.monotonic()
        if now >= expire_at:
            self.leases.expire()
            expire_at = now + EXPIRE_EVERY_S
        if now >= reap_at:
            reap_at = now + REAP_EVERY_S
            try:
                await asyncio.to_thread(self.leases.backend.reap)
            except SandboxError as error:
                logger.warning("%s", error)
        return expire_at, reap_at
