"""Functions that an agent may call: what each takes, as a JSON schema, as text, and as a check of arguments.

Invariants:
- arguments that pass the check have the types that the schema says; a string that spells one ("12", "true",
  "[1, 20]") counts as it, since XML has nothing but strings and models quote numbers in JSON too;
- a check that fails says what is allowed; it never raises.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from .base import Malformed

__all__ = ["BASH", "EXECUTE_BASH", "FILE_EDITOR", "FINISH", "SEARCH", "SUBMIT", "Function", "Parameter"]

Kind = Literal["string", "integer", "boolean", "range"]
_SHOWN_CHARS = 60
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")


@dataclass(frozen=True)
class Parameter:
    """One argument of a function."""

    name: str
    text: str
    kind: Kind = "string"
    required: bool = False
    choices: tuple[str, ...] = ()
    also: str = ""
    """A second name under which it is understood."""

    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        if self.kind == "range":
            return {"type": "array", "items": {"type": "integer"}, "description": self.text}
        choices = {"enum": list(self.choices)} if self.choices else {}
        return {"type": self.kind, **choices, "description": self.text}

    def read(self, value: object) -> Any:
        """The value in this parameter's type.

        Raises:
            ValueError: it has none; the message says what is allowed.
        """
        if self.kind == "string":
            if not isinstance(value, str):
                raise ValueError("a string is needed")
            # A lone surrogate, as JSON can spell it, is in no file and in no command.
            text = value.encode("utf-8", "replace").decode("utf-8")
            if self.choices and text.strip() not in self.choices:
                raise ValueError(f"allowed are {', '.join(self.choices)}")
            return text.strip() if self.choices else text
        if self.kind == "integer":
            return _integer(value)
        if self.kind == "boolean":
            spelled = value if isinstance(value, bool) else str(value).strip().lower()
            if spelled not in (True, False, "true", "false"):
                raise ValueError("true or false is needed")
            return spelled in (True, "true")
        return _range(value)


@dataclass(frozen=True)
class Function:
    """A function that an agent may call."""

    name: str
    text: str
    parameters: tuple[Parameter, ...] = ()

    def schema(self) -> dict[str, Any]:
        """As chat templates take it in `tools`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.text,
                "parameters": {
                    "type": "object",
                    "properties": {one.name: one.schema() for one in self.parameters},
                    "required": [one.name for one in self.parameters if one.required],
                },
            },
        }

    def describe(self) -> str:
        """As a paragraph for a prompt."""
        lines = [f"{self.name}: {self.text}"]
        for one in self.parameters:
            kind = "array of 2 integers" if one.kind == "range" else one.kind
            lines.append(f"  - {one.name} ({kind}{', required' if one.required else ''}): {one.text}")
        return "\n".join(lines)

    def check(self, arguments: Mapping[str, object]) -> dict[str, Any] | Malformed:
        """Arguments in their types, or what is wrong with them."""
        known = {name: one for one in self.parameters for name in (one.name, one.also) if name}
        checked: dict[str, Any] = {}
        for name, value in arguments.items():
            one = known.get(name)
            if one is None:
                allowed = ", ".join(each.name for each in self.parameters) or "none"
                return Malformed(f"{self.name} has no parameter {_shown(name)}; allowed are: {allowed}")
            if value is None and not one.required:
                continue
            try:
                checked[one.name] = one.read(value)
            except ValueError as error:
                return Malformed(f"{self.name}: {one.name} is {_shown(value)}; {error}")
        missing = [one.name for one in self.parameters if one.required and one.name not in checked]
        if missing:
            return Malformed(f"{self.name} needs the parameter {missing[0]}")
        return checked


def _integer(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**9:
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    raise ValueError("a whole number is needed")


def _range(value: object) -> tuple[int, int]:
    if isinstance(value, str):
        value = re.split(r"\s*,\s*", value.strip().strip("[]()").strip())
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two line numbers are needed, such as [1, 40]; -1 is the last line")
    return _integer(value[0]), _integer(value[1])


def _shown(value: object) -> str:
    """A value in a message: short, and one line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


BASH: Final = Function(
    "bash",
    "Run a command with bash in the repository's folder. Each command has a shell of its own and no input.",
    (Parameter("command", "The command; it may have several lines.", required=True),),
)

SUBMIT: Final = Function("submit", "Say that the bug is gone: the work is graded and the episode ends.")

FILE_EDITOR: Final = Function(
    "file_editor",
    "View, create and edit text files. Paths are absolute or relative to the repository.",
    (
        Parameter(
            "command",
            "view: a file with line numbers, or a folder two levels deep. create: a new file, no existing one. "
            "str_replace: the one place of old_str by new_str. insert: new_str after a line. "
            "undo_edit: take back the last edit of this tool in a file.",
            required=True,
            choices=("view", "create", "str_replace", "insert", "undo_edit"),
        ),
        Parameter("path", "The file, or for view also a folder.", required=True),
        Parameter("file_text", "create: the whole content."),
        Parameter("old_str", "str_replace: text that is in the file exactly once, white space included."),
        Parameter(
            "new_str", "str_replace: what takes its place, nothing if left out. insert: the new lines."
        ),
        Parameter("insert_line", "insert: after which line; 0 is the top.", kind="integer"),
        Parameter("view_range", "view: first and last line, such as [1, 40]; -1 is the end.", kind="range"),
        Parameter("concise", "view: only the lines that begin a class, function or name.", kind="boolean"),
    ),
)

EXECUTE_BASH: Final = Function(
    "execute_bash",
    BASH.text,
    (Parameter("cmd", "The command; it may have several lines.", required=True, also="command"),),
)

SEARCH: Final = Function(
    "search",
    "Find a text, taken literally. In a folder: the files that hold it, hidden ones left out, with the number of "
    "lines. In a file: its lines that hold it, with their numbers.",
    (
        Parameter("search_term", "The text, within one line.", required=True),
        Parameter("path", "Folder or file; the repository if left out."),
    ),
)

FINISH: Final = Function(
    "finish",
    SUBMIT.text,
    (
        Parameter("command", "submit.", required=True, choices=("submit",)),
        Parameter("result", "A closing remark; it is not graded."),
    ),
)
