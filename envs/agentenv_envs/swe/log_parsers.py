"""What a log of tests says: pure functions from a log to {test id: status}.

Each parser names a test as the data sets name it in their lists of expected tests, also where that name is odd: the
lists were made by the parsers of SWE-bench, and a name that differs is a test that is missing.

Invariants:
- Statuses are those of `STATUSES`. A line that says nothing of a test is left out.
- Where a log speaks of a test twice, the last word counts.
- No parser raises, whatever the log holds.

Source of the names: SWE-bench 5.0 `harness/log_parsers/python.py`, SWE-smith `harness/log_parsers.py`, R2E-Gym
`repo_analysis/execution_log_parser.py`. A differential test holds them against the first where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ["PARSERS", "STATUSES", "parser_name", "pytest_summary", "resolve_id", "without_colours"]

STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL")
Statuses = dict[str, str]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = dict.fromkeys(range(1, 32))
_SKIP_COUNT = re.compile(r"\[\d+\]")
_SUMMARY = re.compile(r"(?m)^=+ short test summary info =+\s*$")
_SYMPY_FAILURE = re.compile(r"_* (.*)\.py:(.*) _*")
_MAX_HEADING = 2000  # characters; the pattern takes quadratic time
_VERBOSE = re.compile(r"(\S+)\s+(PASSED|FAILED|SKIPPED|ERROR|XFAIL)")
# A test of Django's whose "ok" stands on the line after what the test printed.
_DJANGO_BROKEN = (
    re.compile(r"(?m)^(.*?)\s\.\.\.\sTesting against Django installed in (?s:.*?) silenced\)\.\nok$"),
    re.compile(r"(?m)^(.*?)\s\.\.\.\sInternal Server Error: /.*/\nok$"),
    re.compile(r"(?m)^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$"),
)
_DJANGO_VERSION = "--version is equivalent to version"
_DJANGO_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"


def without_colours(text: str) -> str:
    """A text without ANSI's colour sequences."""
    return _COLOUR.sub("", text)


def pytest_summary(log: str) -> str | None:
    """What follows the last heading of pytest's short summary; None where a log has none."""
    headings = list(_SUMMARY.finditer(without_colours(log)))
    return without_colours(log)[headings[-1].end() :] if headings else None


def parse_pytest(log: str) -> Statuses:
    """The short summary of `pytest -rA`: `PASSED path::test`, the name up to the first space."""
    return {name: status for status, name in _summary_lines(log)}


def parse_pytest_options(log: str) -> Statuses:
    """As `parse_pytest`; of a parameter that is an absolute path only the last part is kept.

    >>> parse_pytest_options("PASSED a.py::test[/tmp/x/y.py]")
    {'a.py::test[/y.py]': 'PASSED'}
    """
    statuses = {}
    for status, name in _summary_lines(log):
        head, bracket, rest = name.partition("[")
        option, closing, _ = rest.rpartition("]")
        if bracket and closing:
            if option.startswith("/") and not option.startswith("//") and "*" not in option:
                option = "/" + option.rpartition("/")[2]
            name = f"{head}[{option}]"
        statuses[name] = status
    return statuses


def parse_pytest_v2(log: str) -> Statuses:
    """As `parse_pytest` with names that hold spaces, colours taken out; also old logs with the status at the end."""
    statuses = {}
    for raw in log.split("\n"):
        line = re.sub(r"\[(\d+)m", "", raw).translate(_CONTROL)
        words = (line.partition(" - ")[0] if line.startswith("FAILED") else line).split()
        if len(words) < 2:
            continue
        if words[0] in STATUSES and line.startswith(words[0]):
            if not _is_skip_count(words[0], words[1]):
                statuses[" ".join(words[1:])] = words[0]
        elif words[-1] in STATUSES and line.endswith(words[-1]):
            statuses[" ".join(words[:-1])] = words[-1]
    return statuses


def parse_pytest_verbose(log: str) -> Statuses:
    """`pytest --verbose` as SWE-smith runs it: `path::test PASSED [ 12%]`."""
    return {match[1]: match[2] for line in log.split("\n") if (match := _VERBOSE.match(line))}


def parse_matplotlib(log: str) -> Statuses:
    """As `parse_pytest`; parameters that are mouse buttons have their numbers, as in old versions of Python."""
    return parse_pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def parse_seaborn(log: str) -> Statuses:
    """Passed and failed tests alone, with the status before or after the name."""
    statuses = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            statuses[words[1]] = "FAILED"
        elif " PASSED " in line:
            if words[1] == "PASSED":
                statuses[words[0]] = "PASSED"
        elif line.startswith("PASSED"):
            statuses[words[1]] = "PASSED"
    return statuses


def parse_sympy(log: str) -> Statuses:
    """SymPy's own runner: `test_x ok`, `test_x F`, `test_x E`, and headings of failures, `___ path.py:test_x ___`."""
    lines = log.split("\n")
    headings = [
        match for line in lines if ".py:" in line and (match := _SYMPY_FAILURE.search(line[:_MAX_HEADING]))
    ]
    statuses = {f"{match[1]}.py:{match[2]}": "FAILED" for match in headings}
    marks = {"ok": "PASSED", "F": "FAILED", "E": "ERROR"}
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0].startswith("test_") and words[-1] in marks:
            statuses[words[0]] = marks[words[-1]]
    return statuses


def parse_django(log: str) -> Statuses:
    """Django's runner, and unittest's: `test_x (mod.Case) ... ok`; with a docstring its first line is the name."""
    statuses: Statuses = {}
    last = None  # the test whose result is still to come, where it printed something in between
    for raw in log.split("\n"):
        line = raw.strip()
        if _DJANGO_VERSION in line:
            statuses[_DJANGO_VERSION] = "PASSED"
        if " ... " in line:
            last = line.partition(" ... ")[0]
        for ending in (" ... ok", " ... OK", " ...  OK"):
            if line.endswith(ending):
                if line.startswith(_DJANGO_MIGRATION):
                    line = line.partition("...")[2].strip()
                statuses[line.removesuffix(ending)] = "PASSED"
                break
        if " ... skipped" in line:
            statuses[line.partition(" ... skipped")[0]] = "SKIPPED"
        for mark, status in (("FAIL", "FAILED"), ("ERROR", "ERROR")):
            if line.endswith(f" ... {mark}"):
                statuses[line.partition(f" ... {mark}")[0]] = status
            if line.startswith(f"{mark}:") and len(line.split()) > 1:
                statuses[line.split()[1]] = status
        if line.startswith("ok") and last is not None:
            statuses[last] = "PASSED"
    for pattern in _DJANGO_BROKEN:
        statuses |= {match[1]: "PASSED" for match in pattern.finditer(log)}
    return statuses


def parse_unittest(log: str) -> Statuses:
    """`python -m unittest -v`, named by what stands before ` ... `; headings of failures name test and class."""
    statuses: Statuses = {}
    for line in map(str.rstrip, log.split("\n")):
        name, separator, result = line.partition(" ... ")
        for mark, status in (
            ("ok", "PASSED"),
            ("FAIL", "FAILED"),
            ("ERROR", "ERROR"),
            ("skipped", "SKIPPED"),
        ):
            if separator and (result == mark or (mark == "skipped" and result.startswith(mark))):
                statuses[name] = status
        for mark, status in (("FAIL", "FAILED"), ("ERROR", "ERROR")):
            words = line.split()
            if line.startswith(f"{mark}: ") and len(words) > 2:
                statuses[" ".join(words[1:3])] = status
    return statuses


def parse_r2e(log: str) -> Statuses:
    """R2E-Gym's names: what follows the file, joined by dots; passed, failed and broken tests of the last summary.

    >>> parse_r2e("=== short test summary info ===\\nPASSED r2e_tests/test_1.py::TestA::test_b")
    {'TestA.test_b': 'PASSED'}
    """
    statuses = {}
    summary = pytest_summary(log)
    if summary is None:  # of a runner that is not pytest
        _, heading, rest = without_colours(log).rpartition("short test summary info")
        summary = rest if heading else ""
    for line in summary.strip().split("\n"):
        for status in ("PASSED", "FAILED", "ERROR"):
            if status in line:  # anywhere: the expected maps were made so
                name = ".".join(line.split("::")[1:])
                statuses[name.partition(" - ")[0]] = status
                break
    return statuses


def resolve_id(test_id: str, statuses: Mapping[str, str]) -> str | None:
    """The key under which a log has an expected test; None where it has none.

    676 expected ids of SWE-bench Verified end within their brackets. Such an id stands for every test that begins with
    it, as long as all of these passed or none did.

    Source: SWE-bench issue 290, and `_resolve_case` of its `harness/grading.py`.
    """
    if test_id in statuses:
        return test_id
    if test_id.count("[") > test_id.count("]"):
        longer = [name for name in statuses if name.startswith(test_id)]
        if len({statuses[name] in ("PASSED", "XFAIL") for name in longer}) == 1:
            return longer[0]
    return None


PARSERS: dict[str, Callable[[str], Statuses]] = {
    "pytest": parse_pytest,
    "pytest_options": parse_pytest_options,
    "pytest_v2": parse_pytest_v2,
    "pytest_verbose": parse_pytest_verbose,
    "matplotlib": parse_matplotlib,
    "seaborn": parse_seaborn,
    "sympy": parse_sympy,
    "django": parse_django,
    "unittest": parse_unittest,
    "r2e": parse_r2e,
}
"""The parsers by the names that `SWETask.log_parser` takes."""

_ALIASES = {
    "pytest": "astroid flask marshmallow pvlib pyvista sqlfluff xarray",
    "pytest_options": "pydicom requests pylint",
    "pytest_v2": "astropy scikit sphinx",
}
_NAMES = {name: name for name in PARSERS} | {
    alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()
}


def parser_name(log_parser: str) -> str | None:
    """Our parser for a name that a row gives, `parse_log_pytest` or `pytest`; None where there is none."""
    return _NAMES.get(log_parser.removeprefix("parse_log_"))


def _summary_lines(log: str) -> list[tuple[str, str]]:
    """Status and name of each line that begins with a status."""
    pairs = []
    for line in log.split("\n"):
        status, name, *_ = (*line.split(maxsplit=2), "", "")
        if status in STATUSES and line.startswith(status) and name and not _is_skip_count(status, name):
            pairs.append((status, name))
    return pairs


def _is_skip_count(status: str, name: str) -> bool:
    """Whether a line is `SKIPPED [2] path:line: reason`, which counts skipped tests and names none."""
    return status == "SKIPPED" and _SKIP_COUNT.fullmatch(name) is not None
