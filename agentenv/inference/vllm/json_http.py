"""JSON over HTTP for asyncio: aiohttp, with the errors that an engine has to tell apart.

Invariants:

* A call that is cancelled or late closes its connection; servers take that for an abort.
* A request is sent a second time only where its connection ended before the first byte of an answer.
* Connections belong to the event loop they were opened in; another loop opens its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentenv.errors import MissingExtraError, ModelError, UsageError

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["ConnectionLostError", "JsonHttp", "Response"]

_KEEP_IDLE_S = 4.0
"""Less than a server's own limit, which is 5 s in uvicorn."""
_SHOWN = 300
"""Characters of an answer in a message."""


class ConnectionLostError(ModelError):
    """Nothing listens there, or the connection was cut before the answer was complete."""


class NoAnswerError(ModelError):
    """The server answers too late, or not at all."""


@dataclass(frozen=True)
class Response:
    """An answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body's value.

        Raises:
            ModelError: it is no JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError:
            raise ModelError(f"the server answered with something that is no JSON: {self.text()}") from None

    def text(self) -> str:
        """The body, at most 300 characters of it, on one line."""
        text = " ".join(self.body.decode("utf-8", "replace").split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class JsonHttp:
    """Client of one server; as many connections as there are calls at one time.

    Args:
        base_url: such as ``http://127.0.0.1:8000``; a path in front of all others is kept.
        api_key: sent as a bearer token; None or empty: none.

    Raises:
        MissingExtraError: aiohttp is not installed.
        UsageError: the URL is none of http or https, or the key fits no header.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise MissingExtraError("aiohttp", "train") from None
        self._aiohttp = aiohttp
        try:
            parts = urlsplit(base_url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or not base_url.isprintable():
            raise UsageError(f"server address {base_url!r} must be like http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/")
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UsageError("the server's key has characters that no header can hold")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._session: ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, *, timeout_s: float) -> Response:
        """See :meth:`request`."""
        return await self.request("GET", path, None, timeout_s=timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Response:
        """See :meth:`request`."""
        return await self.request("POST", path, body or {}, timeout_s=timeout_s)

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float | None
    ) -> Response:
        """One request.

        Args:
            method: GET or POST.
            path: after the base URL, beginning with a slash.
            body: of a POST.
            timeout_s: of the whole; None: no limit.

        Raises:
            ConnectionLostError: no answer, or half of one.
            TimeoutError: late.
        """
        data = None if body is None else json.dumps(body).encode()
        async with asyncio.timeout(timeout_s):
            try:
                try:
                    return await self._exchange(method, path, data)
                except self._aiohttp.ServerDisconnectedError:
                    return await self._exchange(
                        method, path, data
                    )  # it had closed a connection that was kept
            except self._aiohttp.ClientConnectorError as error:
                raise ConnectionLostError(f"{self.base_url}: nothing listens there ({error})") from error
            except (self._aiohttp.ClientError, ConnectionError) as error:
                raise ConnectionLostError(
                    f"{self.base_url}: the connection was cut ({type(error).__name__})"
                ) from error

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()
            await asyncio.sleep(0)  # their transports end

    async def _exchange(self, method: str, path: str, data: bytes | None) -> Response:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            aiohttp = self._aiohttp
            if self._session is not None:
                self._session.detach()  # of a loop that has ended, and its connections with it
            self._loop, self._session = (
                loop,
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                    headers=self._headers,
                ),
            )
        call = self._session.request(method, self.base_url + path, data=data, allow_redirects=False)
        async with call as answer:
            return Response(answer.status, await answer.read())
