"""Rows of a data set: from a file of this machine, or from the hub.

Invariants:
- each row comes with its place ("line 3", "row 3"), so that whoever refuses it can say where it stands;
- what can't be read is one `UsageError` that names the file and, where there is one, the line;
- nothing is fetched unless the source is a hub name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from agentenv.errors import MissingExtraError, UsageError

__all__ = ["FILE_KINDS", "read_rows"]

FILE_KINDS: Final = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_rows(
    source: str | Path, split: str | None = None, *, config: str | None = None
) -> Iterable[tuple[str, Any]]:
    """Rows with their places, in the order of the file.

    Args:
        source: path of a .jsonl, .json (an array of rows) or .parquet file, or a hub name "owner/name".
        split: split of a hub data set, by default "test", or the only one that there is. Rows of a local file are
            chosen by their field `split` where they have one; a row without it belongs to every split.
        config: configuration of a hub data set that has several.

    Raises:
        UsageError: no such file, one that can't be read as rows, or a data set that can't be loaded; of a file's
            lines when they are reached.
        MissingExtraError: Parquet or a hub name without `pyarrow` or `datasets`.
    """
    name = str(source)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in FILE_KINDS:
            raise UsageError(
                f"{name}: unknown kind of file {path.suffix!r}; allowed: {', '.join(FILE_KINDS)}"
            )
        rows = _local_rows(path)
        if split is None:
            return rows
        return (
            (where, row)
            for where, row in rows
            if not isinstance(row, dict) or row.get("split", split) == split
        )
    if path.is_dir():
        raise UsageError(
            f"{name}: is a directory; give one file ({', '.join(FILE_KINDS)}) or a hub name owner/name"
        )
    if path.suffix in FILE_KINDS or not _HUB_NAME.fullmatch(name):
        raise UsageError(f"{name}: no such file")
    return _hub_rows(name, split, config)


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


def _hub_rows(name: str, split: str | None, config: str | None) -> Iterable[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "train") from None
    chosen, splits = split or "test", []
    which = (name,) if config is None else (name, config)
    # The hub's client raises errors of many libraries (HTTP, files, its own); to the user all are one.
    try:
        if split is None:
            splits = list(datasets.get_dataset_split_names(*which))
            if len(splits) == 1:
                chosen = splits[0]
        rows = datasets.load_dataset(*which, split=chosen)
    except Exception as error:
        there = f"; there are: {', '.join(splits)}" if splits else ""
        raise UsageError(
            f"{name}: split {chosen!r} can't be loaded from the hub: {type(error).__name__}: {error}{there}"
        ) from error
    return ((f"row {number}", dict(row)) for number, row in enumerate(rows, 1))
