"""The search for tasks: mutations of what tests exercise, judged by the tests.

Invariants:
- A task's failing tests fail with the mutation, in a run of some tests and in one of all, and pass without it, twice;
  at least one test passes with it; every test that ran without it reports with it.
- With the same release, seed and number the same mutations are judged in the same order, and rows come in that
  order, whatever the number of workers. Only a run's time limit depends on the machine.
- A mutation that was judged by an earlier start is not judged again.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import Sandbox

from .bench import Bench, Job, Screened
from .issue import leaks, write_issue
from .operators import Mutation, mutations_of
from .release import Release
from .rows import RowFile, unified_diff, without_tests
from .survey import Survey, survey_of

__all__ = ["Found", "search"]

KEPT = "kept"
_BROKEN = "the sandbox failed"  # says nothing of the edit, so that the next start tries again
_MAX_BATCH = 6
_MAX_SCREENED_TESTS = 60
_NOT_CODE = frozenset(
    ("test", "tests", "testing", "docs", "doc", "examples", "example", "benchmarks", "scripts")
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        kept: rows of this release in the file.
        added: how many of them are new.
        verdicts: how many mutations of this start had which verdict.
        candidates: how many mutations there are.
        duration_s: seconds that it took.
    """

    kept: int
    added: int
    verdicts: dict[str, int]
    candidates: int
    duration_s: float


@dataclass(frozen=True)
class _Candidate:
    path: str
    mutation: Mutation


def search(
    release: Release,
    open_sandbox: Callable[[], Sandbox],
    output: RowFile,
    *,
    number: int,
    seed: int,
    workers: int,
    say: Say,
) -> Found:
    """Append rows to a file until it holds enough of this release, or no mutation is left.

    Args:
        release: what is mutated.
        open_sandbox: a fresh sandbox with the release's repository; called from several threads.
        output: where rows go; what it holds already counts.
        number: rows of this release that the file shall hold.
        seed: decides the order of mutations.
        workers: sandboxes that work at the same time.
        say: called with a line of text as the search goes on.

    Raises:
        UsageError: no test of the release passes each time.
        SandboxError: no sandbox can be opened.
    """
    began = time.monotonic()
    digest = release.digest[:16]
    had = kept = output.count(digest)
    tally: collections.Counter[str] = collections.Counter()
    if kept >= number:
        return Found(kept, 0, {}, 0, 0.0)
    judges: queue.Queue[_Judge] = queue.Queue()
    everyone: list[_Judge] = []

    def close_all() -> None:
        for judge in everyone:
            judge.close()

    # Left from the last entry to the first: edits that wait are dropped, runs under way end with their sandboxes, then
    # threads are waited for.
    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown)
        stack.callback(close_all)
        say(f"{release.name}: opening a sandbox and running the tests three times")
        everyone.append(_Judge(release, open_sandbox))
        survey = survey_of(everyone[0].bench)
        candidates = _candidates(survey, seed)
        say(
            f"{release.name}: {len(survey.tests)} stable tests ({survey.duration_s:.1f} s), "
            f"{len(candidates)} edits of {len({(c.path, c.mutation.function) for c in candidates})} functions"
        )
        for _ in range(workers - 1):
            everyone.append(_Judge(release, open_sandbox))
        for judge in everyone:
            judges.put(judge)
        ids = {str(row["instance_id"]) for row in output.rows}

        def work(batch: list[_Candidate]) -> list[tuple[str, str, dict[str, Any] | None]]:
            judge = judges.get()
            try:
                return judge.judge(survey, batch, digest, frozenset(output.verdicts), seed)
            finally:
                judges.put(judge)

        done: set[str] = set()
        judged = 0
        # Small numbers take small batches: what is under way when enough is kept was for nothing.
        size = max(1, min(_MAX_BATCH, (number - kept) // (2 * workers)))
        ordered = stack.enter_context(
            contextlib.closing(_in_order(pool, work, _batches(candidates, size), 2 * workers))
        )
        for results in ordered:
            for key, verdict, row in results:
                judged += 1
                if key in done or not key or kept >= number:
                    continue
                done.add(key)
                if row is not None and row["instance_id"] not in ids:
                    output.append(row)
                    ids.add(row["instance_id"])
                    kept += 1
                if key not in output.verdicts and verdict != _BROKEN:
                    output.note(key, verdict)
                tally[verdict] += 1
            say(
                f"{release.name}: {kept} of {number} kept, {judged} of {len(candidates)} judged{_shown(tally)}"
            )
            if kept >= number:
                break
    return Found(kept, kept - had, dict(tally), len(candidates), time.monotonic() - began)


class _Judge:
    """Judges mutations in a sandbox of its own, which it opens anew when it breaks."""

    def __init__(self, release: Release, open_sandbox: Callable[[], Sandbox]) -> None:
        self._release, self._open = release, open_sandbox
        self._lock, self._closed = threading.Lock(), False
        self._sandbox: Sandbox | None = open_sandbox()
        self.bench = Bench(self._sandbox)

    def close(self) -> None:
        """Remove the sandbox; a run that another thread has under way in it fails, and none comes after it."""
        with self._lock:
            self._closed = True
        self._put_away()

    def _put_away(self) -> None:
        with self._lock:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def _open_anew(self) -> None:
        self._put_away()
        sandbox = self._open()
        with self._lock:
            self._sandbox = sandbox
            closed = self._closed
        if closed:
            self._put_away()
            raise SandboxError("the search has ended")
        self.bench = Bench(sandbox)

    def judge(
        self, survey: Survey, batch: list[_Candidate], digest: str, known: frozenset[str], seed: int
    ) -> list[tuple[str, str, dict[str, Any] | None]]:
        """Key, verdict and row of each candidate."""
        try:
            return self._judge(survey, batch, digest, known, seed)
        except SandboxError:
            if self._closed:
                raise
            self._open_anew()
            if len(batch) > 1:
                return [r for one in batch for r in self.judge(survey, [one], digest, known, seed)]
            key = _key(digest, batch[0].path, batch[0].mutation.apply(survey.sources[batch[0].path]) or "")
            return [(key, _BROKEN, None)]

    def _judge(
        self, survey: Survey, batch: list[_Candidate], digest: str, known: frozenset[str], seed: int
    ) -> list[tuple[str, str, dict[str, Any] | None]]:
        jobs, changed, keys = [], {}, []
        for candidate in batch:
            source = candidate.mutation.apply(survey.sources[candidate.path])
            key = "" if source is None else _key(digest, candidate.path, source)
            keys.append(key)
            if source is None or key in known or key in changed:
                continue
            changed[key] = source
            tests = _evenly(
                survey.covering[(candidate.path, candidate.mutation.function.line)], _MAX_SCREENED_TESTS
            )
            limit_s = max(5.0, 3 * survey.duration_s)
            jobs.append(Job(key, tests, limit_s, candidate.path, source))
        screened = self.bench.screen(jobs) if jobs else {}
        results: list[tuple[str, str, dict[str, Any] | None]] = []
        for candidate, key in zip(batch, keys, strict=True):
            if key not in screened:
                continue
            verdict, row = self._verdict(survey, candidate, changed[key], screened[key], key)
            if row is not None:
                row["synth"] |= {"release": digest, "seed": seed}
            results.append((key, verdict, row))
        return results + [("", "", None)] * (len(batch) - len(results))

    def _verdict(
        self, survey: Survey, candidate: _Candidate, source: str, screened: Screened, key: str
    ) -> tuple[str, dict[str, Any] | None]:
        if screened.exit_code is None:
            return "the tests take too long or end their process", None
        if not screened.outcomes:
            return "no test can be collected", None
        failed = {i for i, outcome in screened.outcomes.items() if outcome == "failed"}
        if not failed:
            return "no test fails", None
        statuses = self.bench.full_run(
            survey.test_files, timeout_s=max(20.0, 5 * survey.duration_s), changes={candidate.path: source}
        )
        if statuses is None:
            return "the tests take too long or end their process", None
        failing = [i for i in survey.tests if statuses.get(i) in ("failed", "error")]
        passing = [i for i in survey.tests if statuses.get(i) == "passed"]
        if any(statuses.get(i, "missing") == "missing" for i in survey.tests):
            return "some tests can't be collected", None
        if not passing:
            return "every test fails", None
        both = screened.outcomes.keys() & set(survey.tests)
        if not failing or any((i in failed) != (statuses[i] in ("failed", "error")) for i in both):
            return "the tests depend on their order, or on chance", None
        row = _row(self._release, survey, candidate, source, screened, failing, passing, key)
        if row is None:
            return "no issue tells it without code", None
        return KEPT, row


def _row(
    release: Release,
    survey: Survey,
    candidate: _Candidate,
    source: str,
    screened: Screened,
    failing: Sequence[str],
    passing: Sequence[str],
    key: str,
) -> dict[str, Any] | None:
    path, original = candidate.path, survey.sources[candidate.path]
    files = sorted({i.partition("::")[0] for i in failing})
    stripped = {
        file: without_tests(survey.test_sources[file], [i for i in failing if i.startswith(f"{file}::")])
        for file in files
    }
    secrets = [original, source, *survey.test_sources.values()]
    shown = {i: failure for i, failure in screened.failures.items() if i in failing}
    issue = write_issue(release.name, shown, survey.calls, secrets)
    if not issue or leaks(issue, secrets):
        return None
    row: dict[str, Any] = {
        "instance_id": f"{re.sub(r'[^A-Za-z0-9.]+', '-', release.package)}__synth-{key[:12]}",
        "repo": release.package,
        "base_commit": "",
        "package": release.package,
        "install": list(release.install),
        "source_root": release.source_root,
        "problem_statement": issue,
        "hints_text": "",
        "patch": unified_diff(path, source, original),
        "test_patch": "".join(unified_diff(f, stripped[f], survey.test_sources[f]) for f in files),
        "bug_patch": unified_diff(path, original, source)
        + "".join(unified_diff(f, survey.test_sources[f], stripped[f]) for f in files),
        "FAIL_TO_PASS": json.dumps(list(failing)),
        "PASS_TO_PASS": json.dumps(list(passing)),
        "test_files": list(survey.test_files),
        "timeout_s": max(120, math.ceil(20 * survey.duration_s)),
        "synth": {
            "operator": candidate.mutation.operator,
            "function": candidate.mutation.function.name,
            "path": path,
        },
    }
    if release.archive is not None:
        row["source_archive"] = release.archive.name
    return row


def _candidates(survey: Survey, seed: int) -> list[_Candidate]:
    """Every edit that tests reach, in the order of judging: each function's first one before any second one."""
    found: list[_Candidate] = []
    for path, source in sorted(survey.sources.items()):
        try:
            edits = mutations_of(source)
        except (SyntaxError, ValueError):
            continue  # of another Python version
        found += [_Candidate(path, edit) for edit in edits if (path, edit.function.line) in survey.covering]
    chance = random.Random(seed)
    chance.shuffle(found)
    # In turns of functions, and for each function in turns of operators: few functions have most of the edits, and
    # few operators make most of them. A function that returns nothing is the plainest bug, so it comes a turn later.
    for turn_of in (lambda c: (c.path, c.mutation.function.line, c.mutation.operator), _place_of):
        turns: collections.Counter[Any] = collections.Counter()
        order = []
        for candidate in found:
            late = candidate.mutation.operator == "changed_return"
            order.append((turns[turn_of(candidate)] + late, chance.random()))
            turns[turn_of(candidate)] += 1
        found = [
            candidate for _, candidate in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])
        ]
    return found


def _place_of(candidate: _Candidate) -> tuple[str, int]:
    return candidate.path, candidate.mutation.function.line


def _batches(candidates: Sequence[_Candidate], size: int) -> Iterator[list[_Candidate]]:
    for start in range(0, len(candidates), size):
        yield list(candidates[start : start + size])


def _in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[list[_Candidate]], Any],
    batches: Iterator[list[_Candidate]],
    ahead: int,
) -> Generator[Any, None, None]:
    """Results in the order of the batches, with a few of them under way; those left are cancelled at the end."""
    waiting: collections.deque[Future[Any]] = collections.deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(work, batch))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _key(digest: str, path: str, source: str) -> str:
    return hashlib.sha256(f"{digest}\0{path}\0{source}".encode()).hexdigest()[:16]


def _evenly(items: Sequence[str], most: int) -> list[str]:
    """At most so many of the items, from all over them."""
    return [items[i * len(items) // most] for i in range(most)] if len(items) > most else list(items)


def _shown(tally: collections.Counter[str]) -> str:
    dropped = "; ".join(f"{n} {verdict}" for verdict, n in tally.most_common() if verdict != KEPT)
    return f" (dropped: {dropped})" if dropped else ""
