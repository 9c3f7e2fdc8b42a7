"""Cancels a coroutine at its k-th suspension, for every k until it completes untouched.

Three moments are tried: as soon as the coroutine is suspended ("early"); when what it waits for is done but it has not
gone on yet ("late"), where hand-written waits lose results or swallow the cancellation; and before the loop's k-th
iteration ("tick"), which meets the awaits of everything that the coroutine has started and waits for.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, get_args

When = Literal["early", "late", "tick"]
_MOST_SUSPENSIONS = 1_000


class _Stepper(Coroutine[Any, Any, Any]):
    """A coroutine that counts its suspensions and has its task cancelled at one of them."""

    def __init__(self, inner: Coroutine[Any, Any, Any], at: int, when: When) -> None:
        self._inner = inner
        self._at = at
        self._when = when
        self._suspensions = 0
        self.task: asyncio.Task[Any] | None = None
        self.was_reached = False

    def send(self, value: Any) -> Any:
        return self._suspended(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._suspended(self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        raise TypeError("only for create_task")

    def _suspended(self, waits_for: Any) -> Any:
        self._suspensions += 1
        if self._suspensions == self._at and self._when != "tick":
            assert self.task is not None
            self.was_reached = True
            if self._when == "late" and waits_for is not None:
                # Before the task's own callback: it is cancelled with the wake-up already on its way.
                waits_for.add_done_callback(self._cancel)
            else:
                asyncio.get_running_loop().call_soon(self.task.cancel)
        return waits_for

    def _cancel(self, _: Any) -> None:
        assert self.task is not None
        self.task.cancel()


class Cancelling:
    """One cancellation; handed to a scenario, which calls :meth:`run` once."""

    def __init__(self, at: int, when: When) -> None:
        self._at = at
        self._when = when
        self.was_reached = False
        """The coroutine was suspended that often."""

    def __repr__(self) -> str:
        return f"cancelled at suspension {self._at}, {self._when}"

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> bool:
        """Run the coroutine and cancel it; returns whether it was cancelled. What else it raises comes out."""
        stepper = _Stepper(coroutine, self._at, self._when)
        task = stepper.task = asyncio.create_task(stepper)
        if self._when == "tick":
            _cancel_at_iteration(stepper, task, self._at)
        await asyncio.wait({task})
        self.was_reached = stepper.was_reached
        if task.cancelled():
            assert self.was_reached, "cancelled by somebody else"
            return True
        task.result()
        # A cancellation that comes with the last wake-up finds a task that may complete all the same.
        assert not self.was_reached or self._when != "early", "the cancellation was swallowed"
        return False


def _cancel_at_iteration(stepper: _Stepper, task: asyncio.Task[Any], at: int) -> None:
    """Cancel the task before the loop's ``at``-th iteration from now on."""
    loop: Any = asyncio.get_running_loop()
    run_once = loop._run_once
    left = at

    def counting() -> None:
        nonlocal left
        left -= 1
        if task.done() or left < 0:
            loop._run_once = run_once
        elif left == 0:
            stepper.was_reached = True
            task.cancel()
        run_once()

    loop._run_once = counting


Scenario = Callable[[Cancelling], Awaitable[None]]
RunLoop = Callable[[Coroutine[Any, Any, None]], None]


def cancel_everywhere(
    scenario: Scenario, run_loop: RunLoop, *, least: int = 1, moments: Sequence[When] = get_args(When)
) -> int:
    """Play a scenario anew for every suspension of the coroutine that it hands to :meth:`Cancelling.run`.

    Args:
        scenario: makes its objects, runs the coroutine, checks, uses the objects again and ends them.
        run_loop: runs a coroutine in a new event loop.
        least: cancellations that there must be, lest the scenario tests nothing.
        moments: to try.

    Returns:
        how many cancellations there were.
    """
    reports: list[dict[str, Any]] = []
    cancelled = 0
    for when in moments:
        for at in itertools.count(1):
            assert at < _MOST_SUSPENSIONS, "the coroutine never completes"
            cancelling = Cancelling(at, when)
            try:
                run_loop(_observed(scenario, cancelling, reports))
            except BaseException as error:
                error.add_note(repr(cancelling))
                raise
            assert not reports, f"{cancelling}: the loop was told of {reports}"
            if not cancelling.was_reached:
                break
            cancelled += 1
    # What was dropped in a cycle of references reports now: exceptions never retrieved, coroutines never awaited.
    gc.collect()
    assert not reports, f"the loop was told of {reports}"
    assert cancelled >= least, f"only {cancelled} cancellations, expected at least {least}"
    return cancelled


async def _observed(scenario: Scenario, cancelling: Cancelling, reports: list[dict[str, Any]]) -> None:
    """Note what is reported to the loop; no task may be left."""
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    await scenario(cancelling)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks were left: {left}"
