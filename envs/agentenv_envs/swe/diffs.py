"""Unified diffs as text: which paths they name, turned around, and put together from a parsed commit.

Invariants:
- Pure functions; what can't be turned around or put together is a `ValueError` that says why.
- A turned diff applies where the diff itself was applied, and gives back what was there before.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["commit_diff", "diff_paths", "file_diff", "reverse_diff", "shortened"]

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.DOTALL)
_DIFF = re.compile(r"diff --git a/(.*) b/(.*)", re.DOTALL)
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)", re.DOTALL)
_TURNED_PREFIXES = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}
# Header lines that stand in this order, one right after the other.
_PAIRS = (("--- ", "+++ "), ("old mode ", "new mode "), ("rename from ", "rename to "))
_TEST_FOLDERS = ("test", "tests", "Test", "Tests")


def diff_paths(diff: str) -> tuple[str, ...]:
    """The new path of each file that a diff names, in its order; of a deleted file the old one."""
    return tuple(dict.fromkeys(match[1] for match in re.finditer(r"(?m)^diff --git a/.* b/(.*)$", diff)))


def file_diff(path: str, before: str, after: str) -> str:
    """The diff of one text file; empty where nothing changed. For reading: a missing last line end is not marked."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{path}", f"b/{path}", lineterm=""
    )
    text = "\n".join(lines)
    return f"diff --git a/{path} b/{path}\n{text}\n" if text else ""


def shortened(diff: str, max_chars: int) -> str:
    """A diff to be read; of a longer one the start, and a last line that says so."""
    if len(diff) <= max_chars:
        return diff
    return f"{diff[:max_chars]}\n[{len(diff) - max_chars} more characters]\n"


def reverse_diff(diff: str) -> str:
    """The diff that undoes a diff.

    Raises:
        ValueError: it is a copy or has binary content, or isn't a diff.
    """
    if not diff_paths(diff):
        raise ValueError("is not a git diff")
    turned: list[str] = []
    old_left = new_left = 0  # lines of the current hunk that are still to come
    in_header = False
    for line in diff.split("\n"):
        if old_left > 0 or new_left > 0:
            mark = line[:1]
            old_left -= mark not in ("+", "\\")
            new_left -= mark not in ("-", "\\")
            turned.append({"+": "-", "-": "+"}.get(mark, mark) + line[1:])
            in_header = False
        elif match := _HUNK.fullmatch(line):
            old_left, new_left = _length(match[1]), _length(match[2])
            turned.append(f"@@ -{match[2]} +{match[1]} @@{match[3]}")
            in_header = False
        else:
            if line.startswith(("GIT binary patch", "Binary files ", "copy from ")):
                raise ValueError("has a file that is binary or copied, which can't be turned around")
            turned.append(_turned_header(line))
            if in_header and any(turned[-2].startswith(b) and turned[-1].startswith(a) for a, b in _PAIRS):
                turned[-2:] = reversed(turned[-2:])
            in_header = True
    return "\n".join(turned)


def _turned_header(line: str) -> str:
    if match := _DIFF.fullmatch(line):
        return f"diff --git a/{match[2]} b/{match[1]}"
    if match := _INDEX.fullmatch(line):
        return f"index {match[2]}..{match[1]}{match[3]}"
    if line.startswith("--- "):
        return "+++ " + re.sub(r"^a/", "b/", line[4:])
    if line.startswith("+++ "):
        return "--- " + re.sub(r"^b/", "a/", line[4:])
    for prefix, other in _TURNED_PREFIXES.items():
        if line.startswith(prefix):
            return other + line[len(prefix) :]
    return line


def _length(span: str) -> int:
    return int(span.partition(",")[2] or 1)


def commit_diff(commit: Mapping[str, Any]) -> str:
    """The part of a parsed commit that is neither tests nor other than Python: R2E-Gym's gold fix.

    Args:
        commit: R2E-Gym's `parsed_commit_content`, decoded.

    Raises:
        ValueError: a field is missing or of a wrong type.
    """
    try:
        return "".join(
            _file_diff(item) for item in commit["file_diffs"] if _is_code(item["header"]["file"]["path"])
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"has not the form of a parsed commit: {type(error).__name__}: {error}") from None


def _is_code(path: str) -> bool:
    *folders, name = path.split("/")
    is_test = (
        name.startswith("test_") or name.endswith("_test.py") or any(f in _TEST_FOLDERS for f in folders)
    )
    return name.endswith(".py") and not is_test


def _file_diff(item: Mapping[str, Any]) -> str:
    path = item["header"]["file"]["path"]
    lines = [f"diff --git a/{path} b/{path}"]
    if item["header"].get("misc_line"):
        lines.append(item["header"]["misc_line"])
    if index := item.get("index_line"):
        mode = f" {index['mode']}" if index["mode"] else ""
        lines.append(f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}")
    if item.get("is_binary_file"):
        raise TypeError(f"{path} is binary")
    if item.get("minus_file") and item.get("plus_file"):
        lines += [f"--- {item['minus_file']['path']}", f"+++ {item['plus_file']['path']}"]
    for hunk in item.get("hunks", []):
        place = hunk["descriptor"]
        section = f" {place['section']}" if place.get("section") else ""
        lines.append(f"@@ -{_span(place['old_range'])} +{_span(place['new_range'])} @@{section}")
        lines += [_hunk_line(line) for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"


def _span(place: Mapping[str, Any]) -> str:
    return f"{place['start']}" if place.get("length") is None else f"{place['start']},{place['length']}"


def _hunk_line(line: Mapping[str, Any]) -> str:
    marks = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
    content: str = line["content"]
    return marks[line["type"]] + content
