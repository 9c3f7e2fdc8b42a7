"""What every kind of sandbox offers: the specification, the result of a command, and the two protocols.

Invariants:
- A command that fails, runs too long or kills its own shell is a result. An exception means that the sandbox or its
  engine failed (`SandboxError`), or that a file is not there (`OSError`).
- After `reset` a sandbox cannot be told from a new one by what runs in it.
- A sandbox belongs to one thread at a time; a backend may be used from many.
"""

import codecs
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from agentenv.errors import UsageError

__all__ = [
    "BASE_IMAGE",
    "EXIT_KILLED",
    "EXIT_TIMED_OUT",
    "CommandResult",
    "OutputStream",
    "Sandbox",
    "SandboxBackend",
    "SandboxSpec",
    "absolute_path",
    "as_bytes",
    "decode_output",
]

BASE_IMAGE = "base"
"""As `SandboxSpec.image`: the image of `images.ensure_base_image`, built when it is first needed."""

EXIT_TIMED_OUT = 124
EXIT_KILLED = 137

STREAM_BYTES = 1 << 20
"""Most output of one command that is shown while it runs; head and tail come back in any case."""


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made of. Equal specifications share a pool of warm sandboxes.

    Raises:
        UsageError: a field is out of its range; the message names it.
    """

    image: str = BASE_IMAGE
    """Image that the engine has, or `BASE_IMAGE`. Sandboxes that isolate nothing have no image."""
    workdir: str = "/work"
    """Absolute path where commands start; made if it is missing."""
    read_only: bool = False
    """Root file system read-only, with memory file systems for workdir, /tmp and /dev/shm: what `reset` needs."""
    memory_mb: int = 512
    """Memory in MiB, memory file systems included; there is no swap."""
    cpus: float = 1.0
    """Processors."""
    pids: int = 128
    """Processes and threads."""
    writable_mb: int = 64
    """With read_only: size in MiB of workdir and of /tmp, each."""
    disk_mb: int = 10_240
    """Without read_only: MiB that files may take on the engine's disk. One look every few seconds: see `disk.py`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that commands see, besides those of the image."""

    def __post_init__(self) -> None:
        if (
            not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", self.workdir)
            or posixpath.normpath(self.workdir) != self.workdir
        ):
            raise UsageError(
                f"workdir={self.workdir!r}: an absolute path of letters, digits, '.', '_' and '-' is needed"
            )
        top = "/" + self.workdir.split("/")[1]
        if self.read_only and top in ("/tmp", "/run", "/dev", "/proc", "/sys"):
            raise UsageError(f"workdir={self.workdir!r}: with read_only it cannot lie in {top}")
        for name, least in (("memory_mb", 16), ("pids", 8), ("writable_mb", 1), ("disk_mb", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)!r}: at least {least} is needed")
        if self.cpus <= 0:
            raise UsageError(f"cpus={self.cpus!r}: more than 0 is needed")

    def __hash__(self) -> int:
        return hash(
            (self.image, self.workdir, self.read_only, self.memory_mb, *sorted(self.environment.items()))
        )


@dataclass(frozen=True)
class CommandResult:
    """How a command ended.

    Attributes:
        output: stdout and stderr, decoded as UTF-8 with replacements. Beyond twice `half_bytes` it is the head, a line
            that tells how much is left out, and the tail.
        exit_code: of the shell; 124 after a time-out, 128 + N where signal N ended it.
        total_bytes: how much was written, however much of it came back. The channel keeps at most 32 MiB.
        timed_out: the time limit ended it. What it started is dead too.
        duration_s: seconds until the answer was here.
    """

    output: str
    exit_code: int
    total_bytes: int
    timed_out: bool
    duration_s: float


class OutputStream:
    """Output as text while it comes: characters arrive whole, and no more than `STREAM_BYTES` of it.

    Args:
        on_output: called with each piece. When it raises it is called no more, and `end` raises that.
    """

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._error: Exception | None = None
        self.taken = 0
        """Bytes so far."""

    def feed(self, data: bytes) -> None:
        """Hand on what follows."""
        data = data[: STREAM_BYTES - self.taken]
        self.taken += len(data)
        self._hand_on(self._decoder.decode(data))

    def end(self) -> None:
        """After the command: hand on what is left of a character that did not come whole."""
        self._hand_on(self._decoder.decode(b"", final=True))
        if self._error is not None:
            raise self._error

    def _hand_on(self, text: str) -> None:
        if text and self._error is None:
            try:
                self._on_output(text)
            except Exception as error:
                self._error = error


@runtime_checkable
class Sandbox(Protocol):
    """A place where untrusted commands run."""

    @property
    def id(self) -> str:
        """Name for logs."""

    @property
    def kind(self) -> str:
        """Of the backend."""

    @property
    def spec(self) -> SandboxSpec:
        """What it was made from."""

    def run(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        half_bytes: int = 4000,
        on_output: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command with `bash -c` in the workdir, without stdin.

        Args:
            command: text for bash, of any length.
            timeout_s: then the command and all that it started are killed.
            half_bytes: how much output is kept from the head and from the tail, each.
            on_output: called while the command runs, from the thread that calls, with each further piece of its output,
                a fifth of a second old; the first MiB only. It must not call the sandbox. What it raises is raised when
                the command has ended.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """

    def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write files in one round trip, making folders as needed.

        Args:
            files: path (absolute, or relative to the workdir) -> content; text is written as UTF-8.

        Raises:
            OSError: a path cannot be written; the others are.
            SandboxError: the sandbox is gone or does not answer.
        """

    def read_file(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        """The first `max_bytes` of a file.

        Raises:
            FileNotFoundError: there is no readable regular file at this path.
            SandboxError: the sandbox is gone or does not answer.
        """

    def reset(self, files: Mapping[str, str | bytes] | None = None) -> None:
        """Back to the state of a new sandbox, then write files: kills every process and empties what is writable.

        Raises:
            SandboxError: the specification is not read_only, or something was left over: the sandbox must not be
                used again, `release` throws it away.
        """

    def close(self) -> None:
        """Remove it; idempotent."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Where sandboxes come from. All methods may be called from any thread."""

    @property
    def kind(self) -> str:
        """ "docker" or "local-unisolated"."""

    def acquire(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox in the state of a new one: a warm one from the pool, where the specification allows it.

        Raises:
            UsageError: the backend cannot make such a sandbox (an image that the engine does not have).
            SandboxError: making it failed.
        """

    def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back: it is reset and pooled (read_only) or removed. Never raises for a broken one."""

    def left(self) -> int:
        """How many sandboxes made by this backend are still there, those in the pool included."""

    def reap(self) -> int:
        """Remove what owners that are dead have left; returns how many."""

    def close(self) -> None:
        """Remove all sandboxes of this backend; idempotent."""


def absolute_path(path: str, workdir: str) -> str:
    """A path of `write_files` or `read_file` as the sandbox sees it.

    Raises:
        ValueError: the path is empty or holds a NUL character.
    """
    if not path or "\0" in path:
        raise ValueError(f"path {path!r}: a path without NUL characters is needed")
    return posixpath.normpath(posixpath.join(workdir, path))


def decode_output(payload: bytes, total: int, half_bytes: int) -> str:
    """Text of a command's output: whole, or head and tail of `half_bytes` each with a note between them."""
    if total <= 2 * half_bytes or len(payload) <= half_bytes:
        return payload.decode("utf-8", "replace")
    head, tail = payload[:half_bytes], payload[half_bytes:]
    note = f"\n[... {total - len(payload)} bytes left out ...]\n"
    return head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")


def as_bytes(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Files with their text encoded."""
    return {
        path: content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        for path, content in files.items()
    }
