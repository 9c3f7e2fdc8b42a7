"""An endpoint as a server in the event loop of its engines.

Invariant: it takes no signal of the process, and :meth:`AgentServer.stop` ends it, its connections included.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from agentenv.agents.app import create_app
from agentenv.agents.desk import EpisodeDesk
from agentenv.agents.endpoint import AgentEndpoint
from agentenv.errors import ModelError
from agentenv.listening import url_of

__all__ = ["AgentServer"]

_MAX_CONNECTIONS = 8192
_BACKLOG = 1024


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's."""
        yield


class AgentServer:
    """Serves an endpoint.

    Args:
        endpoint: answers.
        listener: bound; closed in the end.
        desk: see :func:`~agentenv.agents.app.create_app`.
    """

    def __init__(
        self, endpoint: AgentEndpoint, listener: socket.socket, desk: EpisodeDesk | None = None
    ) -> None:
        self.url = url_of(listener)
        """http://HOST:PORT."""
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                create_app(endpoint, desk),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
                limit_concurrency=_MAX_CONNECTIONS,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve; returns when it does.

        Raises:
            ModelError: it ended at once.
        """
        self._listener.listen(_BACKLOG)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="agentenv-proxy")
        while not self._server.started:
            if self._task.done():
                raise ModelError(f"the endpoint for agents did not start at {self.url}")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End it; idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=10.0)
            self._task.cancel()
        self._listener.close()
