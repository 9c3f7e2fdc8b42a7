"""JSON, JSONL and text files of a run directory: replaced as a whole, read while they are being written.

Invariants:
- A file is replaced atomically: readers see the old content or the new, never a part.
- A last line torn by a crash, or not written whole yet, is not seen by readers.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor of a file to read; never one that could block, such as a named pipe.

    Raises:
        FileNotFoundError: there is no such regular file, or it can't be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileNotFoundError(str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{path}: not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UsageError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "; name the output directory of a run" if path.name == "run.json" else ""
        raise UsageError(f"{path}: no such file{hint}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file; none where the file is missing. A torn last line is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise UsageError(f"{path}: a line is not valid JSON: {line[:80]!r}") from None
                return
            yield value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically: readers see the old content or the new, never a part."""
    write_text(path, json.dumps(value, indent=2, default=str, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    replace_lines(path, [text])


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a text file atomically by lines, each with its end."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
