"""Runs of a release's tests in one warm sandbox, with and without an edit.

Invariants:
- Before and after each call the repository is as it was when the sandbox was opened: what tests leave is removed.
- `full_run` is the grading runner itself, on the files that a grading run is given; its statuses are those that
  a row's grade will see. `screen` is faster and only finds candidates.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import SandboxError
from agentenv_envs.swe.junit import MAX_JUNIT_BYTES, MAX_RECORD_BYTES, junit_key, parse_junit, parse_record
from agentenv_envs.swe.repository import scratch_folder
from agentenv_envs.swe.sandbox import Sandbox

__all__ = ["Bench", "Job", "Screened"]

# What grading passes for rows of a release; see `grading`.
ARGUMENTS = ("-W", "ignore::DeprecationWarning", "-W", "ignore::PendingDeprecationWarning")
_RUNNER = Path(__file__).parents[1] / "pytest_runner.py"
_SCREENER = Path(__file__).with_name("screen_runner.py")
_GRACE_S = 60.0
_MAX_SOURCE_BYTES = 1_000_000


@dataclass(frozen=True)
class Job:
    """One run of some tests.

    Attributes:
        id: names its result.
        tests: pytest ids or files.
        timeout_s: seconds that it may take.
        path: file of the repository that is replaced; "" for none.
        source: its content then.
        calls: whether calls of the repository's functions are noted.
    """

    id: str
    tests: Sequence[str]
    timeout_s: float
    path: str = ""
    source: str = ""
    calls: bool = False


@dataclass(frozen=True)
class Screened:
    """What came of a job.

    Attributes:
        exit_code: of pytest; None where the run took too long or ended its own process.
        outcomes: "passed", "failed" or "skipped" by pytest id.
        failures: what failing tests saw, by pytest id; see `screen_runner`.
        calls: by pytest id ("" outside of tests): [file, first line, name, called by the test's own file].
    """

    exit_code: int | None
    outcomes: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calls: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)


class Bench:
    """A sandbox with the release's repository.

    Args:
        sandbox: with the repository in its workdir, a git repository whose one commit holds every file.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def files(self) -> list[str]:
        """Paths of the repository's Python files, sorted."""
        result = self._run("git ls-files -z -- '*.py' | tr '\\0' '\\n'", half_bytes=4_000_000)
        return sorted(name for name in result.split("\n") if name and '"' not in name)

    def read(self, path: str) -> str | None:
        """A file's text; None where it is not UTF-8, or larger than a megabyte."""
        data = self._sandbox.read_file(path, max_bytes=_MAX_SOURCE_BYTES + 1)
        try:
            return data.decode() if len(data) <= _MAX_SOURCE_BYTES else None
        except UnicodeDecodeError:
            return None

    def screen(self, jobs: Sequence[Job]) -> dict[str, Screened]:
        """Run jobs one after the other; results by the jobs' ids.

        Raises:
            SandboxError: the sandbox failed, or the tests' Python can't run the runner.
        """
        scratch = scratch_folder()
        out = f"{scratch}/out.jsonl"
        config = {"jobs": [vars(job) for job in jobs], "arguments": ARGUMENTS, "out": out}
        self._sandbox.write_files(
            {f"{scratch}/screen.py": _SCREENER.read_bytes(), f"{scratch}/config.json": json.dumps(config)}
        )
        limit_s = sum(job.timeout_s for job in jobs) + _GRACE_S
        result = self._sandbox.run(
            f"python -B {scratch}/screen.py {scratch}/config.json", timeout_s=limit_s, half_bytes=4000
        )
        try:
            lines = self._sandbox.read_file(out, max_bytes=MAX_RECORD_BYTES * 4).decode().splitlines()
        except FileNotFoundError:
            raise SandboxError(f"the tests can't be run: {result.output.strip()[-500:]}") from None
        finally:
            self._clean(scratch)
        found = {}
        for line in lines:
            record = json.loads(line)
            found[record["id"]] = Screened(
                record["exit_code"], record["tests"], record["failures"], record["calls"]
            )
        return {job.id: found.get(job.id, Screened(None)) for job in jobs}

    def full_run(
        self, test_files: Iterable[str], *, timeout_s: float, changes: Mapping[str, str] | None = None
    ) -> dict[str, str] | None:
        """Status of every test of these files by pytest id, as grading sees it; None where a run took too long or
        left no results.

        Args:
            test_files: what pytest is given.
            timeout_s: seconds that the run may take.
            changes: files that are replaced meanwhile, and their content.
        """
        scratch, token = scratch_folder(), secrets.token_hex(16)
        junit, record = f"{scratch}/junit.xml", f"{scratch}/record.json"
        config = {
            "files": list(test_files),
            "arguments": ARGUMENTS,
            "junit": junit,
            "record": record,
            "token": token,
        }
        self._sandbox.write_files(
            {
                **(changes or {}),
                f"{scratch}/run.py": _RUNNER.read_bytes(),
                f"{scratch}/config.json": json.dumps(config),
            }
        )
        self._sandbox.run(
            f"exec python -B {scratch}/run.py {scratch}/config.json", timeout_s=timeout_s, half_bytes=4000
        )
        try:
            reported = parse_record(self._sandbox.read_file(record, max_bytes=MAX_RECORD_BYTES)).reported
            statuses = parse_junit(self._sandbox.read_file(junit, max_bytes=MAX_JUNIT_BYTES))
        except (FileNotFoundError, ValueError):
            return None
        finally:
            self._clean(scratch)
        return {name: statuses.get(junit_key(name), "missing") for name in reported}

    def _clean(self, scratch: str) -> None:
        """Put the repository back to its commit."""
        self._run(f"rm -rf {scratch} && git checkout -q -f HEAD -- . && git clean -fdxq")

    def _run(self, command: str, *, half_bytes: int = 4000) -> str:
        result = self._sandbox.run(command, timeout_s=300.0, half_bytes=half_bytes)
        if result.exit_code != 0:
            raise SandboxError(f"the repository can't be prepared: {result.output.strip()[-500:]}")
        return result.output
