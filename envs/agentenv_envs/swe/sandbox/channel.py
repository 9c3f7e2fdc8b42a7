"""A stream to a driver in a container, over one `docker exec`: requests out, answers in.

A request is one line "operation tag arguments" and the bytes that it announces; an answer is
"\\1tag state code total\\1payload\\1tag\\1". Answers whose state is "more" come before the last one.

Invariants:
- Each request has a random tag, and its answer begins and ends with it: what a command prints cannot end an answer, and
  what else comes over the stream is no part of one.
- An answer is held up to the length that its request allows: the programs that write it are those of the container, and
  commands may have put others in their place.
- Every wait has a deadline. A stream that ends, breaks or stays silent is a `ChannelLostError`, also for a thread that
  reads while another one closes: the file of the stream is freed when nobody reads it any more, since its number would
  else be another file's, which that thread would wait for.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from agentenv.errors import SandboxError

from .engine import engine_errors

__all__ = ["OPEN_TIMEOUT_S", "Answer", "Channel", "ChannelLostError", "DriverEndedError"]

OPEN_TIMEOUT_S = 20.0
SPARE_BYTES = 2 << 20
"""What may come besides the payload of an answer: parts shown before, messages, the engine's frames."""


class ChannelLostError(Exception):
    """The driver does not answer: sweep and reopen once, then treat the container as lost."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


class DriverEndedError(SandboxError):
    """The engine started the driver, which ended at once."""


@dataclass(frozen=True)
class Answer:
    """What came back for a request: state word, exit code, bytes in all, and the payload."""

    state: str
    code: int
    total: int
    payload: bytes


class Channel:
    """An open stream.

    Args:
        api: a `docker.APIClient`.
        container_id: a container that runs.
        command: what the exec starts; it reads `program` from its input and then answers requests.
        program: see there.
        name: for messages.

    Raises:
        SandboxError: the engine refuses, or the driver does not answer a first request.
    """

    def __init__(self, api: Any, container_id: str, command: list[str], program: bytes, name: str) -> None:
        self._lock = threading.Lock()
        self._num_asking = 0
        self._is_closed = False
        self._raw = bytearray()
        """Frames of the engine, not whole yet."""
        self._text = bytearray()
        """What the driver wrote, not taken yet."""
        with engine_errors(f"{name}: opening the driver channel"):
            created = api.exec_create(
                container_id, command, stdin=True, stdout=True, stderr=False, user="0:0"
            )
            self._stream = api.exec_start(created["Id"], socket=True)
        self._socket: socket.socket = getattr(self._stream, "_sock", self._stream)
        try:
            self._send(program, time.monotonic() + OPEN_TIMEOUT_S)
            self.ask("ping", b"\n", OPEN_TIMEOUT_S)
        except ChannelLostError as lost:
            self.close()
            kind = SandboxError if lost.late else DriverEndedError
            raise kind(f"{name}: the driver does not start: {lost}") from None

    def ask(
        self,
        operation: str,
        request: bytes,
        timeout_s: float,
        on_more: Callable[[bytes], None] | None = None,
        *,
        most: int = 0,
    ) -> Answer:
        """Send a request and wait for its last answer.

        Args:
            operation: word that the driver knows.
            request: what follows it.
            timeout_s: until the last answer is here, besides what `on_more` takes.
            on_more: called with the payloads of the answers before.
            most: bytes that its payload may have.

        Raises:
            ChannelLostError: none came in time, or none can come any more.
        """
        tag = os.urandom(8).hex()
        deadline = time.monotonic() + timeout_s
        with self._in_use():
            self._send(f"{operation} {tag} ".encode() + request, deadline)
            self._text.clear()
            while True:
                text = self._receive(f"\1{tag}\1".encode(), deadline, most + SPARE_BYTES)
                header, _, payload = text.partition(f"\1{tag} ".encode())[2].partition(b"\1")
                try:
                    state, code, total = header.decode("ascii").split(" ")
                    answer = Answer(state, int(code), int(total), payload)
                except ValueError:
                    raise ChannelLostError("the answer is garbled") from None
                if state != "more":
                    return answer
                if on_more is not None:
                    started = time.monotonic()
                    on_more(payload)
                    deadline += time.monotonic() - started

    def close(self) -> None:
        """End the stream; idempotent. The driver ends at the end of its input."""
        with self._lock:
            self._is_closed = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
            self._free_unused()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise ChannelLostError("the channel was closed")
            self._num_asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_asking -= 1
                self._free_unused()

    def _free_unused(self) -> None:
        if self._is_closed and not self._num_asking:
            self._socket.close()
            self._stream.close()

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._socket.sendall(data)
        except TimeoutError:
            raise ChannelLostError("the driver takes no request", late=True) from None
        except OSError as error:
            raise ChannelLostError(f"the channel broke: {error}") from None

    def _receive(self, end: bytes, deadline: float, most: int) -> bytes:
        """The text of an answer up to its end mark, `most` bytes at most.

        It comes in the engine's frames: 8 bytes of header, then a payload.
        """
        text, raw = self._text, self._raw
        searched = 0
        while (found := text.find(end, searched)) < 0:
            if len(text) > most:
                raise ChannelLostError("the answer is too long")
            searched = max(0, len(text) - len(end))
            left_s = deadline - time.monotonic()
            if left_s < -1.0:  # something comes all the time
                raise ChannelLostError("no end of the answer within the deadline", late=True)
            try:
                self._socket.settimeout(max(0.01, left_s))
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                raise ChannelLostError("no answer within the deadline", late=True) from None
            except OSError as error:
                raise ChannelLostError(f"the channel broke: {error}") from None
            if not data:
                raise ChannelLostError("the channel was closed")
            raw += data
            at = 0
            while len(raw) >= at + 8:
                size = struct.unpack_from(">I", raw, at + 4)[0]
                if len(raw) < at + 8 + size:
                    break
                text += raw[at + 8 : at + 8 + size]
                at += 8 + size
            del raw[:at]
        answer = bytes(text[:found])
        del text[: found + len(end)]
        return answer
