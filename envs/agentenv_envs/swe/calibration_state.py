"""The state of a calibration: results of finished rows, from which a second start goes on.

A file of JSON lines. Each is the verdict on one row, with a hash of all that it depends on: the row, the kind of
sandbox and the version of agentenv. A row that has changed is another row.

Invariants:
- Only verdicts are kept; a row that could not be judged is tried again by the next start.
- A line is on disk before the next row's result is taken. A last line that a killed process left torn is dropped;
  any other text that is no state is an error, and the file stays as it is.
- One process at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import agentenv
from agentenv.errors import UsageError

from .calibrate import Calibration
from .data import SWETask

__all__ = ["CalibrationState", "row_hash"]

_START = b'{"row": "'


@dataclass(frozen=True)
class _Entry:
    repeats: int
    result: Calibration


class CalibrationState:
    """An open state file, made where it is missing; a context manager.

    Args:
        path: of the file.
        tasks: the rows; the file may hold results of others, too.
        repeats: how often each patch is graded; a result with fewer does not count.
        sandbox: kind of sandbox.

    Raises:
        UsageError: the file can't be opened, is no state, or is in use.
    """

    def __init__(self, path: Path, tasks: Sequence[SWETask], *, repeats: int, sandbox: str) -> None:
        self._path = path
        self._repeats = repeats
        self._hashes = {task.instance_id: row_hash(task, sandbox) for task in tasks}
        self._file = _open(path)
        try:
            self._entries = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CalibrationState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, task: SWETask) -> Calibration | None:
        """The verdict on a row that an earlier start found; None where it has yet to be found."""
        entry = self._entries.get(self._hashes[task.instance_id])
        if entry is None:
            return None
        # One 0 of the gold patch settles it, however often it was graded; a row that calibrates was graded enough.
        return entry.result if entry.repeats >= self._repeats or not entry.result.calibrates else None

    def add(self, result: Calibration) -> None:
        """Keep a row's result, where it is a verdict.

        Raises:
            UsageError: the file can't be written.
        """
        if not result.judged:
            return
        line = {
            "row": self._hashes[result.instance_id],
            "instance_id": result.instance_id,
            "repeats": self._repeats,
            "gold": result.gold,
            "noop": result.noop,
            "reason": result.reason,
        }
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UsageError(f"{self._path}: can't be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Close the file and let others use it."""
        self._file.close()

    def _read(self) -> dict[str, _Entry]:
        """Results by hash of the row; the newest of a row counts."""
        *lines, tail = self._file.read().split(b"\n")
        entries = {}
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line)
                result = Calibration(item["instance_id"], item["gold"], item["noop"], item["reason"])
                if not all(type(score) is int and score in (0, 1) for score in (result.gold, result.noop)):
                    raise ValueError("a score is neither 0 nor 1")
                entries[str(item["row"])] = _Entry(int(item["repeats"]), result)
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UsageError(
                    f"{self._path}: line {number} is not one of a state of `swe calibrate`; "
                    "name another file, or delete this one"
                ) from None
        if tail:
            if not (tail.startswith(_START) or _START.startswith(tail)):
                raise UsageError(f"{self._path}: is not a state of `swe calibrate`; name another file")
            self._file.truncate(sum(len(line) + 1 for line in lines))
        return entries


def row_hash(task: SWETask, sandbox: str) -> str:
    """Hash of all that a row's verdict depends on, but for how often patches are graded."""
    content = json.dumps(
        [agentenv.__version__, sandbox, _plain(task)], sort_keys=True, separators=(",", ":"), default=_plain
    )
    return hashlib.sha256(content.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """What JSON can hold of a row's field."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no place in a row")


def _open(path: Path) -> BinaryIO:
    try:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file releases it
        except BlockingIOError:
            file.close()
            raise UsageError(f"{path}: another calibration is using it") from None
        file.seek(0)
    except OSError as error:
        raise UsageError(f"{path}: can't be opened: {error.strerror or error}") from None
    return file
