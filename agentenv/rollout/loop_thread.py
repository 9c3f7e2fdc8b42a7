"""An asyncio loop in a thread of its own, with synchronous calls into it.

Invariants:

* A call returns, raises, or notices within half a second that the thread is gone; it never waits for a dead loop.
* A call that is interrupted (KeyboardInterrupt) cancels its coroutine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from agentenv.errors import RolloutError

_Result = TypeVar("_Result")
_HEARTBEAT_S = 0.5


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
    """

    def __init__(self, name: str) -> None:
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
            RolloutError: the loop is gone.
            BaseException: what the coroutine raises.
        """
        if not self.is_running:
            coroutine.close()
            raise RolloutError("the rollout's event loop has ended")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=_HEARTBEAT_S)
                except concurrent.futures.CancelledError:
                    raise RolloutError("the rollout was stopped while a call was waiting") from None
                except TimeoutError:
                    if future.done():
                        return future.result()
                    if not self.is_running:
                        raise RolloutError("the rollout's event loop died while a call was waiting") from None
        finally:
            if not future.done():
                future.cancel()

    def stop(self) -> None:
        """Cancel what is left in the loop and end the thread; idempotent."""
        if self.is_running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
