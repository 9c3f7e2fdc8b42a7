"""An asyncio loop whose time is virtual: when nothing is ready it jumps to the next timer.

Time moves only inside :meth:`VirtualLoop.call`, in the caller's own thread. A caller that is busy for a while says so
with ``runner.call(asyncio.sleep(seconds))``, and everything else in the loop goes on during that time.

Invariants:

* The same coroutines give the same order of events and the same times, whatever the machine does meanwhile: no file is
  looked at and no thread is started; what is handed to an executor runs at once, in the loop, and takes no time.
* Time never goes back, and a timer is run at its own time.
* Where nothing is ready and no timer is left, nobody could ever be woken: :class:`~agentenv.errors.RolloutError` names
  the time and the tasks that wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentenv.errors import RolloutError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_CLOCK_RESOLUTION_S = 1e-9
_MOST_TASKS_NAMED = 8


class VirtualLoop:
    """Implements :class:`~agentenv.rollout.loop_thread.LoopRunner` with virtual time, which starts at 0 s."""

    def __init__(self) -> None:
        self._loop = _JumpingLoop()

    @property
    def is_running(self) -> bool:
        """Calls can be made."""
        return not self._loop.is_closed()

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._loop.time()

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end, and everything else in the loop as far as its time goes.

        Raises:
            RolloutError: stopped already, or the simulation is deadlocked.
            BaseException: what the coroutine raises.
        """
        if not self.is_running:
            coroutine.close()
            raise RolloutError("the virtual loop has ended")
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise RolloutError("a simulated call was cancelled from inside the loop") from None
        finally:
            if not task.done():
                task.cancel()
                self._finish([task])

    def stop(self) -> None:
        """Cancel what is left in the loop and close it; idempotent."""
        if not self.is_running:
            return
        try:
            left = list(asyncio.all_tasks(self._loop))
            for task in left:
                task.cancel()
            self._finish(left)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _finish(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Run cancelled tasks to their ends."""
        if not tasks:
            return
        try:
            self._loop.run_until_complete(asyncio.wait(tasks))
        except RolloutError as error:
            logger.warning("cancelled tasks did not end: %s", error)


class _JumpingLoop(asyncio.SelectorEventLoop):
    """Where the base class would sleep for the next timer, its selector sets the clock forward."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_JumpingSelector(self._jump))
        self._clock_resolution = _CLOCK_RESOLUTION_S

    def time(self) -> float:
        return self._virtual_now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the function here and now: a thread would make the order of events a matter of luck."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _jump(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise RolloutError(self._describe_deadlock())
        self._virtual_now += timeout_s
        # The sum may miss the timer by a rounding error, which grows with the time.
        self._clock_resolution = max(_CLOCK_RESOLUTION_S, 4.0 * math.ulp(self._virtual_now))

    def _describe_deadlock(self) -> str:
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        names = ", ".join(waiting[:_MOST_TASKS_NAMED]) + (" ..." if len(waiting) > _MOST_TASKS_NAMED else "")
        return (
            f"the simulation is deadlocked at {self._virtual_now:g} s: nothing is ready, no timer is left, and "
            f"{len(waiting)} tasks wait ({names})"
        )


class _JumpingSelector(selectors.DefaultSelector):
    """Never looks at a file: in a simulation nothing comes from outside."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0.0:
            self._jump(timeout)
        return []
