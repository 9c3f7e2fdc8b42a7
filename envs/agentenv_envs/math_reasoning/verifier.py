"""Comparison of mathematical expressions by the library math-verify, in processes that can be killed.

The library limits its time by alarms: they can't be set outside of the main thread, and they are served late or never
while one operation of a huge integer runs (`9^{9^9}`; huggingface/Math-Verify#65). So it runs in processes of its own.

Invariants:
- `equal` may be called from any thread, and ends: a comparison has `cpu_s` of processor time and `memory_mb`. It is not
  the clock that counts: a busy machine must not turn right answers into wrong ones;
- an answer that is over a limit, or that breaks the process, is a wrong answer with a reason;
- a process that can't be started, or that something else killed twice, is a `RewardError`: never a wrong answer;
- processes are started when they are first needed, used again, and end with this one, however it ends.
"""

import atexit
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv.errors import MissingExtraError, RewardError

__all__ = ["Verdict", "Verifier", "require_math_verify", "shared_verifier"]

logger = logging.getLogger(__name__)

_PROGRAM: Final = Path(__file__).with_name("verify_worker.py")
_START_S: Final = 180.0
_PATIENCE_S: Final = 300.0
"""Seconds by the clock until a process that neither answers nor uses up its processor time is given up."""
_OWN_FAULT: Final = {
    signal.SIGPROF: "time",
    signal.SIGSEGV: "crash",
    signal.SIGBUS: "crash",
    signal.SIGABRT: "crash",
    signal.SIGILL: "crash",
    signal.SIGFPE: "crash",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer equals the right one, and what stopped the comparison, if anything did."""

    equal: bool
    stopped: str | None = None
    """None, "time", "memory" or "crash"."""


class _GoneError(Exception):
    """The process ended without an answer, by this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Verifier:
    """A few processes that compare expressions.

    Args:
        workers: processes at most; further callers wait.
        cpu_s: processor seconds of one comparison.
        memory_mb: MiB that one comparison may take.
    """

    def __init__(self, *, workers: int = 2, cpu_s: float = 3.0, memory_mb: int = 512) -> None:
        if workers < 1 or cpu_s <= 0 or memory_mb < 1:
            raise ValueError(
                f"workers={workers!r}, cpu_s={cpu_s!r}, memory_mb={memory_mb!r}: each must be positive"
            )
        self._cpu_s = cpu_s
        self._memory_mb = memory_mb
        self._free = threading.Semaphore(workers)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = threading.Event()

    def equal(self, gold: str, answer: str) -> Verdict:
        """Compare an answer with the right one; both as they stand in a box.

        Raises:
            RewardError: it could not be found out.
        """
        request = {"gold": gold, "answer": answer, "cpu_s": self._cpu_s}
        with self._free:
            try:
                return self._once(request)
            except _GoneError as gone:
                logger.warning("a process of the verifier ended from outside (%s); once more", gone)
            try:
                return self._once(request)
            except _GoneError as gone:
                raise RewardError(f"the verifier's process ended twice: {gone}") from None

    def _once(self, request: dict[str, Any]) -> Verdict:
        """Ask one process.

        Raises:
            _GoneError: it ended, and not by its own fault.
        """
        process = self._take()
        try:
            reply = process.ask(request)
        except BaseException as error:
            self._drop(process)
            code = error.code if isinstance(error, _GoneError) else 0
            stopped = _OWN_FAULT.get(signal.Signals(-code)) if code < 0 else None
            if stopped is None:
                raise
            return Verdict(False, stopped)
        if "stopped" in reply:
            self._drop(process)
            return Verdict(False, reply["stopped"])
        with self._lock:
            self._idle.append(process)
        return Verdict(bool(reply["equal"]))

    def close(self) -> None:
        """End the processes; idempotent."""
        with self._lock:
            self._closed.set()
            processes = list(self._all)
            self._all.clear()
            self._idle.clear()
        for process in processes:
            process.end()

    def _take(self) -> "_Process":
        with self._lock:
            if self._closed.is_set():
                raise RewardError("the verifier is closed")
            if self._idle:
                return self._idle.pop()
        process = _Process(self._memory_mb)
        with self._lock:
            if not self._closed.is_set():
                self._all.add(process)
                return process
        process.end()
        raise RewardError("the verifier is closed")

    def _drop(self, process: "_Process") -> None:
        with self._lock:
            self._all.discard(process)
        process.end()


class _Process:
    """One process; belongs to one thread at a time."""

    def __init__(self, memory_mb: int) -> None:
        path = os.pathsep.join(folder for folder in sys.path if folder)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                start_new_session=True,  # an interrupt from the keyboard is not for it
            )
        except OSError as error:
            raise RewardError(f"the verifier's process can't be started: {error}") from error
        try:
            hello = self._read(_START_S)
        except _GoneError as gone:
            self.end()
            raise RewardError(f"the verifier's process ended while it started: {gone}") from None
        except BaseException:
            self.end()
            raise
        if "failed" in hello:
            self.end()
            raise RewardError(f"the verifier's process can't start: {hello['failed']}")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _GoneError(self._process.wait()) from None
        return self._read(_PATIENCE_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor, text = self._process.stdout.fileno(), b""
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not text.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not ready.poll(left_s * 1000):
                raise RewardError(f"the verifier's process did not answer within {timeout_s:g} s")
            piece = os.read(descriptor, 65_536)
            if not piece:
                raise _GoneError(self._process.wait())
            text += piece
        reply: dict[str, Any] = json.loads(text)
        return reply

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was not sent yet
                    continue


_shared: Verifier | None = None
_shared_lock = threading.Lock()


def shared_verifier() -> Verifier:
    """The verifier of this process, for all its environments."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Verifier()
        return _shared


def require_math_verify() -> None:
    """Find out that the library is there, without importing it.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("math-verify", "math")


def _forget() -> None:
    """In a forked child: the processes are the parent's."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


@atexit.register
def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


os.register_at_fork(after_in_child=_forget)
