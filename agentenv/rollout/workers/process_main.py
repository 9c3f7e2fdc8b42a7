"""The side of an environment's process: a fork server, and in each of its forks one environment.

The server imports what environments need once, so that a new process costs a fork and never one of the rollout's own
process, which has threads. Per environment it holds a control socket to the rollout: it writes the process id and, at
the end, the exit code; it reads nothing but the end, which means "close the environment".

Invariants:

* The end of the control socket (the worker was ended, or the rollout's process is gone, however it died) is answered
  with SIGTERM, and ``grace_s`` later with SIGKILL for the whole process group. Nothing outlives that.
* When a process ends, what is left of its group is killed, before its id can be used by another.
* Should the server itself be killed, the kernel kills its forks (Linux).
* The server forks with one thread only: where importing starts threads, it begins anew without.
* An environment's process answers every frame with one, until the socket ends or SIGTERM comes; then it closes the
  environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

from agentenv.errors import AgentEnvError, EnvError
from agentenv.rollout.workers.contract import (
    TextEnv,
    advised_turns,
    call_failed,
    checked_reset,
    checked_step,
    env_name,
    making_failed,
)
from agentenv.rollout.workers.env_payload import Imports, preload
from agentenv.rollout.workers.wire import decode, encode, error_to_wire

logger = logging.getLogger(__name__)

RECORD = struct.Struct("!q")
"""What the control socket carries: first the process id (or minus the error number of a failed fork), then the exit
code, negative for a signal."""
HEADER = struct.Struct("!I")

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_OWN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def main() -> None:
    """Run the fork server; its settings are the JSON in the first argument."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    requests = socket.socket(fileno=settings["fd"])
    os.set_inheritable(settings["fd"], False)
    _die_with_parent(settings["parent"], signal.SIGTERM)
    if settings["preload"]:
        arguments = sys.argv
        sys.argv = settings["argv"]
        main_script = settings["main"] and tuple(settings["main"])
        preload(Imports(tuple((name, file) for name, file in settings["modules"]), main_script))
        if _num_threads() > 1:
            os.set_inheritable(settings["fd"], True)
            settings["preload"] = False
            os.execv(sys.executable, [sys.executable, "-c", settings["code"], json.dumps(settings)])
        sys.argv = arguments
    gc.collect()
    gc.freeze()
    ForkServer(requests, settings["parent"], settings["grace_s"]).run()


class ForkServer:
    """Forks on request and sees to it that every fork ends.

    Args:
        requests: each byte comes with two sockets: for the environment's calls, and the control socket.
        parent: id of the rollout's process.
        grace_s: from SIGTERM to SIGKILL.
    """

    def __init__(self, requests: socket.socket, parent: int, grace_s: float) -> None:
        self._requests = requests
        self._parent = parent
        self._grace_s = grace_s
        self._children: dict[int, socket.socket] = {}
        self._kill_at: dict[int, float] = {}
        self._serving = True
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()

    def run(self) -> None:
        """Serve until the rollout wants no more forks and all have ended."""
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in _OWN_SIGNALS:
            signal.signal(number, _ignore)
        signal.signal(signal.SIGTERM, lambda *_: self._stop_serving())
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain)
        self._selector.register(self._requests, selectors.EVENT_READ, self._fork)
        while self._serving or self._children:
            until = min(self._kill_at.values(), default=float("inf")) - time.monotonic()
            for key, _ in self._selector.select(max(0.0, min(until, _PARENT_CHECK_S))):
                key.data()
            if os.getppid() != self._parent:
                self._stop_serving()
            self._kill_overdue()
            self._reap()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _fork(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._requests, 1, 2)
        if not message or len(fds) != 2:
            self._stop_serving()
            return
        calls, control = (socket.socket(fileno=fd) for fd in fds)
        signal.pthread_sigmask(signal.SIG_BLOCK, _OWN_SIGNALS)
        try:
            try:
                pid = os.fork()
            except OSError as error:
                _send_record(control, -(error.errno or 1))
                control.close()
                return
            if pid == 0:
                self._become_environment(calls, control)
        finally:
            calls.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
        self._children[pid] = control
        _send_record(control, pid)
        if self._serving:
            self._selector.register(control, selectors.EVENT_READ, lambda: self._end(pid))
        else:
            self._end(pid)

    def _become_environment(self, calls: socket.socket, control: socket.socket) -> None:
        """In the fork; does not return."""
        code = 1
        try:
            os.setsid()
            server = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for inherited in (self._requests, self._wake, self._waker, control, *self._children.values()):
                inherited.close()
            _die_with_parent(server, signal.SIGKILL)
            code = EnvironmentProcess(calls, server).run()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self, pid: int) -> None:
        """The control socket ended; it never carries anything else."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._children[pid])
        if pid not in self._kill_at:
            self._kill_at[pid] = time.monotonic() + self._grace_s
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for pid, kill_at in self._kill_at.items():
            if now >= kill_at:
                _kill_group(pid)
                self._kill_at[pid] = now + _PARENT_CHECK_S

    def _reap(self) -> None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self._children and (ended := os.waitid(os.P_ALL, 0, flags)) is not None:
            pid = ended.si_pid
            # As long as it is not reaped, nobody else can have its id.
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            control = self._children.pop(pid, None)
            self._kill_at.pop(pid, None)
            if control is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(control)
                _send_record(control, os.waitstatus_to_exitcode(status))
                control.close()

    def _stop_serving(self) -> None:
        if self._serving:
            self._serving = False
            self._selector.unregister(self._requests)
            self._requests.close()
        if os.getppid() != self._parent:
            for pid in list(self._children):
                self._end(pid)


class EnvironmentProcess:
    """One environment, answering the frames of a socket.

    Args:
        calls: the socket.
        server: id of the fork server.
    """

    def __init__(self, calls: socket.socket, server: int) -> None:
        self._calls = calls
        self._reader = calls.makefile("rb")
        self._server = server
        self._env_fn: Any = None
        self._env: TextEnv | None = None
        self._closing = False

    def run(self) -> int:
        """Answer until the end, then close the environment; returns the exit code."""
        try:
            try:
                signal.signal(signal.SIGTERM, self._on_terminate)
                signal.signal(signal.SIGINT, _ignore)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
                self._answer_all()
            finally:
                self._closing = True
        except _Terminated:
            pass
        except OSError:
            pass  # the other side is gone
        if self._env is not None:
            try:
                self._env.close()
            except BaseException:
                logger.exception("%s: closing the environment failed", os.environ.get("AGENTENV_WORKER"))
                return 1
        return 0

    def _on_terminate(self, *_: object) -> None:
        if not self._closing:
            self._closing = True
            raise _Terminated

    def _answer_all(self) -> None:
        first = self._next_frame()
        if first is None:
            return
        failed = _set_up(first)
        while (payload := self._next_frame()) is not None:
            try:
                reply = encode(["ok", *self._answer(*decode(payload))])
            except AgentEnvError as error:
                reply = _encode_error(error)
            except Exception as error:
                reply = _encode_error(EnvError(f"the environment's process failed: {error!r}"))
            self._calls.sendall(reply)

    def _next_frame(self) -> bytes | None:
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (size,) = HEADER.unpack(header)
        payload = self._reader.read(size)
        return payload if len(payload) == size else None
