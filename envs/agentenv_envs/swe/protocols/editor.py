"""`file_editor`: views and edits files of a sandbox from outside; nothing is installed inside.

Invariants:
- an edit is whole or not made, and one that was made can be taken back, the last ones at least;
- `str_replace` edits one place only: text that occurs twice is refused;
- line numbers are those of `cat -n`.
"""

import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

from agentenv_envs.swe.sandbox import Sandbox

from .base import Limits, cut
from .paths import RefusalError, full_path, kind_of, read_text, shell_path, write_text

__all__ = ["FileEditor"]

_KEPT_EDITS: Final = 30
_CONTEXT_LINES: Final = 4
_BEGINS = re.compile(r"\s*(?:@|(?:async\s+)?def\s|class\s)|[A-Za-z_][\w.]*\s*[:=]|(?:import|from)\s")


class FileEditor:
    """The tool, with the edits that it can undo: those of one episode."""

    def __init__(self) -> None:
        # Path, text before (None: there was no file), and the hash of the text after.
        self._edits: deque[tuple[str, str | None, bytes]] = deque(maxlen=_KEPT_EDITS)

    def run(self, arguments: Mapping[str, Any], sandbox: Sandbox, limits: Limits) -> str:
        """Do what arguments that `functions.FILE_EDITOR` has checked say.

        Raises:
            RefusalError: it can't be done; the text says what is allowed.
            SandboxError: the sandbox is gone or does not answer.
        """
        path = full_path(arguments["path"], sandbox)
        command = arguments["command"]
        if command == "view":
            return self._view(path, arguments, sandbox, limits)
        if command == "create":
            return self._create(path, _needed(arguments, "file_text"), sandbox, limits)
        if command == "undo_edit":
            return self._undo(path, sandbox, limits)
        text = read_text(path, sandbox, limits)
        if command == "str_replace":
            new, line, lines = _replaced(
                text, _needed(arguments, "old_str"), arguments.get("new_str", ""), path
            )
        else:
            new, line, lines = _inserted(
                text, _needed(arguments, "insert_line"), _needed(arguments, "new_str"), path
            )
        self._write(path, text, new, sandbox, limits)
        shown = _numbered(new, line - _CONTEXT_LINES, line + lines - 1 + _CONTEXT_LINES)
        return cut(f"{path} is edited. It reads now:\n{shown}", limits.chars)

    def _view(self, path: str, arguments: Mapping[str, Any], sandbox: Sandbox, limits: Limits) -> str:
        if kind_of(path, sandbox, limits) == "folder":
            return _folder(path, sandbox, limits)
        text = read_text(path, sandbox, limits)
        count = len(_lines(text))
        first, last = arguments.get("view_range", (1, -1))
        last = count if last == -1 else min(last, count)
        if "view_range" in arguments and not (1 <= first <= last or (first == 1 and not count)):
            raise RefusalError(
                f"view_range {[first, last]} is not in {path}, which has the lines 1 to {count}"
            )
        shown = _numbered(text, first, last, outline=arguments.get("concise", False))
        return cut(shown or "(no lines)", limits.chars)

    def _create(self, path: str, text: str, sandbox: Sandbox, limits: Limits) -> str:
        kind = kind_of(path, sandbox, limits)
        if kind != "missing":
            raise RefusalError(
                f"{path} exists already; create makes new files only, edit it with str_replace"
            )
        self._write(path, None, text, sandbox, limits)
        return f"{path} is made, {len(_lines(text))} lines."

    def _undo(self, path: str, sandbox: Sandbox, limits: Limits) -> str:
        places = [place for place, edit in enumerate(self._edits) if edit[0] == path]
        if not places:
            raise RefusalError(f"there is no edit of {path} to take back")
        _, before, after = self._edits[places[-1]]
        if _hash(read_text(path, sandbox, limits)) != after:
            raise RefusalError(f"{path} has changed since its last edit by this tool; edit it by hand")
        _put(path, before, sandbox, limits)
        del self._edits[places[-1]]
        return f"The last edit of {path} is taken back{'; the file is gone' if before is None else ''}."

    def _write(self, path: str, before: str | None, after: str, sandbox: Sandbox, limits: Limits) -> None:
        try:
            write_text(path, after, sandbox)
        except RefusalError:
            with suppress(RefusalError):  # a full disk may have taken a part of it
                _put(path, before, sandbox, limits)
            raise
        self._edits.append((path, before, _hash(after)))


def _put(path: str, text: str | None, sandbox: Sandbox, limits: Limits) -> None:
    """Give a file this text; None: remove it."""
    if text is not None:
        write_text(path, text, sandbox)
        return
    word = shell_path(path, sandbox.spec.workdir)
    if sandbox.run(f"rm -f -- {word}", timeout_s=limits.timeout_s).exit_code != 0:
        raise RefusalError(f"{path} can't be removed; use a shell command")


def _needed(arguments: Mapping[str, Any], name: str) -> Any:
    if name not in arguments:
        raise RefusalError(f"{arguments['command']} needs the parameter {name}")
    return arguments[name]


def _replaced(text: str, old: str, new: str, path: str) -> tuple[str, int, int]:
    """The text with its one place of `old` replaced, the first new line's number, and how many new lines."""
    if not old:
        raise RefusalError("old_str is empty; name the text that is to be replaced")
    if old == new:
        raise RefusalError("old_str and new_str are the same; nothing would change")
    count = text.count(old)
    if count == 0:
        ends = "; its lines end with \\r\\n" if "\r\n" in text and "\n" in old else ""
        raise RefusalError(f"old_str is not in {path}, white space included{ends}; view the file first")
    if count > 1:
        places = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(re.escape(old), text)]
        named = ", ".join(map(str, places[:10])) + (", ..." if count > 10 else "")
        raise RefusalError(f"old_str is {count} times in {path}, at lines {named}; add lines around it")
    at = text.index(old)
    return text[:at] + new + text[at + len(old) :], text.count("\n", 0, at) + 1, new.count("\n") + 1


def _inserted(text: str, after: int, new: str, path: str) -> tuple[str, int, int]:
    """As `_replaced`, for new lines after line `after`."""
    count = len(_lines(text))
    if not 0 <= after <= count:
        raise RefusalError(f"insert_line is {after}; {path} allows 0 to {count}")
    lines = text.split("\n")
    added = new.removesuffix("\n").split("\n")
    return "\n".join([*lines[:after], *added, *lines[after:]]), after + 1, len(added)


def _lines(text: str) -> list[str]:
    """Lines as `cat -n` counts them."""
    return text.removesuffix("\n").split("\n") if text else []


def _numbered(text: str, first: int, last: int, *, outline: bool = False) -> str:
    """Lines `first` to `last`, as far as they are there, with their numbers."""
    numbered = list(enumerate(_lines(text), 1))[max(first - 1, 0) : max(last, 0)]
    return "\n".join(
        f"{number:6d}\t{line}" for number, line in numbered if not outline or _BEGINS.match(line)
    )


def _folder(path: str, sandbox: Sandbox, limits: Limits) -> str:
    word = shell_path(path, sandbox.spec.workdir)
    result = sandbox.run(
        f"find {word}/ -mindepth 1 -maxdepth 2 -name '.*' -prune -o -printf '%P%y\\n' | "
        "sed -n -e 's/d$/\\//p' -e t -e 's/.$//p' | LC_ALL=C sort",
        timeout_s=limits.timeout_s,
        half_bytes=max(limits.chars // 2, 1),
    )
    if result.timed_out:
        raise RefusalError(f"{path} takes too long to list; view a smaller folder")
    return result.output.rstrip("\n") or "(an empty folder)"


def _hash(text: str) -> bytes:
    return sha256(text.encode("utf-8", "replace")).digest()
