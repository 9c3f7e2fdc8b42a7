"""Rows of software-engineering tasks: read from a file or from the hub, and brought to one record.

Which data sets there are, and what is read of their rows: `schemas`, and the table in docs/environments-swe.md.

Invariants:
- A row is accepted whole or refused (`schemas.parse_task`). A refusal names the file, the row (its id, or its line
  while it has none) and the field; no row is left out in silence.
- Ids are unique in a file.
"""

from __future__ import annotations

from pathlib import Path

from agentenv.errors import UsageError
from agentenv_envs.rows import read_rows

from .fields import RowError
from .schemas import image_name_of, parse_task
from .task import RefusedRow, SWETask

__all__ = ["RefusedRow", "SWETask", "image_name_of", "load_tasks", "parse_task"]


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
    rows = read_rows(source, split)
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
