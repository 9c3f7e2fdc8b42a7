"""The host's end of the driver: one bash in the container answers requests over the stream of one `docker exec`.

An exec per command costs 120 to 150 ms and a good deal of CPU in the engine; a request to the driver costs one fork and
one exec of bash in the container. The other end is `driver.sh`.

Invariants:
- A command's output goes to a file in memory first, and only head and tail come back: an endless output that went
  straight into the stream would jam the engine's event queue for that container.
- A command cannot learn the tag that ends its answer: the driver is an execute-only copy of bash, so that the kernel
  denies its memory, environment and descriptors to others even of the same user, and the tag is never in an argument.
  Long answers are written by `head` and `tail`, to which this does not apply: what catches them may forge answers of
  its own container, which it might as well do by replacing bash. Nothing that such a container says is graded.
- A channel that is lost (the command killed the driver, or nothing answers) is reopened once after a sweep; if that
  fails too, the container counts as lost: `SandboxError`, never a hang.
- A container that runs but has no shell any more, since commands removed it, is their doing: from then on commands end
  with 127, no file is there and none can be written. Were it an error, an agent could break its sandbox to get away
  without its 0.
- So it is where a new channel loses the same request again and opens once more: something in the container holds it up
  (a pipe in a file's place, another program by the name of `head`).
- The sweep is an exec that is detached and polled: an attached one can wait for ever. Where no process can start any
  more, PID 1 is told to kill first.
"""

import logging
import shlex
import threading
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files as package_files
from typing import Any

from agentenv.errors import SandboxError

from .base import (
    EXIT_KILLED,
    EXIT_TIMED_OUT,
    STREAM_BYTES,
    CommandResult,
    OutputStream,
    SandboxSpec,
    absolute_path,
    decode_output,
)
from .channel import OPEN_TIMEOUT_S, Answer, Channel, ChannelLostError, DriverEndedError
from .engine import OUTPUT_FOLDER, RESET_MOUNTS, SWEEP_SIGNAL, engine_errors

__all__ = ["Driver"]

logger = logging.getLogger(__name__)

COMMAND_BYTES = 96 * 1024
"""A longer command goes by file: the kernel limits an argument to 128 KiB."""
CHUNK_BYTES = 64 * 1024
GRACE_S = 10.0
"""How long past its own limits an answer may take: covers the second between TERM and KILL, and a busy machine."""
SWEEP_TIMEOUT_S = 8.0
SWEEPS = 3

_BOOT = (
    f'd={OUTPUT_FOLDER}/driver; rm -rf "$d"; set -- IFS= read -r -N %d s "&&" eval \'"$s"\'; '
    'cp -- "$BASH" "$d" && chmod 111 "$d" && exec -a driver "$d" -p -c "$*"; exec "$BASH" -p -c "$*"'
)
_SWEEP = f"kill -KILL -1; chmod 700 {OUTPUT_FOLDER}; rm -rf {OUTPUT_FOLDER}/driver"


_NO_SHELL = (
    "executable file not found",
    "permission denied",
    "no such file or directory",
    "exec format error",
)
"""What the engine says of an exec in a container whose own files are spoilt."""
EXIT_NO_SHELL = 127


class SpoiltError(Exception):
    """The container runs, the engine answers, and commands have seen to it that no further one runs."""


class Driver:
    """The driver channel of one running container.

    Args:
        api: a `docker.APIClient`.
        container_id: a container that runs and has `OUTPUT_FOLDER` in memory.
        spec: what the container was made from.
        name: for messages.

    Raises:
        SandboxError: the channel cannot be opened.
    """

    def __init__(self, api: Any, container_id: str, spec: SandboxSpec, name: str) -> None:
        self._api = api
        self._container_id = container_id
        self._spec = spec
        self._name = name
        self._number = 0
        self._ended = threading.Event()
        self._spoilt = False
        self._reopening = threading.RLock()
        """Held from the loss of a channel until the next one works."""
        self._channel = self._open()

    def run(
        self, command: str, timeout_s: float, half_bytes: int, stream: OutputStream | None = None
    ) -> CommandResult:
        """See `Sandbox.run`."""
        started = time.monotonic()
        try:
            return self._run(command, timeout_s, half_bytes, stream)
        except SpoiltError as error:
            text = f"sandbox: {error}\n"
            return CommandResult(text, EXIT_NO_SHELL, len(text), False, time.monotonic() - started)

    def _run(
        self, command: str, timeout_s: float, half_bytes: int, stream: OutputStream | None
    ) -> CommandResult:
        started = time.monotonic()
        text = command.encode("utf-8", "replace")
        if b"\0" in text:
            return CommandResult("bash: the command holds a NUL character", 126, 0, False, 0.0)
        if len(text) > COMMAND_BYTES:
            path = f"{OUTPUT_FOLDER}/command"
            try:
                self.write({path: text})
            except OSError as error:
                raise SpoiltError(str(error)) from None
            text = f"exec bash {path}".encode()
        for attempt in range(2):
            self._number += 1
            shown = STREAM_BYTES if stream else 0
            request = f"{timeout_s:.3f} {half_bytes} {self._number} {len(text)} {shown}\n".encode() + text
            on_more = None if stream is None else stream.feed
            try:
                answer = self._channel.ask("run", request, timeout_s + GRACE_S, on_more, most=2 * half_bytes)
            except ChannelLostError as lost:
                logger.info("%s: %s; sweeping", self._name, lost)
                answer = self._recover(lost, half_bytes)
            if answer.state != "refused":
                break
            if attempt:
                raise SpoiltError("commands can't write their output")
            self._sweep()  # a command took the output folder away
        timed_out = answer.state == "late"
        return CommandResult(
            output=decode_output(answer.payload, answer.total, half_bytes),
            exit_code=EXIT_TIMED_OUT if timed_out else answer.code,
            total_bytes=answer.total,
            timed_out=timed_out,
            duration_s=time.monotonic() - started,
        )

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files; see `Sandbox.write_files`."""
        try:
            request, size = _entries(files, self._spec.workdir)
            answer = self._ask_again("write", request, size)
        except SpoiltError as error:
            raise OSError(f"{self._name}: cannot write: {error}") from None
        if answer.state != "ok":
            raise OSError(f"{self._name}: cannot write {answer.payload.decode('utf-8', 'replace').strip()}")

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a file; see `Sandbox.read_file`."""
        name = absolute_path(path, self._spec.workdir).encode("utf-8", "surrogateescape")
        try:
            request = f"{max_bytes} {len(name)}\n".encode() + name
            answer = self._ask_again("read", request, max_bytes, most=max_bytes)
        except SpoiltError as error:
            raise FileNotFoundError(f"{self._name}: no readable file {path!r}: {error}") from None
        if answer.state != "ok":
            raise FileNotFoundError(f"{self._name}: no readable file {path!r}")
        return answer.payload

    def reset(self, files: Mapping[str, bytes]) -> None:
        """Kill every process, empty the writable mounts and write files, in one round trip.

        Raises:
            SandboxError: something was left over or does not answer; the container must not be used again.
        """
        request, size = _entries(files, self._spec.workdir)
        try:
            answer = self._channel.ask("reset", request, _transfer_s(size))
        except ChannelLostError as lost:
            raise SandboxError(f"{self._name}: reset failed: {lost}") from None
        self._number = 0
        if answer.state != "ok":
            raise SandboxError(
                f"{self._name}: reset failed: {answer.payload.decode('utf-8', 'replace').strip()[:500]}"
            )

    def ping(self) -> bool:
        """True where the driver answers at once."""
        try:
            return self._channel.ask("ping", b"\n", GRACE_S).state == "ok"
        except ChannelLostError:
            return False

    def kill_all(self) -> None:
        """Kill all that runs, from any thread; a command that another thread waits for ends as killed.

        While a lost channel is reopened another thread's call does nothing: all is killed then anyway, and the new
        channel must not be.

        Raises:
            SandboxError: the engine does not do it.
        """
        if self._reopening.acquire(blocking=False):
            try:
                with engine_errors(f"{self._name}: killing what runs"):
                    self._api.kill(self._container_id, SWEEP_SIGNAL)
            finally:
                self._reopening.release()

    def close(self) -> None:
        """Drop the channel for good; the driver ends, and a request that another thread waits for fails."""
        self._ended.set()
        self._channel.close()

    def _open(self) -> Channel:
        program = _program(self._spec)
        command = ["bash", "-p", "-c", _BOOT % len(program)]
        return Channel(self._api, self._container_id, command, program, self._name)

    def _sweep(self) -> None:
        """Kill everything but PID 1, escaped sessions included, and open a new channel."""
        with self._reopening:
            self._sweep_held()

    def _sweep_held(self) -> None:
        self._channel.close()
        if self._ended.is_set():
            raise SandboxError(f"{self._name} was closed")
        if self._spoilt:
            raise SpoiltError("no shell starts")
        try:
            self._reopen()
        except SandboxError as error:
            if not self._without_shell(error):
                raise
            self._spoilt = True
            logger.info("%s; commands have spoilt the container", error)
            raise SpoiltError("no shell starts") from None
        if self._ended.is_set():  # meanwhile
            self._channel.close()

    def _reopen(self) -> None:
        for attempt in range(SWEEPS):
            try:
                self._kill_and_tidy()
                break
            except SandboxError:
                if attempt == SWEEPS - 1:
                    raise
                # Where all processes are used up no exec starts. What PID 1 kills may be the next exec, though.
                self.kill_all()
                time.sleep(0.2)
        self._channel = self._open()

    def _without_shell(self, error: SandboxError) -> bool:
        """Whether a failure to reopen the channel is the fault of what lies in the container."""
        text = str(error)
        if not isinstance(error, DriverEndedError) and not (
            "OCI runtime exec failed" in text and any(words in text for words in _NO_SHELL)
        ):
            return False
        with engine_errors(f"{self._name}: asking for its state"):
            return bool(self._api.inspect_container(self._container_id)["State"]["Running"])

    def _kill_and_tidy(self) -> None:
        with engine_errors(f"{self._name}: sweeping"):
            created = self._api.exec_create(self._container_id, ["bash", "-p", "-c", _SWEEP], user="0:0")
            self._api.exec_start(created["Id"], detach=True)
            deadline = time.monotonic() + SWEEP_TIMEOUT_S
            while self._api.exec_inspect(created["Id"])["Running"]:
                if time.monotonic() > deadline:
                    raise SandboxError(f"{self._name}: the container does not answer")
                time.sleep(0.02)

    def _recover(self, lost: ChannelLostError, half_bytes: int) -> Answer:
        """Reopen the channel after a command broke it, and fetch what the command wrote until then."""
        with self._reopening:
            return self._recover_held(lost, half_bytes)

    def _recover_held(self, lost: ChannelLostError, half_bytes: int) -> Answer:
        self._sweep()
        state, code = ("late", EXIT_TIMED_OUT) if lost.late else ("ok", EXIT_KILLED)
        try:
            answer = self._channel.ask(
                "recover",
                f"{self._number} {half_bytes}\n".encode(),
                OPEN_TIMEOUT_S,
                most=2 * half_bytes,
            )
        except ChannelLostError:
            self._sweep()
            return Answer(state, code, 0, b"")
        return Answer(state, code, answer.total, answer.payload)

    def _ask_again(self, operation: str, request: bytes, size: int, *, most: int = 0) -> Answer:
        """A request, and once more over a new channel."""
        for attempt in range(2):
            try:
                return self._channel.ask(operation, request, _transfer_s(size), most=most)
            except ChannelLostError as lost:
                logger.info("%s: %s: %s; sweeping", self._name, operation, lost)
                self._sweep()
                if attempt:
                    raise SpoiltError(f"{operation}: {lost}") from None
        raise AssertionError("unreachable")


def _transfer_s(size: int) -> float:
    """A deadline for a request with files of `size` bytes: bash handles well over 1 MB/s, even on a busy machine."""
    return OPEN_TIMEOUT_S + size / 1e6


def _entries(files: Mapping[str, bytes], workdir: str) -> tuple[bytes, int]:
    """The request that carries files, and its size: number of entries, then each with how, lengths, path and data."""
    parts: list[bytes] = []
    for path, content in files.items():
        name = absolute_path(path, workdir).encode("utf-8", "surrogateescape")
        for start in range(0, max(len(content), 1), CHUNK_BYTES):
            data = content[start : start + CHUNK_BYTES].replace(b"\\", b"\\\\").replace(b"\0", b"\\0000")
            how = "add" if start else "new"
            parts.append(f"{how} {len(name)} {len(data)}\n".encode() + name + data)
    request = f"{len(parts)}\n".encode() + b"".join(parts)
    return request, len(request)


@cache
def _script() -> str:
    """`driver.sh` without its comment lines."""
    text = package_files(__package__).joinpath("driver.sh").read_text(encoding="utf-8")
    return "\n".join(
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("# ")
    )


def _program(spec: SandboxSpec) -> bytes:
    """What the driver of a sandbox runs: the folders of its specification, then the script."""
    mounts = {spec.workdir: "755", **RESET_MOUNTS}
    meta = "\n".join(f"{mode} 0 0 {path}" for path, mode in mounts.items())
    folders = [
        f"ae_work={shlex.quote(spec.workdir)}",
        f"ae_roots=({shlex.join(mounts)})",
        f"ae_meta={shlex.quote(meta)}",
    ]
    return "\n".join([*folders, _script(), ""]).encode()
