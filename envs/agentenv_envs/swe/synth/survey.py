"""What runs of an unchanged release show: which tests are stable, and which functions they exercise.

Invariants:
- A test is stable if it passed in three runs: one that notes calls, and two as a grading run does it.
- Files of tests, of their configuration, and of documentation are never offered for change.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from agentenv.errors import UsageError
from agentenv_envs.swe.junit import junit_key
from agentenv_envs.swe.repository import is_protected

from .bench import Bench, Job

__all__ = ["Survey", "survey_of"]

_SURVEY_TIMEOUT_S = 900.0
_NOT_CODE = frozenset(
    ("test", "tests", "testing", "docs", "doc", "examples", "example", "benchmarks", "scripts")
)


@dataclass(frozen=True)
class Survey:
    """What runs of the unchanged release show.

    Attributes:
        tests: ids of tests that passed each time, sorted.
        test_files: their files, sorted.
        duration_s: of one run of them all.
        covering: tests by path and first line of the functions that they run.
        calls: names of the functions that a test calls itself.
        sources: text of the files that may be changed, by path.
        test_sources: text of the test files.
    """

    tests: tuple[str, ...]
    test_files: tuple[str, ...]
    duration_s: float
    covering: dict[tuple[str, int], tuple[str, ...]]
    calls: dict[str, tuple[str, ...]]
    sources: dict[str, str]
    test_sources: dict[str, str]


def survey_of(bench: Bench) -> Survey:
    """Run the release's own tests: once to see what they call, twice to see which are stable.

    Raises:
        UsageError: no test of it passes each time.
        SandboxError: the sandbox failed.
    """
    first = bench.screen([Job("survey", (), _SURVEY_TIMEOUT_S, calls=True)])["survey"]
    if first.exit_code is None:
        raise UsageError(f"the tests end their process, or take over {_SURVEY_TIMEOUT_S:.0f} s")
    passed = [i for i, outcome in first.outcomes.items() if outcome == "passed" and _usable(i)]
    files = sorted({i.partition("::")[0] for i in passed})
    keys = collections.Counter(junit_key(i) for i in passed)
    stable = {i for i in passed if keys[junit_key(i)] == 1}
    began = time.monotonic()
    for _ in range(2):
        statuses = bench.full_run(files, timeout_s=_SURVEY_TIMEOUT_S) if files else None
        stable &= {i for i, status in (statuses or {}).items() if status == "passed"}
    duration_s = (time.monotonic() - began) / 2
    if not stable:
        raise UsageError(
            f"no test passes each time: {len(first.outcomes)} ran, {len(passed)} passed at first; "
            "does the source distribution hold tests, and has --install what they need?"
        )
    files = sorted({i.partition("::")[0] for i in stable})
    covering: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
    calls: dict[str, tuple[str, ...]] = {}
    for test, seen in first.calls.items():
        # What runs outside of tests, as modules are imported, every test depends on.
        reached = stable if not test else ({test} & stable)
        for path, line, _, _ in seen:
            covering[(path, line)] |= reached
        if test in stable:
            names = (
                _public(name) for path, _, name, direct in seen if direct and not is_protected(path, files)
            )
            calls[test] = tuple(dict.fromkeys(filter(None, names)))[:4]
    sources, test_sources = {}, {}
    reached_paths = {path for path, _ in covering}
    for path in bench.files():
        if path in files:
            test_sources[path] = bench.read(path) or ""
        elif path in reached_paths and _is_code(path, files):
            text = bench.read(path)
            if text is not None:
                sources[path] = text
    return Survey(
        tuple(sorted(stable)),
        tuple(files),
        duration_s,
        {place: tuple(sorted(tests)) for place, tests in covering.items() if tests},
        calls,
        sources,
        test_sources,
    )


def _usable(test_id: str) -> bool:
    """Whether a row can name the test."""
    file, separator, _ = test_id.partition("::")
    return (
        bool(separator) and file.endswith(".py") and test_id.isprintable() and not file.startswith((".", "/"))
    )


def _is_code(path: str, test_files: Sequence[str]) -> bool:
    pure = PurePosixPath(path)
    if (
        _NOT_CODE.intersection(pure.parts[:-1])
        or pure.name.startswith("test_")
        or pure.stem.endswith("_test")
    ):
        return False
    return pure.name not in ("setup.py", "noxfile.py", "conftest.py") and not is_protected(path, test_files)


def _public(name: str) -> str:
    """A function's name as a user knows it: "pkg.Store" for its constructor; "" for what has no such name."""
    name = name.removesuffix(".__init__")
    return "" if "<" in name or any(part.startswith("_") for part in name.split(".")) else name
