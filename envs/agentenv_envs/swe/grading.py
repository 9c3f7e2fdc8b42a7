"""Grading a patch: the row's tests, run against it in a fresh sandbox.

Rows whose data set brings a test command are graded by its log (`log_grading`), all others by the JUnit file of a run
of pytest that is ours. The invariants below are of the second kind.

Invariants:
- Only a run that shows every FAIL_TO_PASS test passed and every PASS_TO_PASS test passed, skipped or failed as
  expected is `resolved`; a test that did not report is a test that failed.
- A run proves itself: tests that must fail did fail, pytest's return code, its JUnit file and the runner's
  record agree with each other, and this run's secret has sealed the record. A run that can't, or in which pytest's
  functions were replaced, has status `failed`, whatever it claims.
- `invalid` means that the patch was not judged: the sandbox failed, or the row itself can't be run. It is
  never a reward of 0.

The tests and the agent's code share a process, as everywhere where tests are the oracle. The checks stop
what is known to happen in training (README's list of reward hacks); they don't stop an author who writes
against this very file.
"""

from __future__ import annotations

import json
import logging
import posixpath
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import SandboxError

from .data import SWETask
from .junit import (
    MAX_JUNIT_BYTES,
    MAX_RECORD_BYTES,
    RunRecord,
    TestKey,
    TestStatus,
    junit_key,
    parse_junit,
    parse_record,
    seal_of,
)
from .log_grading import grade_by_log
from .repository import open_workspace, scratch_folder, workspace_patch
from .sandbox import Sandbox, SandboxBackend
from .verdict import Grade, invalid, lay_out, verdict

__all__ = ["Grade", "TestRun", "grade", "judge", "open_workspace", "workspace_patch"]

logger = logging.getLogger(__name__)

TESTS_FAILED = 1  # pytest's return code where all tests ran and some failed; the canary always does
# A release runs on the base image's Python, which may be newer: what Python has deprecated since then must
# not fail a test, even where the release asks pytest to turn warnings into errors.
_PACKAGE_ARGUMENTS = ("-W", "ignore::DeprecationWarning", "-W", "ignore::PendingDeprecationWarning")
_OUTPUT_HALF_BYTES = 6000
_DENIED = " in the JUnit file, failed in the runner's record"

# Each must fail: an assertion, an error, an exception that does not come, an equality that holds for
# everything.
_CANARY = """\
import pytest


class Same:
    def __eq__(self, other):
        return True


def test_@TAG@_sum():
    assert [1, 2, 3] == [1, 2, 4]


def test_@TAG@_lookup():
    {}["missing"]


def test_@TAG@_refused():
    with pytest.raises(ValueError):
        str("fine")


def test_@TAG@_equal():
    assert Same() == "anything"
"""
_CANARY_TESTS = ("sum", "lookup", "refused", "equal")


@dataclass(frozen=True)
class TestRun:
    """What one run of the tests left.

    Attributes:
        exit_code: of the runner's process.
        timed_out: whether the run was cut off.
        token: the secret that must have sealed the record.
        canaries: ids of the tests that must fail.
        record: the runner's record; None where there is none, or a broken one.
        statuses: by JUnit key; None where there is no JUnit file, or a broken one.
        problem: what is wrong with record or JUnit file.
    """

    __test__ = False  # not a class of tests, whatever its name says

    exit_code: int
    timed_out: bool
    token: str
    canaries: tuple[str, ...]
    record: RunRecord | None
    statuses: Mapping[TestKey, TestStatus] | None
    problem: str = ""


def grade(
    task: SWETask, patch: str, backend: SandboxBackend, *, progress: Callable[[str], None] | None = None
) -> Grade:
    """Judge a patch by the row's tests, in a sandbox that nobody has worked in.

    Args:
        task: the row.
        patch: a unified diff against the base commit; "" is a patch that changes nothing.
        backend: where the sandbox comes from.
        progress: called with one line per step where an image has to be built.

    Raises:
        UsageError: the back-end can't hold real repositories, or the row can't be built as it is.
    """
    if task.foreign_ids and not task.log_parser:
        return invalid(f"{len(task.foreign_ids)} test ids are not pytest's, such as {task.foreign_ids[0]!r}")
    scratch, stash = scratch_folder(), f"{scratch_folder()}.tar"
    try:
        sandbox = open_workspace(task, backend, progress=progress, stash=stash)
        try:
            if task.log_parser:
                return grade_by_log(sandbox, task, patch, scratch, stash)
            return _grade_in(sandbox, task, patch, scratch, stash)
        finally:
            backend.release(sandbox)
    except SandboxError as error:
        logger.warning("%s: not graded: %s", task.instance_id, error)
        return invalid(f"{type(error).__name__}: {error}")


def judge(task: SWETask, run: TestRun) -> list[str]:
    """Every reason why a run does not show that the patch resolves the task; none means that it does.

    A pure function of the row and of what the run left.
    """
    if run.timed_out:
        return [f"the tests took over {task.timeout_s:.0f} s"]
    if run.record is None or run.statuses is None:
        return [run.problem or f"the run left no results (exit code {run.exit_code})"]
    reasons: list[str] = []
    if not secrets.compare_digest(run.record.seal.encode(), seal_of(run.record, run.token).encode()):
        reasons.append("the record is not of this run")
    if not run.exit_code == run.record.exit_code == TESTS_FAILED:
        reasons.append(
            f"exit code {run.exit_code} of the process, {run.record.exit_code} of pytest; "
            f"both must be {TESTS_FAILED}, since canaries fail"
        )
    statuses = run.statuses
    for test_id in run.canaries:
        if statuses.get(junit_key(test_id)) not in ("failed", "error"):
            reasons.append(f"canary {test_id} did not fail: {statuses.get(junit_key(test_id), 'missing')}")
    if {junit_key(test_id) for test_id in run.record.reported} != set(statuses):
        reasons.append(f"{len(run.record.reported)} tests reported, the JUnit file names {len(statuses)}")
    if run.record.changes:
        reasons.append(
            f"the run changed pytest or took tests from elsewhere: {', '.join(run.record.changes[:3])}"
        )
    failures = {junit_key(test_id) for test_id in run.record.failures}
    expected = len(task.test_ids) + len(run.canaries)
    if len(statuses) < expected:
        reasons.append(f"{len(statuses)} tests ran, at least {expected} must")
    for test_id in task.fail_to_pass:
        status = statuses.get(junit_key(test_id), "missing")
        # A function that calls `pytest.xfail` makes every test of it fail "as expected".
        if status != "passed" or junit_key(test_id) in failures:
            reasons.append(f"FAIL_TO_PASS {test_id}: {status}{_DENIED if status == 'passed' else ''}")
    for test_id in task.pass_to_pass:
        status = statuses.get(junit_key(test_id), "missing")
        good = status in ("passed", "xfailed", "skipped")
        if not good or junit_key(test_id) in failures:
            reasons.append(f"PASS_TO_PASS {test_id}: {status}{_DENIED if good else ''}")
    return reasons


def _grade_in(sandbox: Sandbox, task: SWETask, patch: str, scratch: str, stash: str) -> Grade:
    # What can be wrong with row or image is found out before any of the agent's code is there.
    setup = f"{task.setup}\n" if task.setup else ""
    pytest = sandbox.run(f"{setup}cd / && python -c 'import pytest'", timeout_s=120.0)
    if pytest.exit_code != 0:
        return invalid(f"the image has no pytest: {pytest.output.strip()[-500:]}")
    grade, evidence = lay_out(sandbox, task, patch, scratch, stash)
    if grade is not None:
        return grade
    run, output, duration_s = _run_tests(sandbox, task, scratch)
    evidence |= {"exit_code": run.exit_code, "timed_out": run.timed_out, "duration_s": round(duration_s, 2)}
    evidence["output"] = output
    statuses = run.statuses or {}
    evidence |= {
        "tests_reported": len(statuses),
        "tests_expected": len(task.test_ids),
        "fail_to_pass": {i: statuses.get(junit_key(i), "missing") for i in task.fail_to_pass},
        "pass_to_pass_not_passed": {
            i: status
            for i in task.pass_to_pass
            if (status := statuses.get(junit_key(i), "missing")) != "passed"
        },
    }
    return verdict(judge(task, run), evidence)


def _run_tests(sandbox: Sandbox, task: SWETask, scratch: str) -> tuple[TestRun, str, float]:
    """Run the row's test files and the canary; what came of it, the output's head and tail, and seconds
    taken."""
    # The canary is named after a file of hidden tests, so that its name tells the code under test nothing.
    tag, token = secrets.token_hex(4), secrets.token_hex(16)
    model = task.fail_to_pass[0].partition("::")[0]
    canary = posixpath.join(
        posixpath.dirname(model), f"{posixpath.basename(model).removesuffix('.py')}_{tag}.py"
    )
    junit, record = f"{scratch}/junit.xml", f"{scratch}/record.json"
    config = {
        "files": [*task.test_files, canary],
        "arguments": list(_PACKAGE_ARGUMENTS) if task.package is not None else [],
        "junit": junit,
        "record": record,
        "token": token,
    }
    sandbox.write_files(
        {
            canary: _CANARY.replace("@TAG@", tag),
            f"{scratch}/run.py": Path(__file__).with_name("pytest_runner.py").read_bytes(),
            f"{scratch}/config.json": json.dumps(config),
        }
    )
    setup = f"{task.setup}\n" if task.setup else ""
    result = sandbox.run(
        f"{setup}exec python -B {scratch}/run.py {scratch}/config.json",
        timeout_s=task.timeout_s,
        half_bytes=_OUTPUT_HALF_BYTES,
    )
    found, statuses, problem = None, None, ""
    if not result.timed_out:
        try:
            if _is_file(sandbox, record):
                found = parse_record(sandbox.read_file(record, max_bytes=MAX_RECORD_BYTES))
            if _is_file(sandbox, junit):
                statuses = parse_junit(sandbox.read_file(junit, max_bytes=MAX_JUNIT_BYTES))
        except ValueError as error:
            problem = str(error)
    canaries = tuple(f"{canary}::test_{tag}_{name}" for name in _CANARY_TESTS)
    run = TestRun(result.exit_code, result.timed_out, token, canaries, found, statuses, problem)
    return run, result.output, result.duration_s


def _is_file(sandbox: Sandbox, path: str) -> bool:
    return sandbox.run(f"test -f {path} && test ! -L {path}", timeout_s=30.0).exit_code == 0
