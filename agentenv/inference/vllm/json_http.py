"""JSON over HTTP/1.1 for asyncio, with connections that are kept; standard library alone.

An engine has hundreds of turns in flight and each waits for one answer: what counts is little work for a request.

Invariants:

* A call that is cancelled or late closes its connection; servers take that for an abort.
* A request is sent a second time only where a kept connection turned out to be closed before anything was answered.
* Connections belong to the event loop they were opened in; another loop opens its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from agentenv.errors import ModelError, UsageError

__all__ = ["ConnectionLostError", "JsonHttp", "Response"]

_CLOSE_TIMEOUT_S = 1.0
_LIMIT = 2**20
"""Longest line of a header, in bytes."""


class ConnectionLostError(ModelError):
    """Nothing listens there, or the connection was cut before the answer was complete."""


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
        return text if len(text) <= 300 else f"{text[:300]}..."


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_fresh: bool = True


class JsonHttp:
    """Client of one server; as many connections as there are calls at one time.

    Args:
        base_url: such as ``http://127.0.0.1:8000``; a path in front of all others is kept.
        api_key: sent as a bearer token; None or empty: none.

    Raises:
        UsageError: the URL is none of http or https.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or not base_url.isprintable():
            raise UsageError(f"server address {base_url!r} must be like http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/")
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UsageError("the server's key has characters that no header can hold")
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )
        self._idle: list[_Connection] = []
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
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(data)}\r\n\r\n"
        ).encode()
        async with asyncio.timeout(timeout_s):
            while True:
                connection = await self._connect()
                was_fresh = connection.is_fresh
                try:
                    return await self._exchange(connection, head + data)
                except BaseException as error:
                    connection.writer.close()
                    if not isinstance(error, OSError | EOFError | ValueError) or isinstance(
                        error, TimeoutError
                    ):
                        raise
                    if not was_fresh and isinstance(error, _NothingAnsweredError):
                        continue  # the server had closed the connection while it was idle
                    raise ConnectionLostError(
                        f"{self.base_url}: the connection was cut ({type(error).__name__})"
                    ) from error

    async def close(self) -> None:
        """Close the connections that are idle."""
        idle, self._idle = self._idle, []
        if self._loop is not asyncio.get_running_loop():
            return
        for connection in idle:
            connection.writer.close()
        for connection in idle:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await connection.writer.wait_closed()
        await asyncio.sleep(0)  # connections that calls have closed end, too

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._idle, self._loop = [], loop
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=_LIMIT
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionLostError(f"{self.base_url}: nothing listens there ({error})") from error
        return _Connection(reader, writer)

    async def _exchange(self, connection: _Connection, message: bytes) -> Response:
        reader, writer = connection.reader, connection.writer
        try:
            writer.write(message)
            await writer.drain()
            line = await reader.readline()
        except (ConnectionError, EOFError) as error:
            raise _NothingAnsweredError(str(error)) from error
        if not line:
            raise _NothingAnsweredError("closed")
        parts = line.split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise ValueError("no HTTP")
        status, chunked, keep = int(parts[1]), False, parts[0] != b"HTTP/1.0"
        length: int | None = None
        while (line := await reader.readline()) not in (b"\r\n", b"\n"):
            if not line:
                raise EOFError
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip().lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = value.endswith(b"chunked")
            elif name == b"connection":
                keep = value != b"close"
        if chunked:
            body = await _chunks(reader)
        elif length is not None:
            body = await reader.readexactly(length)
        else:
            body, keep = await reader.read(), False
        connection.is_fresh = False
        if keep:
            self._idle.append(connection)
        else:
            writer.close()
        return Response(status, body)


class _NothingAnsweredError(OSError):
    """The connection ended before the first byte of an answer."""


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while True:
        line = await reader.readline()
        if not line:
            raise EOFError
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            break
        parts.append(await reader.readexactly(size))
        await reader.readline()
    while (await reader.readline()).strip():
        pass  # trailers
    return b"".join(parts)
