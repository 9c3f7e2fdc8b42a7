"""What client and server say to each other: JSON bodies, and the table of errors.

Invariants:
- Every request may be sent twice: leases and commands have names that the client chose, so that a repeated request
  joins the first one. Nothing else about a request decides whether it is safe to repeat.
- An answer that carries {"error": {"type", "message"}} comes from a service; any other failure comes from what lies
  between (a proxy, the network).
- Bodies are ASCII JSON, files in base64: paths and commands that are not valid UTF-8 arrive as they were.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agentenv.errors import SandboxError, SandboxLostError, SandboxTimeoutError, UsageError
from agentenv_envs.swe.sandbox.base import CommandResult, as_bytes

__all__ = [
    "LOAD_HEADER",
    "Refusal",
    "dump",
    "error_of",
    "exception_of",
    "files_from_json",
    "files_to_json",
    "result_from_json",
    "result_to_json",
]

LOAD_HEADER = "x-agentenv-load"
"""Header of every answer under /v1: leases and their limit, "3/32"."""

_STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "gone": 404,
    "no_file": 404,
    "conflict": 409,
    "too_large": 413,
    "usage": 422,
    "os": 422,
    "quota": 429,
    "sandbox": 502,
    "busy": 503,
    "draining": 503,
    "sandbox_timeout": 504,
}


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """The service does not do it; `kind` is a key of the table of errors."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def error_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and type of an exception."""
    if isinstance(error, Refusal):
        kind = error.kind
    elif isinstance(error, SandboxTimeoutError):
        kind = "sandbox_timeout"
    elif isinstance(error, FileNotFoundError):
        kind = "no_file"
    elif isinstance(error, OSError):
        kind = "os"
    elif isinstance(error, UsageError | ValueError):
        kind = "usage"
    else:
        kind = "sandbox"
    return _STATUS[kind], kind


def exception_of(kind: str, message: str) -> Exception:
    """What a client raises for an error's type: the exception that a local back-end would have raised."""
    if kind in ("busy", "draining", "quota"):
        return Refusal(kind, message)
    if kind == "no_file":
        return FileNotFoundError(message)
    if kind in ("os", "too_large"):
        return OSError(message)
    if kind in ("usage", "forbidden", "unauthorized"):
        return UsageError(message)
    if kind == "gone":
        return SandboxLostError(message)
    return SandboxTimeoutError(message) if kind == "sandbox_timeout" else SandboxError(message)


def dump(value: object) -> bytes:
    """ASCII JSON."""
    return json.dumps(value, allow_nan=False).encode("ascii")


def files_to_json(files: Mapping[str, str | bytes]) -> dict[str, str]:
    """Path -> content in base64."""
    return {path: base64.b64encode(content).decode("ascii") for path, content in as_bytes(files).items()}


def files_from_json(value: object) -> dict[str, bytes]:
    """The other way.

    Raises:
        UsageError: not an object of base64 strings.
    """
    if not isinstance(value, dict):
        raise UsageError("files: an object is needed, path -> content in base64")
    files = {}
    for path, content in value.items():
        try:
            files[path] = base64.b64decode(content, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise UsageError(f"files: the content of {path!r} is not base64") from None
    return files


def result_to_json(result: CommandResult) -> dict[str, Any]:
    """A command's result."""
    return asdict(result)


def result_from_json(value: Mapping[str, Any]) -> CommandResult:
    """The other way."""
    return CommandResult(
        output=str(value["output"]),
        exit_code=int(value["exit_code"]),
        total_bytes=int(value["total_bytes"]),
        timed_out=bool(value["timed_out"]),
        duration_s=float(value["duration_s"]),
    )
