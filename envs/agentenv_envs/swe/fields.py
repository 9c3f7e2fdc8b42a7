"""Typed access to the fields of one row.

Invariants:
- Every error is a `RowError` that names the file, the row and the field, and says what is allowed.
- A path that is let through is relative, stays inside the repository and can't be read as an option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError

__all__ = ["Fields", "RowError"]


_DAY_S = 86_400


class RowError(UsageError):
    """A row that can't become a task.

    Attributes:
        row_name: the row's id, or its place in the file while it has none.
        reason: the message without file and row.
    """

    def __init__(self, source: str, where: str, row_name: str, reason: str) -> None:
        super().__init__(f"{source}: {where}: {reason}")
        self.row_name, self.reason = row_name, reason


class Fields:
    """The fields of a row, by type.

    Args:
        row: the row.
        source: file or data set that it came from.
        where: its place there ("line 3").
    """

    def __init__(self, row: Mapping[str, Any], source: str, where: str) -> None:
        self.row = row
        self.source = source
        self.where = where
        self.row_name = where

    def name_row(self, instance_id: str) -> None:
        """From now on errors name the row by its id."""
        self.where, self.row_name = repr(instance_id), instance_id

    def refused(self, reason: str) -> RowError:
        """An error about the row as a whole."""
        return RowError(self.source, self.where, self.row_name, reason)

    def error(self, field: str, rule: str, value: object) -> RowError:
        """An error about a field's value."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return self.refused(f"field {field!r} {rule}, got {shown}")

    def text(self, field: str, *, default: str | None = None, empty: bool = False) -> str:
        """A string; `default` where the field is missing or null, and an error where that is None too."""
        value = self.row.get(field)
        if value is None:
            if default is not None:
                return default
            raise self.refused(f"field {field!r} is missing")
        if not isinstance(value, str):
            raise self.error(field, "must be a string", value)
        if not empty and not value.strip():
            raise self.error(field, "must not be empty", value)
        if not _encodable(value):
            raise self.error(field, "must be valid Unicode", value)
        return value

    def names(self, field: str) -> tuple[str, ...]:
        """A list of strings, as such or as a JSON string, without repetitions."""
        value = self.row.get(field)
        if value is None:
            raise self.refused(f"field {field!r} is missing")
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.error(field, "must be a list of strings or such a list as JSON", value) from None
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise self.error(field, "must be a list of strings or such a list as JSON", value)
        if not all(map(_encodable, value)):
            raise self.error(field, "must be valid Unicode", value)
        return tuple(dict.fromkeys(value))

    def mapping(self, field: str) -> dict[str, Any]:
        """An object, as such or as a JSON string."""
        value = self.row.get(field)
        if value is None:
            raise self.refused(f"field {field!r} is missing")
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.error(field, "must be an object or an object as JSON", value) from None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self.error(field, "must be an object or an object as JSON", value)
        return dict(value)

    def path(self, field: str) -> str:
        """A path inside the repository."""
        return self.checked_path(field, self.text(field))

    def checked_path(self, field: str, value: str) -> str:
        """The path in its short form; an error that names the field where it leaves the repository."""
        if not is_inside(value):
            raise self.error(field, "must be a path inside the repository", value)
        return value.removeprefix("./").rstrip("/") or "."

    def neighbour(self, field: str) -> str | None:
        """Path of a file that the row names relative to the folder of the rows' file; None where it names none."""
        if self.row.get(field) is None:
            return None
        path = Path(self.source).expanduser().parent / self.path(field)
        if not path.is_file():
            raise self.error(field, "must be a file beside the rows' own", self.row[field])
        return str(path.absolute())

    def seconds(self, field: str, default: float) -> float:
        """A number of seconds above 0, a day at most."""
        value = self.row.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _DAY_S:
            raise self.error(field, f"must be a number of seconds above 0 and at most {_DAY_S}", value)
        return float(value)


def is_inside(path: str) -> bool:
    """Whether a path is relative, stays inside the repository and can't be read as an option by git or pytest."""
    parts = path.split("/")
    if path.startswith(("/", "-")) or ".." in parts or ".git" in parts:
        return False
    return not any(character in path for character in "\n\r\0\\")


def _encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON allows lone surrogates, files and commands don't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
