"""Calls between two event loops that pass messages in batches.

Each side has a :class:`Mailbox`. What carries the batches (:mod:`agentenv.cluster.channel`) takes the messages that
wait on one side and delivers them on the other.

Invariants:

* Every call ends: with its result, with what it raised, or with what :meth:`Mailbox.fail` was given.
* A call that is cancelled is cancelled on the other side; a call that was only started (:meth:`Mailbox.start`) goes on
  when whoever waits for it gives up.
* An exception arrives with the other side's traceback as a note, as what it was where its class is Python's or
  agentenv's own: another class may be one that this side can't load.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from agentenv.errors import AgentEnvError, InfrastructureError
from agentenv.rollout.workers.wire import error_from_wire, error_to_wire

__all__ = ["Handler", "Mailbox", "Message", "portable"]

Message = tuple[str, int, Any, Any]
"""("call", number, method, arguments), ("done", number, succeeded, result or exception) or ("cancel", number, None,
None)."""
Handler = Callable[..., Coroutine[Any, Any, Any]]


class Mailbox:
    """One side.

    Args:
        handler: ``handler(method, *arguments)`` answers the other side's calls.
        on_waiting: called when a message waits to be taken.
    """

    def __init__(self, handler: Handler, on_waiting: Callable[[], None]) -> None:
        self._handler = handler
        self._on_waiting = on_waiting
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[Any]] = {}
        self._waiting: list[Message] = []
        self._failure: Exception | None = None

    @property
    def num_waiting(self) -> int:
        """Messages to be taken."""
        return len(self._waiting)

    @property
    def is_waiting_for_answers(self) -> bool:
        """Calls to the other side are not answered yet."""
        return bool(self._calls)

    def start(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call the other side; the future has its result."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_look_at)
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        number = next(self._numbers)
        self._calls[number] = future
        self._post(("call", number, method, arguments))
        return future

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the other side and wait; cancelled there when it is cancelled here."""
        future = self.start(method, *arguments)
        try:
            return await future
        except asyncio.CancelledError:
            for number, pending in self._calls.items():
                if pending is future:
                    del self._calls[number]
                    self._post(("cancel", number, None, None))
                    break
            raise

    def take(self) -> list[Message]:
        """The messages that wait."""
        taken, self._waiting = self._waiting, []
        return taken

    def deliver(self, messages: list[Message]) -> None:
        """Messages of the other side have come."""
        for kind, number, first, second in messages:
            if kind == "call":
                task = asyncio.create_task(self._handler(first, *second), name=f"{first} {number}")
                self._answering[number] = task
                task.add_done_callback(partial(self._answered, number))
            elif kind == "cancel":
                if (task_to_end := self._answering.get(number)) is not None:
                    task_to_end.cancel()
            elif (future := self._calls.pop(number, None)) is not None and not future.done():
                if first:
                    future.set_result(second)
                else:
                    future.set_exception(second)

    def fail(self, error: Exception) -> None:
        """The other side is gone: end every call, and answer none any more."""
        self._failure = self._failure or error
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)
        for task in self._answering.values():
            task.cancel()
        self._waiting.clear()

    def _post(self, message: Message) -> None:
        self._waiting.append(message)
        self._on_waiting()

    def _answered(self, number: int, task: asyncio.Task[Any]) -> None:
        self._answering.pop(number, None)
        if self._failure is not None:
            return
        if task.cancelled():
            self._post(("done", number, False, InfrastructureError("the call was cancelled")))
        elif (error := task.exception()) is None:
            self._post(("done", number, True, task.result()))
        else:
            self._post(("done", number, False, portable(error)))


def _look_at(future: asyncio.Future[Any]) -> None:
    """An exception that nobody waits for any more is no news."""
    if not future.cancelled():
        future.exception()


def portable(error: BaseException) -> Exception:
    """The exception as it can be sent: of a class that the other side has."""
    notes = [*getattr(error, "__notes__", []), "In an actor:\n" + "".join(traceback.format_exception(error))]
    made: Exception
    if isinstance(error, AgentEnvError):
        made = error_from_wire(*error_to_wire(error))
    elif isinstance(error, Exception) and type(error).__module__ == "builtins":
        made = _copy(error)
    else:
        made = _as_text(error)
    made.__notes__ = notes
    return made


def _copy(error: Exception) -> Exception:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return _as_text(error)
    return copy if isinstance(copy, Exception) else _as_text(error)


def _as_text(error: BaseException) -> AgentEnvError:
    return AgentEnvError(f"{type(error).__name__}: {error}")
