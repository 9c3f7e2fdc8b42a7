"""One backend per process and kind (or service), shared by all environments and closed with the last of them.

Invariants:
- `open_backend` gives each caller a handle of its own; the backend behind it is closed when every handle is, or when
  the process ends. Closing a handle twice counts once.
- "auto" never falls back to a sandbox without isolation silently: the log says so, and `kind` does.
- A forked child never uses its parent's backend.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from agentenv.errors import SandboxError, UsageError

from .base import Sandbox, SandboxBackend, SandboxSpec

__all__ = ["BACKENDS", "SharedBackend", "open_backend", "reap_in_background"]

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "docker", "local-unisolated")
"""Names that `open_backend` takes."""


@dataclass
class _Entry:
    backend: SandboxBackend
    handles: int


_lock = threading.Lock()
_entries: dict[tuple[int, str], _Entry] = {}


class SharedBackend:
    """A caller's handle on a backend of the process; see `SandboxBackend`. `close` gives up this handle only."""

    def __init__(self, backend: SandboxBackend, give_up: Callable[[], None]) -> None:
        self._backend = backend
        self._give_up = give_up
        self._closed = False

    @property
    def kind(self) -> str:
        return self._backend.kind

    @property
    def backend(self) -> SandboxBackend:
        """The backend behind the handle, for what only its kind can do (`DockerBackend.client`)."""
        return self._backend

    def acquire(self, spec: SandboxSpec) -> Sandbox:
        if self._closed:
            raise SandboxError("this handle on the sandbox backend is closed")
        return self._backend.acquire(spec)

    def release(self, sandbox: Sandbox) -> None:
        self._backend.release(sandbox)

    def left(self) -> int:
        return self._backend.left()

    def reap(self) -> int:
        return self._backend.reap()

    def close(self) -> None:
        with _lock:
            if self._closed:
                return
            self._closed = True
        self._give_up()


def open_backend(name: str = "auto", *, url: str | None = None) -> SharedBackend:
    """A handle on the process's backend of this name; close it when done.

    Args:
        name: "docker"; "local-unisolated", which isolates nothing; or "auto": docker where an engine answers, else
            local-unisolated with a warning in the log.
        url: of a sandbox service, or several with commas between them, or "ray": those on a Ray cluster, also ones that
            join later. Sandboxes are leased there, with the token in AGENTENV_SANDBOX_TOKEN or in the file
            AGENTENV_SANDBOX_TOKEN_FILE. See docs/sandbox-service.md.

    Raises:
        UsageError: another name, "docker" and no engine answers, or no service answers, or one of another kind.
    """
    if name not in BACKENDS:
        raise UsageError(f"sandbox={name!r}: one of {', '.join(BACKENDS)} is needed")
    if url is not None:
        with _lock:
            handle = _handle(f"service {url}")
        if name not in ("auto", handle.kind):
            handle.close()
            raise UsageError(f"sandbox={name!r}: the sandbox service {url} has {handle.kind!r}")
        return handle
    with _lock:
        kind = name
        if name == "auto":
            kind = "docker" if (os.getpid(), "docker") in _entries else ""
        if not kind:
            try:
                return _handle("docker")
            except UsageError as error:
                logger.warning("%s; falling back to sandboxes without isolation", error)
                kind = "local-unisolated"
        return _handle(kind)


def reap_in_background() -> threading.Thread:
    """Remove the containers that killed processes left, while the caller goes on, say with imports that take seconds.

    Opening a backend does the same; this is for programs that open theirs late. Where no engine answers it does
    nothing.

    Returns:
        The thread that does it.
    """

    def reap() -> None:
        try:
            open_backend("docker").close()  # opening reaps
        except (UsageError, SandboxError) as error:
            logger.debug("nothing is reaped: %s", error)

    thread = threading.Thread(target=reap, name="sandbox-reaper", daemon=True)
    thread.start()
    return thread


def _handle(kind: str) -> SharedBackend:
    """A new handle; the caller holds the lock."""
    key = (os.getpid(), kind)
    entry = _entries.get(key)
    if entry is None:
        entry = _entries[key] = _Entry(_make(kind), 0)
    entry.handles += 1
    return SharedBackend(entry.backend, lambda: _give_up(key))


def _make(kind: str) -> SandboxBackend:
    if kind == "docker":
        from .docker_backend import DockerBackend

        return DockerBackend()
    if kind.startswith("service "):
        from .service.client import open_remote

        return open_remote(kind.removeprefix("service "))
    from .local_backend import LocalBackend

    return LocalBackend()


def _give_up(key: tuple[int, str]) -> None:
    with _lock:
        entry = _entries.get(key)
        if entry is None:
            return
        entry.handles -= 1
        if entry.handles > 0:
            return
        del _entries[key]
    entry.backend.close()


@atexit.register
def _close_all() -> None:
    """Remove the sandboxes of handles that nobody closed."""
    with _lock:
        mine = [key for key in _entries if key[0] == os.getpid()]
        entries = [_entries.pop(key) for key in mine]
    for entry in entries:
        try:
            entry.backend.close()
        except SandboxError as error:
            logger.warning("%s", error)
