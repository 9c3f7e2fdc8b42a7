"""Commands as resource-limited subprocesses of this machine, for machines without a container engine.

This isolates nothing: a command sees the file system, the network and the processes of the user that runs it. It is
for agents and tasks that you trust as much as your own shell.

Invariants:
- Each command has a session of its own, no stdin, a scrubbed environment, limits on memory, file size and processor
  time, and a deadline after which its whole group is killed.
- The workdir of the specification is a private temporary folder: commands start there, and paths below the workdir in
  `write_files` and `read_file` are mapped to it. The text of a command is not rewritten.
- Processes that leave their session are found by a variable in their environment and killed at time-outs, resets and
  the end; one that drops this variable escapes.
"""

import atexit
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from agentenv.errors import SandboxError, UsageError

from .base import (
    BASE_IMAGE,
    EXIT_TIMED_OUT,
    STREAM_BYTES,
    CommandResult,
    OutputStream,
    Sandbox,
    SandboxSpec,
    absolute_path,
    as_bytes,
    decode_output,
)

__all__ = ["LocalBackend", "LocalSandbox"]

logger = logging.getLogger(__name__)

KIND = "local-unisolated"
OUTPUT_BYTES = 32 << 20
PREFIX = "agentenv-local-"
MARKER = "AGENTENV_SANDBOX"
COMMAND_BYTES = 96 * 1024
LOOK_S = 0.2

_LIMITS = 'ulimit -c 0 -f {blocks} -v {memory_kb} -t {cpu_s} || exit 125; exec bash -c "$0"'
_warned = threading.Event()


class LocalSandbox:
    """A temporary folder in which subprocesses run; see `Sandbox`, and the module about what it does not do."""

    kind = KIND

    def __init__(self, spec: SandboxSpec, on_close: Callable[["LocalSandbox"], None]) -> None:
        self.id = f"local-{uuid.uuid4().hex[:12]}"
        self.spec = spec
        self._on_close = on_close
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        """The command that was started last."""
        # The owner's process id is in the name: `LocalBackend.reap` goes by it.
        self._root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._make_folders()

    @property
    def workdir(self) -> Path:
        """The folder of this machine that stands for `spec.workdir`."""
        return self._root / "work"

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
        self._check_open()
        stream = None if on_output is None else OutputStream(on_output)
        text = command.encode("utf-8", "replace")
        if b"\0" in text:
            return CommandResult("bash: the command holds a NUL character", 126, 0, False, 0.0)
        if len(text) > COMMAND_BYTES:
            script = self._root / "command"
            script.write_bytes(text)
            text = f"exec bash {script}".encode()
        self.workdir.mkdir(exist_ok=True)
        started = time.monotonic()
        limits = _LIMITS.format(
            blocks=max(self.spec.writable_mb << 20, OUTPUT_BYTES) // 1024,
            memory_kb=self.spec.memory_mb * 1024,
            cpu_s=int(timeout_s) + 2,
        )
        with tempfile.TemporaryFile(dir=self._root) as output:
            try:
                process = subprocess.Popen(
                    [b"bash", b"-c", limits.encode(), text],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.workdir,
                    env=self._environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"sandbox {self.id}: a command can't be started: {error}") from error
            self._process = process
            if self._closed:  # by another thread, which could not see this process yet
                _kill_group(process)
            timed_out = False
            try:
                code = _wait(process, timeout_s, output.fileno(), stream)
            except subprocess.TimeoutExpired:
                timed_out = True
                _kill_group(process)
                self._kill_marked()
                code = EXIT_TIMED_OUT
            total = os.fstat(output.fileno()).st_size
            payload = os.pread(output.fileno(), min(total, 2 * half_bytes), 0)
            if total > 2 * half_bytes:
                tail = os.pread(output.fileno(), half_bytes, total - half_bytes)
                payload = payload[:half_bytes] + tail
            if stream is not None:
                _show(output.fileno(), stream)
                stream.end()
        return CommandResult(
            output=decode_output(payload, total, half_bytes),
            exit_code=128 - code if code < 0 else code,
            total_bytes=total,
            timed_out=timed_out,
            duration_s=time.monotonic() - started,
        )

    def write_files(self, files: Mapping[str, str | bytes]) -> None:
        self._check_open()
        for path, content in as_bytes(files).items():
            target = self._map(path)
            # A command may have put a link in its place: nothing outside of the sandbox's folder is written here.
            if not target.resolve().is_relative_to(self._root.resolve()):
                raise OSError(f"sandbox {self.id}: cannot write {path!r}: it leads out of the sandbox")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def read_file(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        self._check_open()
        target = self._map(path)
        if not target.is_file():
            raise FileNotFoundError(f"sandbox {self.id}: no readable file {path!r}")
        with target.open("rb") as file:
            return file.read(max_bytes)

    def reset(self, files: Mapping[str, str | bytes] | None = None) -> None:
        self._check_open()
        if not self.spec.read_only:
            raise SandboxError(f"sandbox {self.id}: only a sandbox with read_only=True can be reset")
        self._kill_marked()
        try:
            _remove_tree(self._root)
            self._make_folders()
            self.write_files(files or {})
        except OSError as error:
            raise SandboxError(f"sandbox {self.id}: reset failed: {error}") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # By its handle: while a process begins to run another program it has no environment to be found by.
        if self._process is not None and self._process.poll() is None:
            _kill_group(self._process)
        self._kill_marked()
        try:
            _remove_tree(self._root)
        except OSError as error:
            logger.warning("sandbox %s: %s is not removed: %s", self.id, self._root, error)
        self._on_close(self)

    def _make_folders(self) -> None:
        for folder in (self._root, self.workdir, self._root / "tmp", self._root / "home"):
            folder.mkdir(exist_ok=True)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"sandbox {self.id} is closed")

    def _map(self, path: str) -> Path:
        full = absolute_path(path, self.spec.workdir)
        for prefix, folder in ((self.spec.workdir, self.workdir), ("/tmp", self._root / "tmp")):
            if full == prefix or full.startswith(prefix + "/"):
                return folder / full[len(prefix) :].lstrip("/")
        raise OSError(
            f"sandbox {self.id}: {path!r} lies outside of {self.spec.workdir} and /tmp, the only paths that are mapped"
        )

    def _environment(self) -> dict[str, str]:
        folders = [
            str(Path(sys.executable).parent),
            "/usr/local/bin",
            "/usr/bin",
            "/bin",
            "/usr/sbin",
            "/sbin",
        ]
        return {
            "PATH": os.pathsep.join(folders),
            "LANG": "C.UTF-8",
            "HOME": str(self._root / "home"),
            "TMPDIR": str(self._root / "tmp"),
            "PYTHONNOUSERSITE": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **self.spec.environment,
            MARKER: self.id,
        }

    def _kill_marked(self) -> None:
        """Kill what runs with this sandbox's marker; a few rounds, for some may be forking."""
        wanted = f"{MARKER}={self.id}".encode()
        for _ in range(10):
            found = [pid for pid in _own_processes() if wanted in _environment_of(pid)]
            if not found:
                return
            for pid in found:
                _kill(os.kill, pid)
            time.sleep(0.005)


class LocalBackend:
    """Sandboxes that isolate nothing; says so once in the log of the process."""

    kind = KIND

    def __init__(self) -> None:
        if not _warned.is_set():
            _warned.set()
            logger.warning(
                "sandbox=%r ISOLATES NOTHING: the commands of the agent run with all the rights of this user",
                KIND,
            )
        self._lock = threading.Lock()
        self._open: set[LocalSandbox] = set()
        self._closed = False
        self.reap()
        atexit.register(self.close)

    def acquire(self, spec: SandboxSpec) -> LocalSandbox:
        if spec.image != BASE_IMAGE and not spec.read_only:
            raise UsageError(
                f"image={spec.image!r}: a sandbox of kind {KIND!r} has no images; use sandbox='docker'"
            )
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox backend is closed")
            sandbox = LocalSandbox(spec, self._forget)
            self._open.add(sandbox)
        return sandbox

    def release(self, sandbox: Sandbox) -> None:
        # A folder is made faster than it is checked: nothing is pooled.
        sandbox.close()

    def left(self) -> int:
        with self._lock:
            return len(self._open)

    def reap(self) -> int:
        count = 0
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
            owner = folder.name[len(PREFIX) :].split("-")[0]
            if (
                owner.isdigit()
                and not Path(f"/proc/{owner}").exists()
                and folder.stat().st_uid == os.geteuid()
            ):
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
        return count

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sandboxes = list(self._open)
        for sandbox in sandboxes:
            sandbox.close()
        atexit.unregister(self.close)

    def _forget(self, sandbox: LocalSandbox) -> None:
        with self._lock:
            self._open.discard(sandbox)


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float, output: int, stream: OutputStream | None
) -> int:
    """As `Popen.wait`, showing the output meanwhile."""
    if stream is None:
        return process.wait(timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return process.wait(min(LOOK_S, max(0.0, left_s)))
        except subprocess.TimeoutExpired:
            if left_s <= LOOK_S:
                raise
        _show(output, stream)


def _show(output: int, stream: OutputStream) -> None:
    if stream.taken < STREAM_BYTES:
        stream.feed(os.pread(output, STREAM_BYTES, stream.taken))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    _kill(os.killpg, process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    _kill(os.killpg, process.pid)
    process.wait()


def _kill(how: Callable[[int, int], None], pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        how(pid, number)


def _own_processes() -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != os.getpid()
    ]


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _remove_tree(root: Path) -> None:
    """Remove a folder even where a command has taken away permissions inside."""
    try:
        shutil.rmtree(root)
    except PermissionError:
        for folder, _, _ in os.walk(root):
            os.chmod(folder, 0o700)
        shutil.rmtree(root)
