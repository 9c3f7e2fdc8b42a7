"""A daemon thread that runs one function after another for an event loop, each under a deadline.

Invariants:

* Calls never overlap. A call that misses its deadline leaves the thread abandoned: it ends when, if ever, the call
  returns, and nobody waits for it.
* The thread outlives whatever the function raises.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from agentenv.errors import EpisodeTimeoutError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class CallThread:
    """Starts at the first call.

    Args:
        name: of the thread, for logs.
        last: called in the thread before it ends; None: nothing is.
    """

    def __init__(self, name: str, last: Callable[[], None] | None = None) -> None:
        self.name = name
        self._last = last
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: tuple[str, str, float, asyncio.Future[Any]] | None = None
        self._ended = False

    @property
    def is_running(self) -> bool:
        """The thread lives."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """No call can be made any more."""
        return self._ended

    async def call(
        self, job: Callable[[], _Result], deadline: float, *, stage: str, what: str = "the call"
    ) -> _Result:
        """Run a function in the thread.

        Args:
            job: called without arguments.
            deadline: of the event loop's clock, in seconds.
            stage: of the episode, for the error.
            what: is called, for the error.

        Raises:
            EpisodeTimeoutError: the deadline passed; the thread takes no further call.
            Exception: what the function raises.
        """
        await self.settle()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        # A cancelled caller leaves its call behind; nobody may then miss the exception it ends with.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending = (stage, what, deadline, future)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put((job, loop, future))
        await self._until_done(*self._pending)
        self._pending = None
        return future.result()

    async def settle(self) -> None:
        """Wait for a call whose caller was cancelled, under that call's own deadline.

        Raises:
            EpisodeTimeoutError: it missed that deadline.
        """
        if self._pending is not None:
            await self._until_done(*self._pending)
            self._pending = None

    def end(self) -> None:
        """Have the thread end after the call it is in; does not wait; idempotent."""
        if not self._ended:
            self._ended = True
            self._jobs.put(None)

    async def join(self, deadline: float) -> bool:
        """Wait for the thread's end after :meth:`end`; False: the deadline passed first."""
        loop = asyncio.get_running_loop()
        pause = 0.001
        while self.is_running:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    async def _until_done(self, stage: str, what: str, deadline: float, future: asyncio.Future[Any]) -> None:
        remaining = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({future}, timeout=max(remaining, 0.0))
        if not done:
            self.end()
            raise EpisodeTimeoutError(stage, f"{what} did not return before its deadline")

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, loop, future = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = job()
            except StopIteration as caught:
                # A future can't carry this one.
                error = RuntimeError(f"StopIteration: {caught}")
                error.__cause__ = caught
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(_settle_future, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                logger.debug("%s: a result came after the event loop was closed", self.name)
            del job, item, future, result, error
        if self._last is not None:
            self._last()


def _settle_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
