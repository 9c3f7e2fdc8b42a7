"""A synchronous environment in a process of its own, which can be killed.

The process is a fork of a small server (:mod:`agentenv.rollout.workers.process_main`), never of the rollout's own
process. Calls are frames on a socket, one there and one back.

Invariants:

* Every call ends by its deadline, whatever the process does; the event loop never waits for it in between.
* The process's death ends the call in flight at once, with its exit code.
* :meth:`ProcessWorker.end` closes the environment if it can be closed in a few seconds and kills the whole process
  group if not. The same happens when the rollout's process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from agentenv.errors import AgentEnvError, EnvError, EpisodeTimeoutError, UsageError
from agentenv.rollout.workers import env_payload, fork_server
from agentenv.rollout.workers.contract import ResetResult, StepResult, TextEnv
from agentenv.rollout.workers.env_payload import EnvPayload
from agentenv.rollout.workers.process_main import RECORD
from agentenv.rollout.workers.wire import FrameReader, decode, encode, error_from_wire, framed

logger = logging.getLogger(__name__)

_READ_BYTES = 65536


@dataclass
class _Call:
    stage: str
    deadline: float
    future: asyncio.Future[bytes]
    timer: asyncio.TimerHandle | None = None


class ProcessWorker:
    """One environment and its process; both are made at the first call.

    Args:
        env_fn: makes the environment, in the process; pickled, or packed already by another process.
        name: for logs; the process has it as the variable ``AGENTENV_WORKER``.

    Raises:
        UsageError: ``env_fn`` can't be pickled, the platform can't fork, or this is the import of the main script in
            another worker's process.
    """

    def __init__(self, env_fn: Callable[[], TextEnv] | EnvPayload, name: str) -> None:
        if env_payload.importing_main:
            raise UsageError(
                "the main script, imported in a process because it defines env_fn, starts rollouts itself; put what "
                "shall only run in the main process under `if __name__ == '__main__':`"
            )
        self.name = name
        self._payload = env_fn if isinstance(env_fn, EnvPayload) else env_payload.pack(env_fn)
        self._server: fork_server.ForkServer | None = fork_server.acquire(self._payload.imports)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: socket.socket | None = None
        self._control: socket.socket | None = None
        self._records = b""
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._pending: _Call | None = None
        self._env_name: str | None = None
        self._max_turns: int | None = None
        self._ended = False
        self._missed: str | None = None
        self._died: str | None = None
        self._gone: asyncio.Future[None] | None = None
        self.pid: int | None = None
        """Of the process, once it has started."""

    @property
    def is_running(self) -> bool:
        """The process lives."""
        if self._control is not None and (self._loop is None or not self._loop.is_running()):
            self._read_control()
        return self._control is not None

    @property
    def max_turns(self) -> int | None:
        """The environment's advice; None before the first reset, and without advice."""
        return self._max_turns

    async def reset(self, seed: int, deadline: float) -> ResetResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""
        answer = await self._call("reset", seed, deadline)
        observation, info, self._env_name, self._max_turns = answer
        return observation, info

    async def step(self, action: str, deadline: float) -> StepResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""
        return cast("StepResult", tuple(await self._call("step", action, deadline)))

    async def settle(self) -> None:
        """Wait for a call whose caller was cancelled, under that call's own deadline.

        Raises:
            EpisodeTimeoutError: it missed that deadline.
        """
        call = self._pending
        if call is not None:
            if call.future.done():
                call.future = asyncio.get_running_loop().create_future()
                call.future.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({call.future})
        if self._missed is not None:
            raise self._timeout(self._missed)

    def end(self) -> None:
        """Have the environment closed, and the process group killed if that takes long; does not wait; idempotent."""
        if self._ended:
            return
        self._ended = True
        self._close_calls()
        if self._control is None:
            self._release()
        else:
            # The end of this direction tells the server; the exit code comes in the other one.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)

    async def join(self, deadline: float) -> bool:
        """Wait for the process's end after :meth:`end`; False: the deadline passed first."""
        if self._gone is None or self._control is None:
            return True
        remaining = deadline - asyncio.get_running_loop().time()
        await asyncio.wait({self._gone}, timeout=max(remaining, 0.0))
        return self._gone.done()

    async def _call(self, stage: str, argument: int | str, deadline: float) -> list[Any]:
        await self.settle()
        if self._ended:
            raise EnvError(f"{self.name} has ended")
        if self._died is not None:
            raise self._death()
        loop = asyncio.get_running_loop()
        frame = encode([stage, argument])
        if self._calls is None:
            if stage != "reset":
                raise EnvError("step before reset")
            self._start(loop)
        call = self._pending = _Call(stage, deadline, loop.create_future())
        call.timer = loop.call_at(deadline, self._expire, call)
        try:
            self._write(frame)
            kind, *answer = decode(await call.future)
        finally:
            del call  # with it, an exception's traceback would hold the exception
        if kind == "ok":
            return answer
        raise self._error(*answer)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._server is not None
        path = [entry for entry in sys.path if isinstance(entry, str)]
        setting = (self.name, dict(os.environ), _directory(), path, self._payload)
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs.append(socket.socketpair())
            pairs.append(socket.socketpair())
        except OSError as error:
            for end in itertools.chain.from_iterable(pairs):
                end.close()
            if error.errno != errno.EMFILE:
                raise EnvError(f"{self.name} could not be started: {error}") from error
            raise UsageError(
                "too many open files: each environment in a process needs two; raise the limit (`ulimit -n`) or lower "
                "RolloutConfig.num_envs"
            ) from error
        (self._calls, calls), (self._control, control) = pairs
        self._loop = loop
        self._gone = loop.create_future()
        for end in (self._calls, self._control):
            end.setblocking(False)
        loop.add_reader(self._calls, self._read_calls)
        loop.add_reader(self._control, self._read_control)
        self._server.fork(calls, control)
        self._write(framed(pickle.dumps(setting)))

    def _write(self, data: bytes) -> None:
        """Send, now or as soon as the process takes it."""
        assert self._calls is not None and self._loop is not None
        if self._unsent:
            self._unsent += data
            return
        sent = _send(self._calls, data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._calls, self._write_on)

    def _write_on(self) -> None:
        assert self._calls is not None and self._loop is not None
        del self._unsent[: _send(self._calls, self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._calls)

    def _read_calls(self) -> bool:
        """Take in what has come; False: nothing has."""
        assert self._calls is not None and self._loop is not None
        try:
            data = self._calls.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            # The process is ending; the control socket will tell how.
            self._loop.remove_reader(self._calls)
            return False
        try:
            payload = self._frames.feed(data)
        except EnvError as error:
            self._settle_call(error)
            self.end()
            return False
        if payload is not None:
            self._settle_call(payload)
        return True

    def _read_control(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(2 * RECORD.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._records += data
        records = [value for (value,) in RECORD.iter_unpack(self._records)]
        if records and records[0] > 0:
            self.pid = records[0]
        if len(records) == 2:
            self._on_gone(f"died: {_ending(records[1])}")
        elif not data and self.pid is not None:
            self._on_gone("died with its fork server")
        elif not data:
            reason = os.strerror(-records[0]) if records else "no fork server"
            self._on_gone(f"could not be started: {reason}")

    def _on_gone(self, how: str) -> None:
        """The process has ended; what it sent before still counts."""
        assert self._control is not None and self._loop is not None and self._gone is not None
        self._died = how
        while self._calls is not None and self._pending is not None and self._read_calls():
            pass
        self._close_calls()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._control)
            if not self._gone.done():
                self._gone.set_result(None)
        self._control.close()
        self._control = None
        self._settle_call(EnvError(f"{self.name} has ended") if self._ended else self._death())
        self._release()

    def _close_calls(self) -> None:
        if self._calls is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._calls)
                self._loop.remove_writer(self._calls)
            self._calls.close()
            self._calls = None

    def _release(self) -> None:
        if self._server is not None:
            fork_server.release(self._server)
            self._server = None

    def _expire(self, call: _Call) -> None:
        if call is self._pending:
            self._missed = call.stage
            self._settle_call(self._timeout(call.stage))
            self.end()

    def _settle_call(self, outcome: bytes | Exception) -> None:
        call, self._pending = self._pending, None
        if call is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        if call.future.done():
            return
        if isinstance(outcome, bytes):
            call.future.set_result(outcome)
        else:
            call.future.set_exception(outcome)

    def _timeout(self, stage: str) -> EpisodeTimeoutError:
        return EpisodeTimeoutError(stage, f"{stage} of {self._describe()} did not return before its deadline")

    def _error(self, name: str, arguments: list[str], origin: str | None, trace: str) -> AgentEnvError:
        error = error_from_wire(name, arguments, origin)
        error.add_note(f"In {self.name}:\n{trace}")
        return error

    def _death(self) -> EnvError:
        error = EnvError(f"process of {self._describe()} {self._died}")
        error.origin = "WorkerDied"
        return error

    def _describe(self) -> str:
        return f"{self._env_name} in {self.name}" if self._env_name else self.name


def _send(to: socket.socket, data: bytes | bytearray) -> int:
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        # Nobody reads any more; the control socket tells why.
        return len(data)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return os.sep


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
