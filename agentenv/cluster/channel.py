"""The way of messages between a rollout and an actor of Ray: one call of the actor carries a batch there and one back.

A call of an actor costs about a millisecond of processor time, many times that of an environment's message. So messages
share calls: at most two are on their way, what comes up meanwhile waits for the next. A call that brings nothing to
report stays at the actor until there is something, or until the next one relieves it.

Invariants:

* Messages arrive in the order in which they were posted, whatever the order of the calls.
* A call is at the actor whenever an answer is awaited, so the death of the actor or its node is noticed; one that lives
  and says nothing (its loop hangs, its machine is cut off) counts as lost after LONGEST_SILENCE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentenv.cluster.mailbox import Handler, Mailbox, Message
from agentenv.errors import InfrastructureError

__all__ = ["ActorChannel", "ActorEnd", "ActorLostError"]

logger = logging.getLogger(__name__)

LONGEST_STAY_S = 10.0
"""After which an empty answer comes back: the sign of life of an actor that has nothing to say."""
LONGEST_SILENCE_S = 60.0
"""Without any answer, where one is due after LONGEST_STAY_S."""
_MOST_CALLS = 2


class ActorLostError(InfrastructureError):
    """An actor, its process or its node is gone."""


class ActorEnd:
    """The actor's side: its method ``exchange`` calls :meth:`exchange`.

    Args:
        handler: answers the rollout's calls.
    """

    def __init__(self, handler: Handler) -> None:
        self.mailbox = Mailbox(handler, self._wake)
        self._next_batch = 0
        self._early: dict[int, list[Message]] = {}
        self._staying: asyncio.Future[None] | None = None

    async def exchange(self, number: int, messages: list[Message]) -> list[Message]:
        """Take a batch, and give one.

        Args:
            number: of the batch, from 0 on.
            messages: may be none.
        """
        self._early[number] = messages
        while (batch := self._early.pop(self._next_batch, None)) is not None:
            self._next_batch += 1
            self.mailbox.deliver(batch)
        self._wake()
        if not self.mailbox.num_waiting:
            staying = self._staying = asyncio.get_running_loop().create_future()
            await asyncio.wait({staying}, timeout=LONGEST_STAY_S)
            # What else became ready in this turn of the loop goes along.
            await asyncio.sleep(0)
        return self.mailbox.take()

    def _wake(self) -> None:
        if self._staying is not None and not self._staying.done():
            self._staying.set_result(None)


class ActorChannel:
    """The rollout's side; it lives in one event loop.

    Args:
        actor: handle of an actor with a method ``exchange``.
        on_lost: called once, when the actor is gone.
        handler: answers the actor's calls; None: it makes none.
    """

    def __init__(
        self, actor: Any, on_lost: Callable[[ActorLostError], None], handler: Handler | None = None
    ) -> None:
        self.mailbox = Mailbox(handler or _refuse, self._flush_soon)
        self._actor = actor
        self._on_lost = on_lost
        self._listens = handler is not None
        self._loop = asyncio.get_running_loop()
        self._next_batch = 0
        self._under_way = 0
        """Calls of the actor."""
        self._is_flushing = False
        self._is_closed = False
        self._heard_s = 0.0
        """When it last answered, or had been asked nothing."""
        self._watch: asyncio.TimerHandle | None = None
        self.num_calls = 0
        """Of the actor so far."""

    def open(self) -> None:
        """Have a call at the actor from now on, although nothing is to be sent."""
        self._flush_soon()

    def close(self, error: ActorLostError | None = None) -> None:
        """Send nothing more; calls that wait end with the error."""
        if not self._is_closed:
            self._is_closed = True
            if self._watch is not None:
                self._watch.cancel()
            self.mailbox.fail(error or ActorLostError("the connection to the actor was closed"))

    def _flush_soon(self) -> None:
        # What is posted in the same turn of the loop goes along.
        if not self._is_flushing and not self._is_closed:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        wants_answers = self._listens or self.mailbox.is_waiting_for_answers
        needed = self.mailbox.num_waiting or (wants_answers and not self._under_way)
        if self._is_closed or not needed or self._under_way >= _MOST_CALLS:
            return
        try:
            reference = self._actor.exchange.remote(self._next_batch, self.mailbox.take())
        except Exception as error:
            self._lose(error)
            return
        self._next_batch += 1
        self.num_calls += 1
        if not self._under_way:
            self._heard_s = self._loop.time()
        self._under_way += 1
        if self._watch is None:
            self._watch = self._loop.call_later(LONGEST_SILENCE_S, self._look)
        reference.future().add_done_callback(self._hand_over)

    def _hand_over(self, call: Future[list[Message]]) -> None:
        """In a thread of Ray's."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._returned, call)

    def _look(self) -> None:
        """Whether the actor has answered of late."""
        self._watch = None
        if self._is_closed or not self._under_way:
            return
        left_s = self._heard_s + LONGEST_SILENCE_S - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
            return
        self._lose(TimeoutError(f"no answer for {LONGEST_SILENCE_S:g} s"))

    def _returned(self, call: Future[list[Message]]) -> None:
        self._under_way -= 1
        self._heard_s = self._loop.time()
        if self._is_closed:
            return
        if (error := call.exception()) is not None:
            self._lose(error)
            return
        self.mailbox.deliver(call.result())
        self._flush_soon()

    def _lose(self, error: BaseException) -> None:
        if self._is_closed:
            return
        # Ray's messages go on for many lines; they stay with the cause.
        silent = isinstance(error, TimeoutError)
        lost = ActorLostError(str(error) if silent else type(error).__name__)
        lost.__cause__ = error
        self.close(lost)
        self._on_lost(lost)


async def _refuse(method: str, *arguments: Any) -> Any:
    raise InfrastructureError(f"an actor called {method!r}, which nothing here answers")
