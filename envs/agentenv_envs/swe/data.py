"""Rows of software-engineering tasks: read from a file or from the hub, and brought to one record.

Which data sets there are, and what is read of their rows: `schemas`, and the table in docs/environments-swe.md.

Invariants:
- A row is accepted whole or refused (`schemas.parse_task`). A refusal names the file, the row (its id, or its line
  while it has none) and the field; no row is left out in silence.
- Ids are unique in a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

from .fields import RowError
from .schemas import image_name_of, parse_task
from .task import RefusedRow, SWETask

__all__ = ["RefusedRow", "SWETask", "image_name_of", "load_tasks", "parse_task"]

_FILE_KINDS = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_tasks(
    source: str | Path, split: str | None = None, *, refused: list[RefusedRow] | None = None
) -> list[SWETask]:
    """Read every row of a file or of a hub data set.

    Args:
        source: path of a .jsonl, .json (an array of rows) or .parquet file, or a hub name "owner/name".
        split: split of a hub data set, by default "test", or the only one that there is. Rows of a local file are
            chosen by their field `split` where they have one; a row without it belongs to every split.
        refused: gets an entry for each row that can't be a task, and the others are returned; without it the
            first such row is an error.

    Returns:
        The tasks in the file's order; at least one.

    Raises:
        UsageError: no such file, one that can't be read as rows, no rows, a broken row (see `refused`), none
            that is not broken, or a data set that can't be loaded.
        MissingExtraError: Parquet or a hub name without `pyarrow` or `datasets`.
    """
    name = str(source)
    path = Path(source).expanduser()
    rows: Iterable[tuple[str, Any]]
    if path.is_file():
        if path.suffix not in _FILE_KINDS:
            raise UsageError(
                f"{name}: unknown kind of file {path.suffix!r}; allowed: {', '.join(_FILE_KINDS)}"
            )
        rows = _local_rows(path)
        if split is not None:
            rows = (
                (where, row)
                for where, row in rows
                if not isinstance(row, dict) or row.get("split", split) == split
            )
    elif path.is_dir():
        raise UsageError(
            f"{name}: is a directory; give one file ({', '.join(_FILE_KINDS)}) or a hub name owner/name"
        )
    elif path.suffix in _FILE_KINDS or not _HUB_NAME.fullmatch(name):
        raise UsageError(f"{name}: no such file")
    else:
        rows = _hub_rows(name, split)
    tasks: list[SWETask] = []
    seen: dict[str, str] = {}
    first: RowError | None = None
    for where, row in rows:
        try:
            task = parse_task(row, source=name, where=where)
            if task.instance_id in seen:
                reason = f"instance_id {task.instance_id!r} is there already ({seen[task.instance_id]})"
                raise RowError(name, where, task.instance_id, reason)
        except RowError as error:
            if refused is None:
                raise
            refused.append(RefusedRow(error.row_name, error.reason))
            first = first or error
            continue
        seen[task.instance_id] = where
        tasks.append(task)
    if not tasks and first is not None:
        raise UsageError(f"{name}: no row can be a task; the first: {first.row_name}: {first.reason}")
    if not tasks:
        raise UsageError(f"{name}: holds no rows" + (f" of split {split!r}" if split is not None else ""))
    return tasks


def _local_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read as UTF-8 text: {error}") from None
    if path.suffix == ".json":
        rows = _decode(text, f"{path}")
        if not isinstance(rows, list):
            raise UsageError(f"{path}: must hold an array of rows, got {type(rows).__name__}")
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    # Only line feeds end a row: JSON strings may hold U+2028 and other characters that str.splitlines
    # breaks at.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _decode(line, f"{path}: line {number}")


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of more digits than Python reads
        raise UsageError(f"{where}: is not JSON: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: can't be read as Parquet: {error}") from None
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _hub_rows(name: str, split: str | None) -> Iterable[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "train") from None
    chosen, splits = split or "test", []
    # The hub's client raises errors of many libraries (HTTP, files, its own); to the user all are one.
    try:
        if split is None:
            splits = list(datasets.get_dataset_split_names(name))
            if len(splits) == 1:
                chosen = splits[0]
        rows = datasets.load_dataset(name, split=chosen)
    except Exception as error:
        there = f"; there are: {', '.join(splits)}" if splits else ""
        raise UsageError(
            f"{name}: split {chosen!r} can't be loaded from the hub: {type(error).__name__}: {error}{there}"
        ) from error
    return ((f"row {number}", dict(row)) for number, row in enumerate(rows, 1))
