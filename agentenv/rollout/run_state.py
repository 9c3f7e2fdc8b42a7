"""Whether a run goes on, who hears when something changes, and the tasks that it has in the background.

Invariants:

* What ends the run is said once, and everybody who waits is woken.
* Every background task is known until it has ended, so that a shutdown can end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentenv.errors import RolloutError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class RunState:
    """Shared by the parts of a run; lives in its event loop."""

    def __init__(self) -> None:
        self.fatal: Exception | None = None
        """Why the run is over; None while it goes on."""
        self.is_stopped = False
        """It is over because the user stopped it, or is being cleaned up."""
        self.background: set[asyncio.Task[Any]] = set()
        """Rewards, slots that settle, aborts, updates: whatever has to end before the run has."""
        self.on_death: list[Callable[[], None]] = []
        """Called when the run is over."""
        self._changed = asyncio.Event()

    def die(self, error: Exception, cause: BaseException | None = None) -> None:
        """The run is over; only the first reason counts.

        Args:
            error: what those who wait get.
            cause: becomes its cause, where it has none.
        """
        if self.fatal is not None:
            return
        if error.__cause__ is None:
            error.__cause__ = cause
        self.fatal = error
        logger.error("the rollout ends: %s", error)
        self._tell()

    def stop(self) -> None:
        """The run is over because it is wanted so."""
        self.is_stopped = True
        if self.fatal is None:
            self.fatal = RolloutError("the rollout was stopped")
        self._tell()

    def wake(self) -> None:
        """Wake everybody who waits now."""
        self._changed.set()
        self._changed.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait until something changes or the time has passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def in_background(
        self, coroutine: Coroutine[Any, Any, _Result], *, handled: bool = False
    ) -> asyncio.Task[_Result]:
        """Start a task.

        Args:
            coroutine: what it runs.
            handled: whoever starts it sees to its exceptions; else one is a bug, which ends the run.
        """
        task = asyncio.create_task(coroutine)
        self.background.add(task)
        task.add_done_callback(self.background.discard if handled else self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.die(RolloutError(f"the rollout hit a bug: {error!r}"), error)

    def _tell(self) -> None:
        for call in self.on_death:
            call()
        self.wake()
