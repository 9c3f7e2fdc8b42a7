"""An endpoint for agents as a server in the event loop of its engines."""

from __future__ import annotations

import socket

from agentenv.agents.app import create_app
from agentenv.agents.desk import EpisodeDesk
from agentenv.agents.endpoint import AgentEndpoint
from agentenv.errors import ModelError
from agentenv.serving import AppServer

__all__ = ["AgentServer"]


class AgentServer(AppServer):
    """Serves an endpoint.

    Args:
        endpoint: answers.
        listener: bound; closed in the end.
        desk: see :func:`~agentenv.agents.app.create_app`.
    """

    def __init__(
        self, endpoint: AgentEndpoint, listener: socket.socket, desk: EpisodeDesk | None = None
    ) -> None:
        super().__init__(create_app(endpoint, desk), listener)

    async def start(self) -> None:
        """Begin to serve; returns when it does.

        Raises:
            ModelError: it ended at once.
        """
        try:
            await super().start()
        except RuntimeError as error:
            raise ModelError(f"the endpoint for agents: {error}") from None
