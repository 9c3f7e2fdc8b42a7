"""Runs many small test runs in one sandbox; copied there as one file, never imported by the library.

    python screen_runner.py CONFIG.json

Pytest is imported once; each job then has a fork of this process, which sees the job's file in place of the
original, runs the job's tests and is killed with all that it started when its time is over. One JSON object per
job goes to the configured file: {"id", "exit_code" (None after a time-out), "tests": {id: outcome},
"failures": {id: what was seen}, "calls": {id: [[file, line, name, called by the test's file], ...]}}.

The code that runs here is a release's own with one edit, not an agent's: `pytest_runner` is the one that judges.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from typing import Any

MAX_TEXT = 400
MAX_FAILURES = 12
MAX_CALLS = 2000


def shown(value: Any) -> str:
    """A value in words of limited length, whatever its own `repr` does."""
    try:
        text = repr(value)
    except Exception:
        text = "<" + type(value).__name__ + ">"
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


class Reporter:
    """Plug-in that notes outcomes, what failing tests saw, and (where asked) which functions a test calls."""

    def __init__(self, calls_under: str = "") -> None:
        self.outcomes: dict[str, str] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.calls: dict[str, list[list[Any]]] = {}
        self.under = calls_under
        self.now = ""
        self.test_file = ""
        self.comparison: dict[str, str] = {}
        self.seen: set[Any] = set()

    def pytest_runtest_protocol(self, item: Any) -> None:
        """A test begins."""
        self.now = item.nodeid
        self.test_file = os.path.realpath(str(item.fspath))
        self.comparison, self.seen = {}, set()

    def pytest_assertrepr_compare(self, op: str, left: Any, right: Any) -> None:
        """Note the operands of a comparison that does not hold."""
        self.comparison = {"op": op, "left": shown(left), "right": shown(right)}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Note what a failing phase of a test saw."""
        if call.excinfo is None or len(self.failures) >= MAX_FAILURES or item.nodeid in self.failures:
            return
        error = call.excinfo.value
        spec = getattr(item, "callspec", None)
        frames = [str(entry.path) for entry in call.excinfo.traceback]
        self.failures[item.nodeid] = {
            "type": type(error).__name__,
            "message": (str(error) if len(str(error)) < 4000 else "")[:2000],
            "compare": self.comparison if isinstance(error, AssertionError) else {},
            "in_test": bool(frames) and os.path.realpath(frames[-1]) == self.test_file,
            "parameters": {k: shown(v) for k, v in spec.params.items()} if spec is not None else {},
        }

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of a test's phases."""
        before = self.outcomes.get(report.nodeid)
        if (
            report.outcome == "failed"
            or before is None
            or (before == "passed" and report.outcome == "skipped")
        ):
            self.outcomes[report.nodeid] = report.outcome

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        """Note a call of the code under test."""
        if event != "call":
            return
        code = frame.f_code
        if (code, self.now) in self.seen:
            return
        name = os.path.realpath(code.co_filename)
        if not name.startswith(self.under):
            self.seen.add((code, self.now))
            return
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        direct = bool(self.now) and os.path.realpath(caller) == self.test_file
        self.seen.add((code, self.now))
        calls = self.calls.setdefault(self.now, [])
        if len(calls) < MAX_CALLS:
            module = str(frame.f_globals.get("__name__", ""))
            qualified = getattr(code, "co_qualname", code.co_name)
            calls.append([name[len(self.under) :], code.co_firstlineno, module + "." + qualified, direct])


def run_tests(job: dict[str, Any], arguments: list[str], out: str) -> None:
    """The child's part: run the job's tests and append what came of them."""
    os.setsid()
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    pytest: Any = importlib.import_module("pytest")
    root = os.path.join(os.path.realpath(os.getcwd()), "")
    reporter = Reporter(root)
    if job.get("calls"):
        threading.setprofile(reporter.profile)
        sys.setprofile(reporter.profile)
    code = int(pytest.main(arguments + job["tests"], plugins=[reporter]))
    sys.setprofile(None)
    record = {"id": job["id"], "exit_code": code, "tests": reporter.outcomes}
    record["failures"], record["calls"] = reporter.failures, reporter.calls
    write_record(out, record)


def write_record(out: str, record: dict[str, Any]) -> None:
    """Append one line."""
    with open(out, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(record) + "\n")


def run_job(job: dict[str, Any], arguments: list[str], out: str) -> None:
    """Put the job's file in place, run its tests in a fork, put the original back."""
    path, original = job.get("path"), b""
    if path:
        with open(path, "rb") as file:
            original = file.read()
        with open(path, "wb") as file:
            file.write(job["source"].encode("utf-8"))
    size = os.path.getsize(out) if os.path.exists(out) else 0
    try:
        child = os.fork()
        if child == 0:
            try:
                run_tests(job, arguments, out)
            finally:
                os._exit(0)
        deadline, done, pause = time.monotonic() + job["timeout_s"], False, 0.002
        while not done and time.monotonic() < deadline:
            done = os.waitpid(child, os.WNOHANG)[0] != 0
            time.sleep(0 if done else pause)
            pause = min(pause * 1.5, 0.05)
        with contextlib.suppress(OSError):  # all of its group may have ended
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
    finally:
        if path:
            with open(path, "wb") as file:
                file.write(original)
    if not os.path.exists(out) or os.path.getsize(out) == size:
        write_record(out, {"id": job["id"], "exit_code": None, "tests": {}, "failures": {}, "calls": {}})


def main() -> None:
    """Run what the configuration says."""
    with open(sys.argv[1], encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    here, workdir = os.path.dirname(os.path.abspath(__file__)), os.path.join(os.getcwd(), "")
    paths = [path for path in map(os.path.abspath, filter(None, sys.path)) if path != here]
    inside = [path for path in paths if os.path.join(path, "").startswith(workdir)]
    sys.path[:] = [path for path in paths if path not in inside] + inside
    sys.argv[:] = ["pytest"]
    sys.dont_write_bytecode = True
    for name in ("pytest", "_pytest.assertion.rewrite", "_pytest.junitxml", "difflib", "unittest.mock"):
        importlib.import_module(name)
    arguments = ["-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", workdir, "--assert=rewrite"]
    arguments += ["--continue-on-collection-errors", "--maxfail=0", "--tb=short", "-q"]
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", "0"]
    arguments += config["arguments"]
    out = os.path.abspath(config["out"])
    for job in config["jobs"]:
        run_job(job, arguments, out)


if __name__ == "__main__":
    main()
