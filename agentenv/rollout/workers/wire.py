"""What goes through the socket between a rollout and an environment's process: JSON in frames with their length.

Invariants:

* Nothing that comes from the environment's process is unpickled: it can hand over text and numbers, never code.
* A frame is at most ``MAX_FRAME_BYTES`` long, in both directions.
* An error arrives as the class of :mod:`agentenv.errors` that it is, or as the nearest base it has there.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

from agentenv import errors
from agentenv.errors import AgentEnvError, EnvError
from agentenv.rollout.workers.contract import safe_repr

MAX_FRAME_BYTES = 64 * 1024 * 1024
_DEEPEST = 32

HEADER = struct.Struct("!I")
"""The length of the payload that follows."""


def encode(message: list[Any]) -> bytes:
    """A frame, header included.

    Raises:
        EnvError: the message is too long, or holds what JSON can't.
    """
    try:
        payload = json.dumps(message, default=json_able).encode()
    except (TypeError, ValueError, RecursionError):
        payload = _encode_slowly(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise EnvError(
            f"a message of {len(payload):,} bytes is too long for an environment's process; "
            f"at most {MAX_FRAME_BYTES:,} are allowed"
        )
    return framed(payload)


def framed(payload: bytes) -> bytes:
    """The payload with its header."""
    return HEADER.pack(len(payload)) + payload


def decode(payload: bytes) -> list[Any]:
    """The message of a frame, without its header.

    Raises:
        EnvError: it is none.
    """
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"an environment's process sent what is no message: {error}") from error
    if not isinstance(message, list) or not message:
        raise EnvError("an environment's process sent what is no message")
    return message


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Take in what came; returns the payload of a frame once one is complete.

        Raises:
            EnvError: the frame would be too long.
        """
        buffer = self._buffer
        buffer += data
        if len(buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(buffer)
        if size > MAX_FRAME_BYTES:
            raise EnvError(
                f"an environment's process announced a message of {size:,} bytes; at most {MAX_FRAME_BYTES:,} are "
                "allowed"
            )
        end = HEADER.size + size
        if len(buffer) < end:
            return None
        payload = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        return payload


def json_able(value: Any, depth: int = 0) -> Any:
    """A copy in JSON's types; what JSON lacks, and what is nested more than 32 deep, becomes its repr.

    An info is for people, not a channel for objects.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if depth < _DEEPEST:
        if isinstance(value, dict):
            return {
                key if isinstance(key, str) else safe_repr(key): json_able(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [json_able(item, depth + 1) for item in value]
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            return json_able(value.item(), depth + 1)
    return safe_repr(value)


def error_to_wire(error: AgentEnvError) -> list[Any]:
    """Class, arguments and origin."""
    known: Any = next(cls for cls in type(error).__mro__ if cls.__name__ in errors.__all__)
    arguments = list(known.__reduce__(error)[1])
    if not all(isinstance(argument, str) for argument in arguments):
        arguments = [str(error)]
    origin = error.origin if isinstance(error, EnvError) else None
    return [known.__name__, arguments, origin]


def error_from_wire(name: str, arguments: list[str], origin: str | None) -> AgentEnvError:
    """What :func:`error_to_wire` described."""
    if name not in errors.__all__:
        return EnvError(f"an environment's process sent an error of the unknown class {name!r}")
    error: AgentEnvError = getattr(errors, name)(*arguments)
    if isinstance(error, EnvError):
        error.origin = origin
    return error


def _encode_slowly(message: list[Any]) -> bytes:
    try:
        return json.dumps(json_able(message)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"a message can't be written as JSON: {error}") from error
