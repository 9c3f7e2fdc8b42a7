"""The text of an issue, written from what failing tests saw.

Invariants:
- It tells behaviour alone: values, exceptions, names of what tests call. It has no path, no line number, and no line
  of the code under test or of the tests (`leaks`); a detail that holds one is left out.
- The same failures give the same text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["leaks", "write_issue"]

_MAX_DETAILS = 5
_MAX_VALUE = 200
_LEAST_LINE = 8  # shorter lines ("else:", "return x") are no one's in particular
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PATH = re.compile(r"(/[\w.@+-]+){2,}/?|[\w./-]*\w\.py\b(:\d+)?|\bline \d+\b")
_CALLED = re.compile(
    r"where (.+) = (?:<(?:function|bound method|class) '?([\w.<>]+)'?[^()]*?>|([\w.]+))\((.*)\)$"
)
_VAGUE = "the result is wrong"
_WORDS = {
    "==": "are not equal, but should be",
    "!=": "are equal, but should not be",
    "in": "- the first is missing in the second",
    "not in": "- the first is in the second, but should not be",
    "is": "are not the same object, but should be",
    "is not": "are the same object, but should not be",
    "<": "- the first should be less than the second",
    ">": "- the first should be greater than the second",
    "<=": "- the first should be at most the second",
    ">=": "- the first should be at least the second",
}


def write_issue(
    package: str,
    failures: Mapping[str, Mapping[str, Any]],
    calls: Mapping[str, Sequence[str]],
    secrets: Iterable[str],
) -> str:
    """Put the failures of some tests in words; "" where no failure has any that tell more than that it fails.

    Args:
        package: what the user calls the software, such as "inflection 0.5.1".
        failures: what failing tests saw, by pytest id (`screen_runner.Reporter.failures`).
        calls: names of the functions that each of the tests calls itself.
        secrets: sources whose lines the text must not hold: the module before and after, and the tests' files.
    """
    hidden = _lines_of(secrets)
    names = [name for test in failures for name in calls.get(test, ())]
    subjects = list(dict.fromkeys(names))[:3]
    about = ", ".join(f"`{name}`" for name in subjects)
    title = f"Wrong behaviour of {about}" if about else "Wrong behaviour"
    details: list[str] = []
    for test, failure in sorted(failures.items()):
        detail = _detail(test, failure, calls.get(test, ()), hidden)
        if detail not in details:
            details.append(detail)
    if all(detail.endswith(_VAGUE) for detail in details):
        return ""
    details.sort(key=lambda detail: detail.endswith(_VAGUE))
    shown = details[:_MAX_DETAILS]
    more = len(details) - len(shown)
    lines = [f"{title} in {package}", "", "This used to work and does not any more:", ""]
    lines += [f"- {detail}" for detail in shown]
    if more:
        lines.append("- and more of the same kind")
    lines += ["", "Please find the cause and repair it; everything else should stay as it is."]
    return "\n".join(lines) + "\n"


def leaks(text: str, secrets: Iterable[str]) -> list[str]:
    """Lines of sources, and paths, that a text holds; none in a good issue."""
    found = [line for line in _lines_of(secrets) if line in text]
    return found + [match[0] for match in _PATH.finditer(text)]


def _detail(test: str, failure: Mapping[str, Any], calls: Sequence[str], hidden: Sequence[str]) -> str:
    """One failure in one line."""
    situation = _situation(test)
    parameters = failure.get("parameters") or {}
    given = ", ".join(f"{name} = {_short(value)}" for name, value in parameters.items())
    if given and not _told(given, hidden):
        situation += f", with {given}"
    if calls:
        situation += f" (a use of {', '.join(f'`{name}`' for name in list(dict.fromkeys(calls))[:3])})"
    for what in _observations(failure):
        if not _told(what, hidden):
            return f"{situation}: {what}"
    return f"{situation}: {_VAGUE}"


def _observations(failure: Mapping[str, Any]) -> Iterable[str]:
    """What was seen, the most telling words first."""
    kind, message = str(failure.get("type", "")), str(failure.get("message", ""))
    first = message.strip().split("\n")[0]
    if kind == "Failed":  # of pytest: an exception that did not come
        wanted = re.match(r"DID NOT RAISE <class '([\w.]+)'>", first)
        if wanted:
            yield f"{wanted[1].rpartition('.')[2]} should be raised, but nothing is"
        return
    compare = failure.get("compare") or {}
    if kind == "AssertionError":
        where = next(filter(None, map(_call_of, message.split("\n"))), "")
        if compare:
            left, right = _short(compare["left"]), _short(compare["right"])
            yield f"{left} and {right} {_WORDS.get(compare['op'], 'differ')}" + (
                f"; {where}" if where else ""
            )
            yield f"{left} and {right} {_WORDS.get(compare['op'], 'differ')}"
            return
        if where:
            yield where
        values = re.match(r"(.+?) != (.+?)( : .*)?$", first)
        if values:
            yield f"{_short(values[1])} and {_short(values[2])} {_WORDS['==']}"
        elif first and not first.startswith("assert "):
            yield f"a check fails: {_short(first)}"
        return
    if kind:
        yield f"{kind} is raised: {_short(first)}" if first else f"{kind} is raised"
        yield f"{kind} is raised"


def _call_of(line: str) -> str:
    """ "f(1) gives 2" from the line in which pytest explains an operand."""
    match = _CALLED.search(_ADDRESS.sub("", line))
    return f"`{match[2] or match[3]}({_short(match[4])})` gives {_short(match[1])}" if match else ""


def _situation(test: str) -> str:
    """A test's name in words."""
    name = test.partition("[")[0].split("::")[-1]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", re.sub(r"^test_?", "", name)).replace("_", " ").strip()
    return words or "normal use"


def _short(value: str) -> str:
    """A value without addresses and paths, on one line of limited length."""
    text, before = _ADDRESS.sub("", " ".join(str(value).split())), ""
    while text != before:  # what is left on both sides of a path may be one
        text, before = _PATH.sub("...", text), text
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def _told(text: str, hidden: Sequence[str]) -> bool:
    return any(line in text for line in hidden)


def _lines_of(sources: Iterable[str]) -> list[str]:
    lines = {line.strip() for source in sources for line in source.split("\n")}
    # A line without a letter or of one word ("finally:", a name in a list) tells nothing; a value, such as an
    # example's in a docstring, is behaviour.
    lines = {line for line in lines if len(line) >= _LEAST_LINE and re.search(r"\w\W+\w", line)}
    return sorted(line for line in lines if not _is_value(line))


def _is_value(line: str) -> bool:
    try:
        ast.literal_eval(line)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True
