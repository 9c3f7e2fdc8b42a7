"""An ASGI application as a server in a running event loop.

Invariant: it takes no signal of the process, and :meth:`AppServer.stop` ends it, its connections included.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from agentenv.listening import url_of

__all__ = ["AppServer", "serve_until_signal", "server_config"]

_MAX_CONNECTIONS = 8192
_BACKLOG = 1024


def server_config(app: Any, *, max_connections: int, stop_s: int) -> uvicorn.Config:
    """How the services of this package are served: nothing is logged but errors.

    Args:
        app: an ASGI application.
        max_connections: more are refused.
        stop_s: seconds that a request may still take when the server is stopped.
    """
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=stop_s,
        limit_concurrency=max_connections,
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's."""
        yield


class AppServer:
    """Serves an application.

    Args:
        app: answers.
        listener: bound; closed in the end.
    """

    def __init__(self, app: Any, listener: socket.socket) -> None:
        self.url = url_of(listener)
        """http://HOST:PORT."""
        self._listener = listener
        self._server = _Server(server_config(app, max_connections=_MAX_CONNECTIONS, stop_s=2))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve; returns when it does.

        Raises:
            RuntimeError: it ended at once.
        """
        self._listener.listen(_BACKLOG)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="agentenv-server")
        while not self._server.started:
            if self._task.done():
                raise RuntimeError(f"the server at {self.url} did not start")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End it; idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=10.0)
            self._task.cancel()
        self._listener.close()


async def serve_until_signal(server: AppServer, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM comes.

    Args:
        server: not started yet.
        started: gets its address when it answers.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await server.start()
    try:
        started(server.url)
        await ended.wait()
    finally:
        await server.stop()
