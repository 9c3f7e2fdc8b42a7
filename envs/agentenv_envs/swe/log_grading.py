"""Grading by the log of a row's own test command: SWE-bench, SWE-Gym, SWE-rebench, SWE-smith and R2E-Gym.

Invariants:
- Only what stands between two secret lines counts, which the script prints before and after the tests; where pytest
  writes a short summary, only the last one does. So output of the code under test can't pass for results, other than
  by a process that ends itself.
- A FAIL_TO_PASS test passed, or failed as its file expects; a PASS_TO_PASS test may also be skipped. A test that is
  missing has failed, in every data set.
- R2E-Gym's map of statuses matches exactly: no test is missing, none is new.
- The test command's exit code and pytest's JUnit file must not contradict the log.

Source of the rules: SWE-bench 5.0 `harness/grading.py`; R2E-Gym `agenthub/runtime/docker.py`. Departures, each of them
stricter: the secret lines, the last summary, the JUnit file; and a missing test is no passed test in SWE-smith either.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .junit import MAX_JUNIT_BYTES, TestKey, TestStatus, junit_key, parse_junit
from .log_parsers import PARSERS, pytest_summary, resolve_id
from .sandbox import Sandbox
from .task import SWETask, file_of
from .test_commands import commands_between, marked_script
from .verdict import Grade, invalid, lay_out, verdict

__all__ = ["LogRun", "grade_by_log", "judge_log", "output_of_tests", "runs_pytest", "statuses_of"]

_LOG_BYTES = 24_000_000  # the channel keeps 32 MiB
_OUTPUT_CHARS = 6000
_MAX_SHOWN = 50
# Where `pytest -rA` is sure to have listed every test in its short summary.
_SUMMARY_PARSERS = ("pytest", "pytest_options", "pytest_v2", "matplotlib")
_PYTEST_PARSERS = (*_SUMMARY_PARSERS, "pytest_verbose", "seaborn", "r2e")
_GOOD = ("PASSED", "XFAIL")


@dataclass(frozen=True)
class LogRun:
    """What one run of a row's script left.

    Attributes:
        timed_out: whether the run was cut off.
        output: what it wrote, whole.
        total_bytes: how much it wrote, however much of it is kept.
        start: the secret line before the tests.
        end: the secret line after them, without the exit code.
        junit: statuses by JUnit key; None where pytest left no file, or a broken one.
        needs_junit: whether the command is pytest's, which was told to leave one.
        has_xfail: whether files of tests name expected failures; if not, only the code under test can have called
            `pytest.xfail`.
    """

    timed_out: bool
    output: str
    total_bytes: int
    start: str
    end: str
    junit: Mapping[TestKey, TestStatus] | None = None
    needs_junit: bool = False
    has_xfail: bool = True


def grade_by_log(sandbox: Sandbox, task: SWETask, patch: str, scratch: str, stash: str) -> Grade:
    """Judge a patch by the log of the row's script.

    Args:
        sandbox: from `open_workspace(..., stash=stash)`, untouched since.
        task: a row with a `log_parser`.
        patch: the agent's.
        scratch: from `scratch_folder`.
        stash: where `open_workspace` put the hidden files.
    """
    start, end = f"tests {secrets.token_hex(16)}", f"done {secrets.token_hex(16)}"
    script = marked_script(task.eval_script, start, end)
    if script is None:
        return invalid("eval_script has not one marker line before the tests and one after them")
    grade, evidence = lay_out(sandbox, task, patch, scratch, stash)
    if grade is not None:
        return grade
    # There is one commit here, under another name than the row's.
    if re.fullmatch(r"[0-9a-f]{7,64}", task.base_commit):
        script = script.replace(task.base_commit, "refs/agentenv/base")
    needs_junit = runs_pytest(task)
    if needs_junit and task.log_parser == "r2e":  # some repositories have a runner of their own
        needs_junit = (
            sandbox.run("grep -qsw pytest run_tests.sh /run_tests.sh", timeout_s=30.0).exit_code == 0
        )
    has_xfail = True
    if task.test_files:
        names = shlex.join(f"./{name}" for name in task.test_files)
        has_xfail = sandbox.run(f"grep -qsriE 'xfail|expectedFailure' {names}", timeout_s=60.0).exit_code == 0
    junit = f"{task.workdir}/{scratch}/junit.xml"
    options = "export PIP_RETRIES=0 PIP_NO_INPUT=1\n"  # there is no network: what a script would fetch fails at once
    if needs_junit:
        options += f"export PYTEST_ADDOPTS='--junitxml={junit}'\n"
    sandbox.write_files({f"{scratch}/eval.sh": options + script})
    result = sandbox.run(
        f"bash {scratch}/eval.sh </dev/null", timeout_s=task.timeout_s, half_bytes=_LOG_BYTES // 2
    )
    found = None
    if needs_junit and not result.timed_out and _is_file(sandbox, junit):
        try:
            found = parse_junit(sandbox.read_file(junit, max_bytes=MAX_JUNIT_BYTES + 1))
        except ValueError as error:
            evidence["junit"] = str(error)
    run = LogRun(
        result.timed_out, result.output, result.total_bytes, start, end, found, needs_junit, has_xfail
    )
    reasons, statuses = judge_log(task, run)
    output, exit_code = output_of_tests(run)
    evidence |= {
        "exit_code": exit_code,
        "timed_out": run.timed_out,
        "duration_s": round(result.duration_s, 2),
    }
    evidence["output"] = _cut(output if output is not None else run.output)
    evidence |= {"tests_reported": len(statuses), **_shown_statuses(task, statuses)}
    return verdict(reasons, evidence)


def judge_log(task: SWETask, run: LogRun) -> tuple[list[str], dict[str, str]]:
    """Every reason why a run does not show that the patch resolves the task, and the statuses that it reports.

    A pure function of the row and of what the run left.
    """
    if run.timed_out:
        return [f"the tests took over {task.timeout_s:.0f} s"], {}
    if run.total_bytes > _LOG_BYTES:
        return [f"the log has {run.total_bytes} bytes, over the limit of {_LOG_BYTES}"], {}
    output, exit_code = output_of_tests(run)
    if output is None:
        return ["the tests did not run to their end: a marker line is missing in the log"], {}
    statuses = statuses_of(task, output)
    if not statuses:
        return [f"the log names no test (exit code {exit_code})"], {}
    reasons = []
    # A log without failures of a command that failed does not tell of the run that was.
    if exit_code != 0 and not {"FAILED", "ERROR"} & set(statuses.values()):
        reasons.append(f"exit code {exit_code}, though the log has no failed test")
    if run.needs_junit and run.junit is None:
        reasons.append("pytest left no JUnit file: it did not end as it should")
    reasons += _exact(task, statuses) if task.expected else _as_expected(task, statuses, run.has_xfail)
    if run.junit is not None:
        reasons += _contradicted(task, run.junit)
    return reasons, statuses


def statuses_of(task: SWETask, output: str) -> dict[str, str]:
    """Statuses of the tests in the output of a row's tests."""
    # pytest's own tests print summaries, and some expected names were taken from these.
    if task.log_parser in _SUMMARY_PARSERS and task.repo != "pytest-dev/pytest":
        summary = pytest_summary(output)
        if summary is not None:
            return PARSERS[task.log_parser](summary)
    return PARSERS[task.log_parser](output)


def output_of_tests(run: LogRun) -> tuple[str | None, int | None]:
    """What stands between the secret lines, and the exit code that the second brings; None where one is missing."""
    begin = re.search(rf"(?m)^{re.escape(run.start)}$", run.output)
    finish = re.search(rf"(?m)^{re.escape(run.end)} (\d+)$", run.output)
    if begin is None or finish is None or finish.start() < begin.end():
        return None, None
    return run.output[begin.end() : finish.start()], int(finish[1])


def _as_expected(task: SWETask, statuses: Mapping[str, str], has_xfail: bool) -> list[str]:
    """SWE-bench's rule."""
    reasons = []
    for name, ids, good in (
        ("FAIL_TO_PASS", task.fail_to_pass, _GOOD if has_xfail else _GOOD[:1]),
        ("PASS_TO_PASS", task.pass_to_pass, (*_GOOD, "SKIPPED")),
    ):
        for test_id in ids:
            key = resolve_id(test_id, statuses)
            status = "missing" if key is None else statuses[key]
            if status not in good:
                reasons.append(f"{name} {test_id}: {status}")
    return reasons


def _exact(task: SWETask, statuses: Mapping[str, str]) -> list[str]:
    """R2E-Gym's rule."""
    expected = dict(task.expected)
    reasons = [
        f"{test}: {statuses.get(test, 'missing')}, expected {status}"
        for test, status in expected.items()
        if statuses.get(test) != status
    ]
    return reasons + [
        f"{test}: {status}, not expected" for test, status in statuses.items() if test not in expected
    ]


def _contradicted(task: SWETask, junit: Mapping[TestKey, TestStatus]) -> list[str]:
    """Tests that must pass and did not by pytest's JUnit file.

    Tests are compared without their parameters, which logs and lists cut short; one of them must have passed.
    """
    wanted = [test for test, status in task.expected if status == "PASSED" and test]
    wanted += [".".join(junit_key(test)) for test in task.fail_to_pass if file_of(test) is not None]
    passed = {
        f".{case}.{name}".partition("[")[0]
        for (case, name), status in junit.items()
        if status in ("passed", "xfailed")
    }
    tails = {name[dot:] for name in passed for dot, character in enumerate(name) if character == "."}
    return [
        f"{test}: passed in the log, but not in the JUnit file"
        for test in wanted
        if f".{test}".partition("[")[0] not in tails
    ]


def _shown_statuses(task: SWETask, statuses: Mapping[str, str]) -> dict[str, Any]:
    """The part of the evidence that names tests."""
    if task.expected:
        return {"tests_expected": len(task.expected)}

    def status(test_id: str) -> str:
        key = resolve_id(test_id, statuses)
        return "missing" if key is None else statuses[key]

    kept = {i: s for i in task.pass_to_pass if (s := status(i)) != "PASSED"}
    return {
        "tests_expected": len(task.test_ids),
        "fail_to_pass": {i: status(i) for i in task.fail_to_pass},
        "pass_to_pass_not_passed": dict(list(kept.items())[:_MAX_SHOWN]),
    }


def runs_pytest(task: SWETask) -> bool:
    """Whether the script runs pytest itself, with options that we may add to; of R2E-Gym, whether it may."""
    if task.log_parser == "r2e":
        return True
    # Options would reach the runs of pytest within its own tests; tox passes none on.
    command = re.search(r"\bpytest\b|\btox\b", commands_between(task.eval_script))
    return (
        task.log_parser in _PYTEST_PARSERS
        and task.repo != "pytest-dev/pytest"
        and command is not None
        and command[0] == "pytest"
    )


def _is_file(sandbox: Sandbox, path: str) -> bool:
    return sandbox.run(f"test -f {path} && test ! -L {path}", timeout_s=30.0).exit_code == 0


def _cut(text: str) -> str:
    """Head and tail of a long text."""
    if len(text) <= 2 * _OUTPUT_CHARS:
        return text
    left_out = len(text) - 2 * _OUTPUT_CHARS
    return f"{text[:_OUTPUT_CHARS]}\n[... {left_out} characters left out ...]\n{text[-_OUTPUT_CHARS:]}"
