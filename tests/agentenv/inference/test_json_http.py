"""The HTTP client against servers that answer, that cut the connection, and that say nothing."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentenv.errors import ModelError, UsageError
from agentenv.inference.vllm.json_http import ConnectionLostError, JsonHttp

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Server:
    """Answers each request of a connection with the next of the scripted answers; None closes it."""

    def __init__(self, *answers: bytes | None, is_silent: bool = False) -> None:
        self.answers, self.is_silent = list(answers), is_silent
        self.connections = self.ended = 0
        self.requests: list[bytes] = []

    async def __aenter__(self) -> JsonHttp:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._http = JsonHttp(f"http://127.0.0.1:{port}/base/", api_key=" secret ")
        return self._http

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        self._server.close()
        while self.ended < self.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                if self.is_silent:
                    await reader.read()
                    return
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if self.answers[:1] == [None]:
                    del self.answers[0]
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.ended += 1


def _with_length(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def test_a_connection_is_kept_and_used_again() -> None:
    server = _Server(_with_length(b'{"a": 1}'), _with_length(b"[]", 404))

    async def work() -> None:
        async with server as http:
            first = await http.post("/x?y=1", {"q": "ü"}, timeout_s=60)
            second = await http.get("/z", timeout_s=60)
            assert (first.status, first.json(), second.status, second.json()) == (200, {"a": 1}, 404, [])
            await http.close()

    asyncio.run(work())
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /base/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]
    assert server.requests[0].endswith(b'{"q": "\\u00fc"}')


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    server = _Server(_with_length(b"1"), None, _with_length(b"2"))

    async def work() -> Any:
        async with server as http:
            await http.get("/", timeout_s=60)
            return (await http.get("/", timeout_s=60)).json()

    assert asyncio.run(work()) == 2
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"SSH-2.0-server\r\n\r\n",
    ],
    ids=["nothing", "half a body", "half a head", "half a chunk", "no HTTP"],
)
def test_an_answer_cut_short_is_a_lost_connection(answer: bytes | None) -> None:
    async def work() -> None:
        async with _Server(answer, None) as http:
            with pytest.raises(ConnectionLostError, match="was cut"):
                await http.get("/", timeout_s=60)

    asyncio.run(work())


def test_a_call_that_is_late_or_cancelled_closes_its_connection() -> None:
    server = _Server(is_silent=True)

    async def work() -> None:
        async with server as http:
            with pytest.raises(TimeoutError):
                await http.get("/", timeout_s=0.1)
            call = asyncio.create_task(http.get("/", timeout_s=60))
            while len(server.requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(work())
    assert server.connections == 2


def test_each_event_loop_has_connections_of_its_own() -> None:
    http = JsonHttp("http://127.0.0.1:1")

    async def once(is_last: bool) -> None:
        with pytest.raises(ConnectionLostError, match="nothing listens there"):
            await http.get("/", timeout_s=60)
        if is_last:
            await http.close()

    asyncio.run(once(is_last=False))
    asyncio.run(once(is_last=True))


def test_what_is_no_json_is_said() -> None:
    async def work() -> None:
        async with _Server(_with_length(b"<html> oops")) as http:
            with pytest.raises(ModelError, match="no JSON: <html> oops"):
                (await http.get("/", timeout_s=60)).json()

    asyncio.run(work())


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="no header can hold"):
        JsonHttp("http://127.0.0.1:1", api_key="a\nb")
