"""Calibration of rows: does grading tell the gold fix from no fix at all?

A row calibrates if its gold patch earns 1 and the empty patch 0, each time. Rows that don't are not tasks:
their tests do not run here, are not deterministic, or don't depend on the fix.

Invariants:
- Each grade has a sandbox of its own; none is left, however calibration ends.
- A row that can't be judged has None for a score, never 0, and a reason. Where the sandbox failed, the row is
  tried once more, after all others.
- Callbacks run in the caller's thread, one at a time.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agentenv.errors import SandboxError, UsageError

from .data import SWETask
from .grading import Grade, grade
from .sandbox import Sandbox, SandboxBackend, SandboxSpec

__all__ = ["Calibration", "calibrate", "default_workers"]

logger = logging.getLogger(__name__)

STOP_S = 30.0
"""How long work that was called off may take to end; what then still runs is an image build, without a sandbox."""
PARALLEL_REMOVALS = 8


@dataclass(frozen=True)
class Calibration:
    """What calibration found of one row.

    Attributes:
        instance_id: of the row.
        gold: the worst score of the gold patch, 1 or 0; None where it could not be judged.
        noop: the best score of the empty patch, 1 or 0; None where it could not be judged.
        reason: why the row does not calibrate; "" where it does.
    """

    instance_id: str
    gold: int | None
    noop: int | None
    reason: str

    @property
    def calibrates(self) -> bool:
        """Whether the row is a task: the gold patch earns 1, the empty one 0."""
        return self.gold == 1 and self.noop == 0

    @property
    def judged(self) -> bool:
        """Whether this is a verdict on the row; if not, another start may find one."""
        return self.gold is not None and self.noop is not None


def default_workers() -> int:
    """How many rows are calibrated at a time where nobody says: one per processor of this process."""
    return len(os.sched_getaffinity(0))


def calibrate(
    tasks: Sequence[SWETask],
    backend: SandboxBackend,
    *,
    repeats: int = 2,
    workers: int = 1,
    on_step: Callable[[str], None] | None = None,
    on_result: Callable[[Calibration], None] | None = None,
) -> list[Calibration]:
    """Calibrate rows, several at a time.

    Args:
        tasks: the rows.
        backend: where sandboxes come from; the caller closes it.
        repeats: how often each patch is graded.
        workers: how many rows are worked on at a time, each with one sandbox.
        on_step: called with a line of text as work on a row goes on.
        on_result: called with each row's result, in the order in which rows are done.

    Returns:
        One result per row, in the order of the rows.

    Raises:
        UsageError: `repeats` or `workers` is below 1.
    """
    for name, value in (("repeats", repeats), ("workers", workers)):
        if value < 1:
            raise UsageError(f"{name}={value}: at least 1 is needed")
    crew = _Crew(tasks, backend, repeats)
    results: dict[int, Calibration] = {}
    try:
        crew.start(min(workers, len(tasks)))
        while len(results) < len(tasks):
            event = crew.events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, str):
                (on_step or logger.info)(event)
                continue
            number, result = event
            results[number] = result
            if on_result is not None:
                on_result(result)
    finally:
        crew.stop()
    return [results[number] for number in range(len(tasks))]


class _Crew:
    """Threads that work on rows and tell of it in `events`: a step, a row's number and result, or an exception."""

    def __init__(self, tasks: Sequence[SWETask], backend: SandboxBackend, repeats: int) -> None:
        self.events: queue.SimpleQueue[str | tuple[int, Calibration] | BaseException] = queue.SimpleQueue()
        self._waiting = deque((number, task, False) for number, task in enumerate(tasks))
        self._backend = _Leases(backend)
        self._repeats = repeats
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, workers: int) -> None:
        # Daemons: a build that does not end must not keep an interrupted command from ending.
        for number in range(workers):
            thread = threading.Thread(target=self._work, name=f"calibration-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the threads, in the middle of their rows if need be, and give back their sandboxes."""
        self._stopped.set()  # before sandboxes end, so that no row is judged by that
        self._backend.close()
        deadline = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                number, task, is_second_try = self._waiting.popleft()
            except IndexError:
                return
            try:
                result, is_worth_a_retry = _calibrate_row(task, self._backend, self._repeats, self._say)
            except BaseException as error:
                if not self._stopped.is_set():
                    self.events.put(error)
                return
            if self._stopped.is_set():
                return
            if is_worth_a_retry and not is_second_try:
                self._say(f"{task.instance_id}: {result.reason}; once more, after all others")
                self._waiting.append((number, task, True))
            else:
                self.events.put((number, result))

    def _say(self, text: str) -> None:
        if not self._stopped.is_set():
            self.events.put(text)


class _Leases:
    """A back-end whose sandboxes in use can be taken away from the threads that wait for them.

    `close` does that and refuses new ones; the back-end behind it stays open.
    """

    def __init__(self, inner: SandboxBackend) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._in_use: dict[int, Sandbox] = {}
        self._closed = threading.Event()

    @property
    def kind(self) -> str:
        return self._inner.kind

    @property
    def backend(self) -> SandboxBackend:
        """What the images are built with, as `SharedBackend.backend`."""
        inner: SandboxBackend = getattr(self._inner, "backend", self._inner)
        return inner

    def acquire(self, spec: SandboxSpec) -> Sandbox:
        if self._closed.is_set():
            raise SandboxError("the calibration has ended")
        sandbox = self._inner.acquire(spec)
        with self._lock:
            if not self._closed.is_set():
                self._in_use[id(sandbox)] = sandbox
                return sandbox
        self._inner.release(sandbox)
        raise SandboxError("the calibration has ended")

    def release(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._in_use.pop(id(sandbox), None)
        self._inner.release(sandbox)

    def left(self) -> int:
        return self._inner.left()

    def reap(self) -> int:
        return self._inner.reap()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            in_use = list(self._in_use.values())
        if in_use:
            with ThreadPoolExecutor(PARALLEL_REMOVALS, thread_name_prefix="calibration-end") as threads:
                list(threads.map(_close, in_use))


def _close(sandbox: Sandbox) -> None:
    try:
        sandbox.close()
    except (SandboxError, OSError) as error:
        logger.warning("%s", error)


def _calibrate_row(
    task: SWETask, backend: SandboxBackend, repeats: int, say: Callable[[str], None]
) -> tuple[Calibration, bool]:
    """One row's result, and whether another try may find a better one."""
    gold: list[Grade] = []
    noop: list[Grade] = []
    try:
        for number in range(1, repeats + 1):
            for name, patch, grades in (("gold", task.patch, gold), ("no-op", "", noop)):
                say(f"{task.instance_id}: {name} {number} of {repeats}")
                grades.append(grade(task, patch, backend, progress=say))
                if grades[-1].status == "invalid":
                    return _result(task, gold, noop), True
            if gold[-1].status != "resolved" or noop[-1].status != "failed":
                break
    except UsageError as error:  # of this row alone: its recipe is wrong, or its image is not there
        return Calibration(task.instance_id, _worst(gold), _best(noop), str(error)), False
    return _result(task, gold, noop), False


def _result(task: SWETask, gold: list[Grade], noop: list[Grade]) -> Calibration:
    reason = ""
    if gold and gold[-1].status != "resolved":
        reason = f"the gold patch is {gold[-1].status}: {gold[-1].evidence['reason']}"
        if gold[-1].status == "failed" and len(gold) > 1:
            reason = f"not deterministic: after {len(gold) - 1} times 1, {reason}"
    elif noop and noop[-1].status == "resolved":
        reason = "the tests pass without the fix"
        if len(noop) > 1:
            reason = f"not deterministic: after {len(noop) - 1} times 0, {reason}"
    elif noop and noop[-1].status == "invalid":
        reason = f"the empty patch is invalid: {noop[-1].evidence['reason']}"
    return Calibration(task.instance_id, _worst(gold), _best(noop), reason)


def _worst(grades: list[Grade]) -> int | None:
    scores = _scores(grades)
    return min(scores) if scores else None


def _best(grades: list[Grade]) -> int | None:
    scores = _scores(grades)
    return max(scores) if scores else None


def _scores(grades: list[Grade]) -> list[int]:
    """1 or 0 for each grade; none where one of them judged nothing."""
    if any(item.status == "invalid" for item in grades):
        return []
    return [int(item.resolved) for item in grades]
