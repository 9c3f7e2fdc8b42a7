"""The records of a JSON file, one at a time: an array, or an object a line, compressed or not.

Invariants:
- A record comes with the line that it begins on; what is damaged is refused by file and line.
- Of an array, too, only one record at a time is there as Python objects: all of them would be several times the file.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

from agentenv.errors import UsageError

__all__ = ["FILE_KINDS", "kind_of", "read_records"]

FILE_KINDS: Final = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
_NOT_SPACE: Final = re.compile(r"[^ \t\r\n]")
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of half a character, which no text can hold without its other half."""
_MARK: Final = b"\xef\xbb\xbf"


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record begins, such as "line 7", and the record.

    Args:
        path: a file of one of `FILE_KINDS`, in UTF-8.

    Raises:
        UsageError: it can't be read, is damaged, or holds something else than objects.
    """
    if not path.name.endswith(FILE_KINDS):
        raise UsageError(f"{path}: unknown kind of file; allowed: {', '.join(FILE_KINDS)}")
    lines = path.name.removesuffix(".gz").endswith(".jsonl")
    try:
        with _open(path) as file:
            for where, row in _lines(path, file) if lines else _array(path, file.read()):
                if not isinstance(row, dict):
                    raise UsageError(f"{path}: {where}: an object is needed, not {kind_of(row)}")
                yield where, row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path}: damaged gzip: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, raw in enumerate(file, 1):
        text = _text(path, raw, number)
        if text.strip():
            row, end = _decode(path, text, _skip(text, 0), number)
            if _skip(text, end) < len(text):
                raise UsageError(f"{path}: line {number}: no JSON: something stands after the object")
            yield f"line {number}", row


def _array(path: Path, raw: bytes) -> Iterator[tuple[str, Any]]:
    text = _text(path, raw, 1)
    place = _skip(text, 0)
    if text[place : place + 1] != "[":
        raise UsageError(
            f"{path}: line {_line(text, place)}: a JSON array of products is needed; one object a line goes by .jsonl"
        )
    number, line, counted = 0, 1, 0
    place = _skip(text, place + 1)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        where = f"line {line} (record {number})"
        row, place = _decode(path, text, place, 1)
        yield where, row
        number += 1
        place = _skip(text, place)
        mark = text[place : place + 1]
        if mark == ",":
            place = _skip(text, place + 1)
            if text[place : place + 1] == "]":
                raise _no_json(path, text, place, "a record is missing after ','")
        elif mark != "]":
            raise _no_json(path, text, place, f"',' or ']' is missing after {where}")
    place = _skip(text, place + 1)
    if place < len(text):
        raise _no_json(path, text, place, "something stands after the array")


def _decode(path: Path, text: str, place: int, first_line: int) -> tuple[Any, int]:
    """The value at a place, and where it ends; the text begins on `first_line` of the file."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, place)
        if _HALF.search(text, place, end):  # maybe one of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UsageError(f"{path}: line {line}, column {error.colno}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        line = first_line + _line(text, place) - 1
        raise UsageError(f"{path}: line {line}: JSON that can't be read: {error}") from None
    return value, end


def _text(path: Path, raw: bytes, first_line: int) -> str:
    try:
        return raw.removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        raise UsageError(f"{path}: line {line}: not UTF-8") from None


def _no_json(path: Path, text: str, place: int, why: str) -> UsageError:
    return UsageError(f"{path}: line {_line(text, place)}: no JSON: {why}")


def _skip(text: str, place: int) -> int:
    """Past white space."""
    found = _NOT_SPACE.search(text, place)
    return found.start() if found else len(text)


def _line(text: str, place: int) -> int:
    return 1 + text.count("\n", 0, place)
