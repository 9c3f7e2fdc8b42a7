"""An asyncio loop in a thread of its own, with synchronous calls into it.

Invariants:

* A call returns, raises, or notices within half a second that the thread is gone; it never waits for a dead loop, nor
  without end for one that something blocks.
* A call that is interrupted (KeyboardInterrupt) cancels its coroutine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from agentenv.errors import RolloutError

_Result = TypeVar("_Result")
_HEARTBEAT_S = 0.5

logger = logging.getLogger(__name__)


class LoopRunner(Protocol):
    """Runs an event loop for callers that are outside of it."""

    @property
    def is_running(self) -> bool:
        """Calls can be made."""
        ...

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and wait for its result."""
        ...

    def stop(self) -> None:
        """Cancel what is left in the loop and end it; idempotent."""
        ...


class LoopThread:
    """Starts at once; :meth:`stop` ends it.

    Args:
        name: of the thread.
        unresponsive_s: how long the loop may be blocked before calls give it up.
    """

    def __init__(self, name: str, *, unresponsive_s: float = 120.0) -> None:
        self._unresponsive_s = unresponsive_s
        self._blocked = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """The thread lives."""
        return self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and wait for its result.

        Raises:
            RolloutError: the loop is gone or blocked.
            BaseException: what the coroutine raises.
        """
        if not self.is_running:
            coroutine.close()
            raise RolloutError("the rollout's event loop has ended")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RolloutError(
                "the rollout was called from inside its own event loop, which would wait for itself"
            )
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise RolloutError("the rollout's event loop has ended") from None
        pulse = _Pulse(self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=_HEARTBEAT_S)
                except concurrent.futures.CancelledError:
                    raise RolloutError("the rollout was stopped while a call was waiting") from None
                except TimeoutError:
                    if future.done():
                        return future.result()
                    if not self._thread.is_alive():
                        # It may have been handed over to a loop that stopped before it began.
                        coroutine.close()
                        raise RolloutError("the rollout's event loop died while a call was waiting") from None
                    if pulse.missing_s() > self._unresponsive_s:
                        self._blocked = True
                        raise RolloutError(
                            f"the rollout's event loop did not respond for {self._unresponsive_s:g} s: something "
                            'blocks it, such as an environment that waits or computes for long with worker="inline"'
                        ) from None
        finally:
            if not future.done() and self._thread.is_alive():
                future.cancel()

    def stop(self) -> None:
        """Cancel what is left in the loop and end the thread; idempotent."""
        if self.is_running:
            with contextlib.suppress(RuntimeError):  # the loop has closed, its thread is about to end
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_HEARTBEAT_S if self._blocked else self._unresponsive_s)
            if self._thread.is_alive():
                logger.warning("thread %s is blocked and was left behind", self._thread.name)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                # A task that swallows its cancellation is left behind.
                self._loop.run_until_complete(asyncio.wait(left, timeout=_HEARTBEAT_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


class _Pulse:
    """Asks a loop for a sign of life, again and again.

    It counts the caller's own heartbeats and looks at no clock: where the whole process stood still, the loop is not to
    blame.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked = False
        self._beats = 0

    def missing_s(self) -> float:
        """At each heartbeat: seconds for which the sign that was asked for has not come; asks anew where it came."""
        if self._asked:
            self._beats += 1
        else:
            self._asked, self._beats = True, 0
            with contextlib.suppress(RuntimeError):  # the loop closes just now, which the caller sees next
                self._loop.call_soon_threadsafe(self._felt)
        return self._beats * _HEARTBEAT_S

    def _felt(self) -> None:
        self._asked = False
