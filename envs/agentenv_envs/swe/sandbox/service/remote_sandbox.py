"""A sandbox that a service lends: `RemoteSandbox`.

Invariants:
- It behaves as a local one: the same results, the same exceptions. What the network does to it is a `SandboxError` of
  one episode.
- A command that is still running is asked for again; it runs once.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agentenv.errors import SandboxError, SandboxLostError, SandboxTimeoutError
from agentenv_envs.swe.sandbox.base import CommandResult, OutputStream, SandboxSpec, as_bytes

from .endpoint import WAIT_S, Endpoint, ServiceDownError
from .wire import Refusal, files_to_json, result_from_json

__all__ = ["RemoteSandbox"]

COMMAND_GRACE_S = 90.0
TRANSFER_S = 20.0
WRITE_BYTES = 8 << 20
"""Files that are written in one request, if there are several."""


class RemoteSandbox:
    """A sandbox of a service; see `Sandbox`."""

    def __init__(
        self,
        lease_id: str,
        kind: str,
        spec: SandboxSpec,
        endpoint: Endpoint,
        on_close: Callable[["RemoteSandbox"], None],
    ) -> None:
        self.id = lease_id
        self.kind = kind
        self.spec = spec
        self.endpoint = endpoint
        self._on_close = on_close
        self._numbers = itertools.count()
        self._closed = False

    def run(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        half_bytes: int = 4000,
        on_output: Callable[[str], None] | None = None,
    ) -> CommandResult:
        if timeout_s <= 0 or half_bytes < 1:
            raise ValueError(f"timeout_s={timeout_s!r}, half_bytes={half_bytes!r}: both must be positive")
        started = time.monotonic()
        path = f"commands/{next(self._numbers)}"
        body = {"command": command, "timeout_s": timeout_s, "half_bytes": half_bytes, "wait_s": WAIT_S}
        stream = None if on_output is None else OutputStream(on_output)
        if stream is not None:
            body["seen"] = 0
        while True:
            status, value = self._ask("PUT", path, body, wait_s=WAIT_S)
            if stream is not None:
                stream.feed(str(value["shown"]).encode("utf-8", "surrogateescape"))
                body["seen"] = value["seen"]
            if status != 202:
                result = result_from_json(value)
                if stream is not None:
                    stream.end()
                return replace(result, duration_s=time.monotonic() - started)
            if time.monotonic() - started > timeout_s + COMMAND_GRACE_S:
                raise SandboxTimeoutError(f"sandbox {self.id}: the command does not end")

    def write_files(self, files: Mapping[str, str | bytes]) -> None:
        for part in _parts(as_bytes(files)):
            self._ask("PUT", "files", {"files": files_to_json(part)}, wait_s=_transfer_s(part))

    def read_file(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        body = {"path": path, "max_bytes": max_bytes}
        _, content = self._ask("POST", "read", body, wait_s=TRANSFER_S + max_bytes / 1e6)
        return content if isinstance(content, bytes) else b""

    def reset(self, files: Mapping[str, str | bytes] | None = None) -> None:
        if not self.spec.read_only:
            raise SandboxError(f"sandbox {self.id}: only a sandbox with read_only=True can be reset")
        first, *others = _parts(as_bytes(files or {}))
        self._ask("POST", "reset", {"files": files_to_json(first)}, wait_s=_transfer_s(first))
        for part in others:
            self.write_files(part)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self)

    def _ask(
        self, method: str, what: str, body: Mapping[str, Any], *, wait_s: float = 0.0
    ) -> tuple[int, Any]:
        if self._closed:
            raise SandboxError(f"sandbox {self.id} is closed")
        try:
            return self.endpoint.ask(method, f"/v1/sandboxes/{self.id}/{what}", body, wait_s=wait_s)
        except ServiceDownError as error:
            raise SandboxLostError(f"sandbox {self.id} is lost: {error}") from error
        except Refusal as error:
            raise SandboxError(f"sandbox {self.id}: {error}") from error


def _parts(files: Mapping[str, bytes]) -> list[dict[str, bytes]]:
    """Files in requests of a moderate size, at least one."""
    parts: list[dict[str, bytes]] = [{}]
    size = 0
    for path, content in files.items():
        if parts[-1] and size + len(content) > WRITE_BYTES:
            parts.append({})
            size = 0
        parts[-1][path] = content
        size += len(content)
    return parts


def _transfer_s(files: Mapping[str, bytes]) -> float:
    """A deadline for files, as generous as the driver's own."""
    return TRANSFER_S + sum(map(len, files.values())) / 1e6
