"""A socket to listen on, for the services of this package."""

from __future__ import annotations

import socket

from agentenv.errors import UsageError

__all__ = ["listen", "url_of"]


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 is any free one.

    Raises:
        UsageError: the address can't be had.
    """
    if not 0 <= port <= 65535:  # the C library would wrap it round
        raise UsageError(f"--port {port}: 0 to 65535 is allowed")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: can't listen there: {error}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a bound socket, as http://HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
