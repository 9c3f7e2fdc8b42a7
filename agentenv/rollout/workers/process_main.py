"""The side of an environment's process: a fork server, and in each of its forks one environment.

The server imports what environments need once, so that a new process costs a fork and never one of the rollout's own
process, which has threads. Per environment it holds a control socket to the rollout: it writes the process id and, at
the end, the exit code; it reads nothing but the end, which means "close the environment".

Invariants:

* The end of the control socket (the worker was ended, or the rollout's process is gone, however it died) is answered
  with SIGTERM, now and again, and ``grace_s`` later with SIGKILL for the whole process group. Nothing outlives that.
* When a process ends, what is left of its group is killed, before its id can be used by another.
* Should the server itself be killed, the kernel kills its forks (Linux).
* The server forks with one thread only: where importing starts threads, it begins anew without.
* An environment's process answers every frame with one, until the socket ends or SIGTERM comes; then it closes the
  environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
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
from collections.abc import Iterator
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
from agentenv.rollout.workers.env_payload import EnvPayload, Imports, preload
from agentenv.rollout.workers.wire import HEADER, decode, encode, error_to_wire

logger = logging.getLogger(__name__)

RECORD = struct.Struct("!q")
"""What the control socket carries: first the process id (or minus the error number of a failed fork), then the exit
code, negative for a signal."""

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_SIGTERM_EVERY_S = 1.0
_KILL_CHECK_S = 0.1
_OWN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def main() -> None:
    """Run the fork server; its settings are the JSON in the first argument."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    requests = socket.socket(fileno=settings["fd"])
    requests.set_inheritable(False)
    _die_with(settings["parent"], signal.SIGTERM)
    if settings["preload"]:
        sys.argv = settings["argv"]
        main_script = tuple(settings["main"]) if settings["main"] else None
        preload(Imports(tuple((name, file) for name, file in settings["modules"]), main_script))
        if _num_threads() > 1:
            logger.warning(
                "importing %s starts threads: it is imported anew for each environment", settings["modules"]
            )
            requests.set_inheritable(True)
            restarted = json.dumps({**settings, "preload": False})
            os.execv(sys.executable, [sys.executable, "-c", settings["code"], restarted])
    gc.collect()
    gc.freeze()
    ForkServer(requests, settings["parent"], settings["grace_s"]).run()
    sys.stdout.flush()
    os._exit(0)


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
        self._pressed_at = 0.0
        self._serving = True
        self._terminated = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()

    def run(self) -> None:
        """Serve until the rollout wants no more forks and all have ended."""
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in _OWN_SIGNALS:
            signal.signal(number, _ignore)
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain)
        self._selector.register(self._requests, selectors.EVENT_READ, self._fork)
        while self._serving or self._children:
            for key, _ in self._selector.select(_KILL_CHECK_S if self._kill_at else _PARENT_CHECK_S):
                key.data()
            if self._terminated or os.getppid() != self._parent:
                self._stop_serving()
                for pid in self._children:
                    self._end(pid)
            self._reap()
            self._press()

    def _on_terminate(self, *_: object) -> None:
        self._terminated = True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _fork(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._requests, 1, 2)
        if not message:
            self._stop_serving()
            return
        calls, control = (socket.socket(fileno=fd) for fd in fds)
        # A SIGTERM must not meet a fork that still has the server's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _OWN_SIGNALS)
        gate: tuple[int, ...] = ()
        try:
            gate = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._become_environment(calls, control, *gate)
            _send_record(control, pid)
        except OSError as error:
            _send_record(control, -(error.errno or 1))
            control.close()
            return
        finally:
            calls.close()
            for end in gate:
                os.close(end)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
        self._children[pid] = control
        self._selector.register(control, selectors.EVENT_READ, functools.partial(self._end, pid))

    def _become_environment(
        self, calls: socket.socket, control: socket.socket, gate: int, opener: int
    ) -> None:
        """In the fork; does not return. The gate opens when the server has told the id: no answer may come before."""
        code = 1
        try:
            server = os.getppid()
            os.setsid()
            _die_with(server, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for inherited in (self._requests, self._wake, self._waker, control, *self._children.values()):
                inherited.close()
            os.close(opener)
            os.read(gate, 1)
            os.close(gate)
            code = EnvironmentProcess(calls).run()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self, pid: int) -> None:
        """The control socket ended, which is all that ever comes from it."""
        if pid not in self._kill_at:
            self._selector.unregister(self._children[pid])
            now = time.monotonic()
            self._pressed_at = self._pressed_at if self._kill_at else now
            self._kill_at[pid] = now + self._grace_s
            os.kill(pid, signal.SIGTERM)

    def _press(self) -> None:
        """Signal those that shall end once more: where Python can't raise (in ``__del__``), the first one was lost."""
        now = time.monotonic()
        again = now >= self._pressed_at + _SIGTERM_EVERY_S
        if again:
            self._pressed_at = now
        for pid, kill_at in self._kill_at.items():
            if now >= kill_at:
                _kill_group(pid)
            elif again:
                os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        for pid in self._ended():
            # As long as it is not reaped, nobody else can have its id.
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            control = self._children.pop(pid)
            if self._kill_at.pop(pid, None) is None:
                self._selector.unregister(control)
            _send_record(control, os.waitstatus_to_exitcode(status))
            control.close()

    def _ended(self) -> Iterator[int]:
        """Forks that have ended; each is to be reaped before the next one is asked for."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self._children and (ended := os.waitid(os.P_ALL, 0, flags)) is not None:
            yield ended.si_pid

    def _stop_serving(self) -> None:
        if self._serving:
            self._serving = False
            self._selector.unregister(self._requests)
            self._requests.close()


class EnvironmentProcess:
    """One environment, answering the frames of a socket.

    The first frame is a pickle from the rollout: surroundings and ``env_fn``; the others are calls.
    """

    def __init__(self, calls: socket.socket) -> None:
        self._calls = calls
        self._reader = calls.makefile("rb")
        self._payload: EnvPayload
        self._env: TextEnv | None = None
        self._closing = False

    def run(self) -> int:
        """Answer until the end, then close the environment; returns the exit code."""
        # The outer suppression is for a signal between the inner one's end and the assignment.
        with contextlib.suppress(_Terminated):
            with contextlib.suppress(_Terminated, OSError):  # OSError: the other side is gone
                signal.signal(signal.SIGTERM, self._on_terminate)
                signal.signal(signal.SIGINT, _ignore)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
                faulthandler.enable()
                self._answer_all()
            self._closing = True
        self._closing = True
        if self._env is not None:
            try:
                self._env.close()
            except Exception:
                logger.exception("%s: closing the environment failed", os.environ.get("AGENTENV_WORKER"))
        return 0

    def _on_terminate(self, *_: object) -> None:
        if not self._closing:
            raise _Terminated

    def _answer_all(self) -> None:
        first = self._next_frame()
        if first is None:
            return
        self._payload = _set_up(*pickle.loads(first))
        while (payload := self._next_frame()) is not None:
            try:
                kind, argument = decode(payload)
                answer = self._reset(argument) if kind == "reset" else self._step(argument)
                reply = encode(["ok", *answer])
            except Exception as error:
                typed = (
                    error if isinstance(error, AgentEnvError) else EnvError(f"the worker failed: {error!r}")
                )
                reply = encode(["error", *error_to_wire(typed), _traceback(error)])
            self._calls.sendall(reply)

    def _reset(self, seed: int) -> tuple[Any, ...]:
        env = self._env
        if env is None:
            try:
                env = self._env = self._payload.load()()
            except _Terminated:
                raise
            except BaseException as error:
                raise making_failed(error) from error.__cause__
        try:
            return *checked_reset(env, env.reset(seed=seed)), env_name(env), advised_turns(env)
        except _Terminated:
            raise
        except BaseException as error:
            raise call_failed(env, "reset", error) from error

    def _step(self, action: str) -> tuple[Any, ...]:
        env = self._env
        if env is None:
            raise EnvError("step before reset")
        try:
            return checked_step(env, env.step(action))
        except _Terminated:
            raise
        except BaseException as error:
            raise call_failed(env, "step", error) from error

    def _next_frame(self) -> bytes | None:
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (size,) = HEADER.unpack(header)
        return self._reader.read(size)


class _Terminated(BaseException):
    """SIGTERM came: out of whatever the environment is doing, to its close."""


def _set_up(
    name: str, environment: dict[str, str], directory: str, path: list[str], payload: EnvPayload
) -> EnvPayload:
    """Make the fork look like a new process of the rollout's."""
    os.environ.clear()
    os.environ.update(environment)
    # An environment shares the machine with many others.
    os.environ.update(AGENTENV_WORKER=name, OMP_NUM_THREADS="1")
    sys.path[:] = path
    with contextlib.suppress(OSError):
        os.chdir(directory)
    if "numpy" in sys.modules:
        # All forks have the server's random state.
        sys.modules["numpy"].random.seed()
    return payload


def _die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send a signal when the parent ends; where it can't, the parent looks after that itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _send_record(control: socket.socket, value: int) -> None:
    with contextlib.suppress(OSError):
        control.send(RECORD.pack(value))


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _ignore(*_: object) -> None:
    """A handler, because programs that the environment starts would inherit SIG_IGN."""
