"""Rows of the SWE-bench schema from mutations, and the file that they are appended to.

Invariants:
- `bug_patch` brings the mutation in and takes the failing tests out; `patch` is the mutation's reverse; `test_patch`
  brings the failing tests back. Applied in this order they give the release again, byte by byte.
- A row is appended whole, in one write; a line that a crash has cut is taken away by the next start.
- Of every mutation that was judged the file beside the rows holds the verdict, so that no start judges it again.
"""

from __future__ import annotations

import ast
import difflib
import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from agentenv.errors import UsageError

__all__ = ["RowFile", "unified_diff", "without_tests"]

SEEN_SUFFIX = ".seen"


def unified_diff(path: str, old: str, new: str) -> str:
    """A diff that `git apply` takes; "" where nothing differs."""
    lines: list[str] = []
    for line in difflib.unified_diff(_split(old), _split(new), f"a/{path}", f"b/{path}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines) if lines else ""


def without_tests(source: str, test_ids: Iterable[str]) -> str:
    """A test file without the functions of some tests; empty where one can't be found in it.

    Args:
        source: the file.
        test_ids: pytest ids of this file.
    """
    wanted = {tuple(test_id.partition("[")[0].split("::")[1:]) for test_id in test_ids}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    lines, found = source.split("\n"), set()
    cuts: list[tuple[int, int, str]] = []

    def visit(body: list[ast.stmt], prefix: tuple[str, ...]) -> None:
        removed = 0
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            name = (*prefix, node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, name)
            elif name in wanted and node.end_lineno is not None:
                found.add(name)
                removed += 1
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                # A body needs a statement.
                rest = f"{' ' * node.col_offset}pass" if removed == len(body) and prefix else ""
                cuts.append((first - 1, node.end_lineno, rest))

    visit(tree.body, ())
    if found != wanted:
        return ""
    for first, last, rest in sorted(cuts, reverse=True):
        lines[first:last] = [rest] if rest else []
    result = "\n".join(lines)
    try:
        ast.parse(result)
    except (SyntaxError, ValueError):
        return ""
    return result


class RowFile:
    """Rows that are appended to a file, and verdicts beside it; a context manager that holds both.

    Args:
        path: the rows' file; made where it is missing.

    Raises:
        UsageError: it can't be written, holds something else than rows, or another run has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen_path = path.with_name(path.name + SEEN_SUFFIX)
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"--output {path}: is a folder, or lies in none that exists")
        try:
            self._seen_file = os.open(self._seen_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(self._seen_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"--output {path}: another run writes to it") from None
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(f"--output {path}: can't be written: {error.strerror or error}") from None
        self.rows = self._read(self._file, path, "instance_id")
        self.verdicts = {
            str(record["key"]): str(record.get("verdict", ""))
            for record in self._read(self._seen_file, self._seen_path, "key")
        }

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        os.close(self._seen_file)

    def count(self, digest: str) -> int:
        """Rows of one release; see `Release.digest`."""
        return sum(_synth_of(row).get("release") == digest for row in self.rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        _write(self._file, row)
        os.fsync(self._file)
        self.rows.append(dict(row))

    def note(self, key: str, verdict: str) -> None:
        """Add a verdict."""
        _write(self._seen_file, {"key": key, "verdict": verdict})
        self.verdicts[key] = verdict

    @staticmethod
    def _read(descriptor: int, path: Path, field: str) -> list[dict[str, Any]]:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        records = []
        for number, line in enumerate(data[:whole].split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or field not in record:
                raise UsageError(f"--output {path}: line {number} is no object with {field!r}")
            records.append(record)
        if whole < len(data):
            _cut_torn_line(descriptor, path, data[whole:], whole)
        return records


def _cut_torn_line(descriptor: int, path: Path, line: bytes, size: int) -> None:
    """Take away what a write that was interrupted has left; a whole last line only lacks its line feed."""
    try:
        json.loads(line)
    except ValueError:
        if not line.startswith(b"{"):
            raise UsageError(f"--output {path}: its last line is no row") from None
        os.ftruncate(descriptor, size)
    else:
        raise UsageError(f"--output {path}: its last line does not end with a line feed")


def _write(descriptor: int, record: Mapping[str, Any]) -> None:
    data = (json.dumps(record, ensure_ascii=True) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _synth_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("synth")
    return found if isinstance(found, dict) else {}


def _split(text: str) -> list[str]:
    """Lines with their line feeds; other characters that Python splits at stay inside."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
