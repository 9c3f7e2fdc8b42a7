"""Calibration of rows: does grading tell the gold fix from no fix at all?

A row calibrates if its gold patch earns 1 and the empty patch 0, each time. Rows that don't are not tasks:
their tests do not run here, are not deterministic, or don't depend on the fix.

Invariants:
- Each grade has a sandbox of its own; none is left, however calibration ends.
- A row that can't be judged has None for a score, never 0, and a reason.
- The report appears whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.errors import UsageError

from .data import SWETask
from .grading import Grade, grade
from .sandbox import SandboxBackend

__all__ = ["Calibration", "calibrate", "calibrate_task", "write_report"]

logger = logging.getLogger(__name__)


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


def calibrate(
    tasks: Sequence[SWETask],
    backend: SandboxBackend,
    *,
    repeats: int = 2,
    on_step: Callable[[str], None] | None = None,
    on_result: Callable[[Calibration], None] | None = None,
) -> list[Calibration]:
    """Calibrate rows one after the other.

    Args:
        tasks: the rows.
        backend: where sandboxes come from.
        repeats: how often each patch is graded.
        on_step: called with a line of text as work on a row goes on.
        on_result: called with each row's result.

    Returns:
        One result per row, in their order.

    Raises:
        UsageError: `repeats` is below 1.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: at least 1 is needed")
    results = []
    for task in tasks:
        result = calibrate_task(task, backend, repeats=repeats, on_step=on_step)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def calibrate_task(
    task: SWETask, backend: SandboxBackend, *, repeats: int = 2, on_step: Callable[[str], None] | None = None
) -> Calibration:
    """Calibrate one row; see `calibrate`."""
    say = on_step or logger.info
    gold: list[Grade] = []
    noop: list[Grade] = []
    try:
        for number in range(1, repeats + 1):
            for name, patch, grades in (("gold", task.patch, gold), ("no-op", "", noop)):
                say(f"{task.instance_id}: {name} {number} of {repeats}")
                grades.append(grade(task, patch, backend, progress=say))
                if grades[-1].status == "invalid":  # what can't be judged is not tried again
                    return _result(task, gold, noop)
            if gold[-1].status != "resolved" or noop[-1].status != "failed":
                break
    except UsageError as error:  # of this row alone: its recipe is wrong, or its image is not there
        return Calibration(task.instance_id, _worst(gold), _best(noop), str(error))
    return _result(task, gold, noop)


def write_report(path: Path, results: Iterable[Calibration]) -> None:
    """Write results as a JSON list of {"instance_id", "gold", "noop", "reason"}; the file is replaced at
    once.

    Raises:
        UsageError: the file can't be written.
    """
    text = json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False) + "\n"
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"{path}: can't be written: {error.strerror or error}") from None


def _result(task: SWETask, gold: list[Grade], noop: list[Grade]) -> Calibration:
    reason = ""
    if gold and gold[-1].status != "resolved":
        reason = f"the gold patch is {gold[-1].status}: {gold[-1].evidence['reason']}"
    elif noop and noop[-1].status == "resolved":
        reason = "the tests pass without the fix"
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
