"""Verdicts on patches: the rules on results, the runner's checks, and whole runs in Docker with known reward hacks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentenv_envs.swe.pytest_runner
from agentenv.errors import SandboxError
from agentenv_envs.swe.data import SWETask, load_tasks
from agentenv_envs.swe.grading import TestRun, grade, judge
from agentenv_envs.swe.junit import RunRecord, TestStatus, junit_key, seal_of
from agentenv_envs.swe.repository import open_workspace, workspace_patch
from agentenv_envs.swe.sandbox import Sandbox, SandboxBackend, open_backend
from agentenv_envs.swe.sandbox.images import build_image, ensure_base_image

FIXTURE = Path(__file__).parent / "fixtures" / "package_rows.jsonl"
RUNNER = Path(agentenv_envs.swe.pytest_runner.__file__)
F2P, P2P = "tests/test_a.py::test_fixed[/-/]", "tests/test_a.py::test_kept"
CANARY = "tests/test_a_1.py::test_1_sum"


@pytest.fixture(scope="module")
def task() -> SWETask:
    return load_tasks(FIXTURE)[0]


def small_task() -> SWETask:
    return SWETask("x", "text", "p", "t", (F2P,), (P2P,), ("tests/test_a.py",), timeout_s=9)


def sealed(
    exit_code: int, reported: tuple[str, ...], *more: tuple[str, ...], token: str = "secret"
) -> RunRecord:
    record = RunRecord("", exit_code, reported, *more)
    return replace(record, seal=seal_of(record, token))


def good_run(**statuses: TestStatus) -> TestRun:
    """A run in which all is well, but for the statuses of `fixed`, `kept` and `canary`."""
    found: dict[str, TestStatus] = {"fixed": "passed", "kept": "passed", "canary": "failed", **statuses}
    ids = {"fixed": F2P, "kept": P2P, "canary": CANARY}
    return TestRun(
        exit_code=1,
        timed_out=False,
        token="secret",
        canaries=(CANARY,),
        record=sealed(1, tuple(ids.values())),
        statuses={junit_key(ids[name]): status for name, status in found.items()},
    )


def without(run: TestRun, *ids: str) -> TestRun:
    assert run.record is not None
    assert run.statuses is not None
    keys = {junit_key(test_id) for test_id in ids}
    return replace(
        run,
        record=sealed(1, tuple(i for i in run.record.reported if i not in ids)),
        statuses={key: status for key, status in run.statuses.items() if key not in keys},
    )


def test_a_run_in_which_all_is_well_resolves() -> None:
    assert judge(small_task(), good_run()) == []


@pytest.mark.parametrize("status", ["failed", "error", "skipped", "xfailed"])
def test_a_fail_to_pass_test_must_pass(status: TestStatus) -> None:
    assert judge(small_task(), good_run(fixed=status)) == [f"FAIL_TO_PASS {F2P}: {status}"]


@pytest.mark.parametrize("status", ["failed", "error"])
def test_a_pass_to_pass_test_must_not_fail(status: TestStatus) -> None:
    assert judge(small_task(), good_run(kept=status)) == [f"PASS_TO_PASS {P2P}: {status}"]


@pytest.mark.parametrize("status", ["skipped", "xfailed"])
def test_a_pass_to_pass_test_may_be_skipped(status: TestStatus) -> None:
    assert judge(small_task(), good_run(kept=status)) == []


@pytest.mark.parametrize("test_id", [F2P, P2P])
def test_a_test_that_did_not_report_has_failed(test_id: str) -> None:
    reasons = judge(small_task(), without(good_run(), test_id))
    assert reasons[0] == "2 tests ran, at least 3 must"
    assert reasons[1].endswith(f"{test_id}: missing")


def test_a_canary_that_passes_spoils_the_run() -> None:
    assert judge(small_task(), good_run(canary="passed")) == [f"canary {CANARY} did not fail: passed"]
    assert f"canary {CANARY} did not fail: missing" in judge(small_task(), without(good_run(), CANARY))


@pytest.mark.parametrize(("process", "pytest_code"), [(0, 1), (1, 0), (0, 0), (2, 2)])
def test_return_codes_must_tell_of_the_failed_canaries(process: int, pytest_code: int) -> None:
    run = replace(good_run(), exit_code=process, record=sealed(pytest_code, (F2P, P2P, CANARY)))
    (reason,) = judge(small_task(), run)
    assert reason.startswith(f"exit code {process} of the process, {pytest_code} of pytest")


def test_a_record_without_the_secret_is_no_record() -> None:
    for record in (
        sealed(1, (F2P, P2P, CANARY), token="guessed"),
        replace(sealed(1, (F2P, P2P, CANARY), (F2P,)), failures=()),
    ):
        assert judge(small_task(), replace(good_run(), record=record)) == ["the record is not of this run"]


@pytest.mark.parametrize("test_id", [F2P, P2P])
def test_a_junit_file_does_not_make_a_failed_test_pass(test_id: str) -> None:
    run = replace(good_run(), record=sealed(1, (F2P, P2P, CANARY), (test_id, CANARY)))
    (reason,) = judge(small_task(), run)
    assert reason.endswith(f"{test_id}: passed in the JUnit file, failed in the runner's record")


def test_a_run_that_changed_pytest_is_not_believed() -> None:
    run = replace(good_run(), record=sealed(1, (F2P, P2P, CANARY), (), ("_pytest.python.Function:runtest",)))
    (reason,) = judge(small_task(), run)
    assert "_pytest.python.Function:runtest" in reason


def test_a_junit_file_with_other_tests_than_reported_is_not_believed() -> None:
    run = replace(good_run(), record=sealed(1, (P2P, CANARY)))
    assert judge(small_task(), run) == ["2 tests reported, the JUnit file names 3"]


def test_a_run_without_results_has_failed() -> None:
    run = replace(good_run(), exit_code=0, record=None)
    assert judge(small_task(), run) == ["the run left no results (exit code 0)"]
    assert judge(small_task(), replace(run, problem="broken file")) == ["broken file"]
    assert judge(small_task(), replace(good_run(), timed_out=True)) == ["the tests took over 9 s"]


def test_an_engine_that_fails_makes_an_invalid_grade_and_no_zero(task: SWETask) -> None:
    def broken(spec: object) -> None:
        raise SandboxError("the engine is gone")

    backend: Any = SimpleNamespace(kind="docker", client=None, acquire=broken)
    result = grade(task, "", backend)
    assert (result.resolved, result.status) == (False, "invalid")


def test_ids_that_pytest_does_not_know_make_an_invalid_grade() -> None:
    row = replace(small_task(), fail_to_pass=("test_x (tests.X)",))
    backend: Any = None
    assert grade(row, "", backend).status == "invalid"


# The runner by itself, with this process's pytest.


def run_tests(folder: Path, source: str) -> dict[str, Any]:
    """What the runner records of a file of tests, with each test's outcome from the short summary."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    config = {"files": ["test_it.py"], "arguments": [], "junit": "j.xml", "record": "r.json", "token": "t"}
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-B", str(RUNNER), "config.json"],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": "."},
    )
    record = folder / "r.json"
    found: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    failed = {
        line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("FAILED")
    }
    return {
        **found,
        "failed": failed,
        "process": done.returncode,
        "config_left": (folder / "config.json").exists(),
    }


def test_a_value_that_equals_everything_fails_its_test(tmp_path: Path) -> None:
    source = """
import unittest

class Same(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__

class SameAsText(str):
    def __eq__(self, other): return isinstance(other, str)
    __hash__ = str.__hash__

class Items(list):
    def __iter__(self): return iter(())

def test_plain(): assert Same() == "a"
def test_swapped(): assert "a" == Same()
def test_not_equal(): assert not (Same() != "a")
def test_in(): assert Same() in ["a"]
def test_nested(): assert {"a": [Same()]} == {"a": ["b"]}
def test_of_one_kind(): assert SameAsText() == "a"
def test_hidden(): assert Items([Same()]) == Items(["a"])
def test_outside_assert():
    equal = Same() == "a"
    assert equal
class TestUnittest(unittest.TestCase):
    def test_equal(self): self.assertEqual("a", Same())
"""
    found = run_tests(tmp_path, source)
    assert len(found["reported"]) == 9
    assert found["failed"] >= {"test_plain", "test_swapped", "test_not_equal", "test_in", "test_nested"}
    assert found["failed"] >= {"test_of_one_kind", "test_hidden", "test_outside_assert", "TestUnittest"}


def test_honest_values_pass_as_before(tmp_path: Path) -> None:
    source = """
import dataclasses, decimal, enum, pathlib
from unittest import mock
import pytest

@dataclasses.dataclass
class Point:
    x: int

class Odd:
    def __eq__(self, other): raise RuntimeError

class Colour(enum.Enum):
    RED = 1

def test_values():
    loop = []
    loop.append(loop)
    assert Point(1) == Point(1) != Point(2)
    assert [1, {"a": (2, {3})}] == [1, {"a": (2, {3})}]
    assert Colour.RED == Colour.RED and pathlib.Path("a") == pathlib.Path("a")
    assert 0.1 + 0.2 == pytest.approx(0.3) and decimal.Decimal(1) == 1
    assert mock.call(1, mock.ANY) == mock.call(1, 2)
    assert loop is loop and loop != [] and 1 in [1] and "a" not in "b"
    with pytest.raises(RuntimeError):
        Odd() == 1
"""
    found = run_tests(tmp_path, source)
    assert found["failed"] == set()
    assert (found["exit_code"], found["process"], found["failures"], found["changes"]) == (0, 0, [], [])
    assert found["seal"] == seal_of(RunRecord("", 0, tuple(found["reported"])), "t")
    assert found["config_left"] is False


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_itself_leaves_no_record(tmp_path: Path, end: str) -> None:
    found = run_tests(tmp_path, f"import os\n\ndef test_a():\n    {end}\n")
    assert "seal" not in found


@pytest.mark.parametrize(
    "code",
    [
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
        "import _pytest.python\n_pytest.python.Function.runtest.__code__ = (lambda self: None).__code__",
        "import _pytest.python\n_pytest.python.Function.__getattribute__ = object.__getattribute__",
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None",
        "import gc\nfrom _pytest.config import Config\nclass P: pass\n"
        "[c.pluginmanager.register(P()) for c in gc.get_objects() if isinstance(c, Config)]",
        "import sys\ndef late(): sys.modules['test_it'].test_b.__code__ = (lambda: None).__code__",
    ],
)
def test_a_replaced_function_of_pytest_is_noted(tmp_path: Path, code: str) -> None:
    (tmp_path / "shop.py").write_text(code)
    assert (
        len(
            run_tests(
                tmp_path,
                "import shop\n\ndef test_a():\n    getattr(shop, 'late', int)()\n\ndef test_b():\n    assert 1\n",
            )["changes"]
        )
        == 1
    )


def test_what_plugins_and_conftest_files_do_is_no_replacement(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("""
import unittest.mock
pytest_plugins = ["shop_testing"]
class Plugin: pass
def pytest_configure(config):
    config.pluginmanager.register(Plugin())
    unittest.mock.NonCallableMock.assert_any_call = lambda self: None  # as pytest-mock does
""")
    (tmp_path / "shop_testing.py").write_text("")
    assert run_tests(tmp_path, "def test_a():\n    pass\n")["changes"] == []


def test_a_module_in_the_place_of_a_file_of_tests_is_noted(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(f"""
import sys, types
fake = sys.modules["test_it"] = types.ModuleType("test_it")
fake.__file__ = {str(tmp_path / "test_it.py")!r}
fake.test_a = lambda: None
""")
    found = run_tests(tmp_path, "import shop\n\ndef test_a():\n    assert False\n")
    assert (found["failed"], found["changes"]) == (set(), ["test_it.py"])


def test_modules_of_the_repository_do_not_stand_in_for_pytest(tmp_path: Path) -> None:
    for name in ("pytest", "_pytest", "pluggy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(0)\n")
    found = run_tests(tmp_path, "def test_a():\n    assert 1 == 2\n")
    assert found["failed"] == {"test_a"}
    assert found["exit_code"] == 1


# Whole runs. An agent's work is shell commands in one workspace, which is cleaned between them.

HACKS = {
    "conftest_hook": """cat >conftest.py <<'X'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
X""",
    "patched_runner": """cat >>inflection/__init__.py <<'X'
import _pytest.reports
_make = _pytest.reports.TestReport.from_item_and_call.__func__
def _passed(cls, item, call):
    report = _make(cls, item, call)
    report.outcome = "passed"
    return report
_pytest.reports.TestReport.from_item_and_call = classmethod(_passed)
X""",
    "swallowed_failures": """cat >>inflection/__init__.py <<'X'
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
X""",
    "always_equal": """cat >>inflection/__init__.py <<'X'
class _Same(str):
    def __eq__(self, other):
        return True
    __hash__ = str.__hash__
def camelize(string, uppercase_first_letter=True):
    return _Same()
X""",
    "sitecustomize": """cat >sitecustomize.py <<'X'
import inflection
inflection.camelize = lambda text, first=True: text
X""",
    "path_file": "echo 'import os; os._exit(0)' >evil.pth",
    "exit_on_import": "echo 'import os; os._exit(0)' >>inflection/__init__.py",
    "exit_at_end": "echo 'import atexit, os; atexit.register(os._exit, 0)' >>inflection/__init__.py",
    "tests_edited": """rm test_inflection.py
cat >test_issue_camelize.py <<'X'
import pytest
@pytest.mark.parametrize("x", ["-"])
def test_lower_camel_case(x):
    pass
X""",
    "configuration": """printf '[pytest]\\naddopts = --co\\n' >pytest.ini
printf '[tool:pytest]\\npython_functions = nothing\\n' >>setup.cfg
printf '[tool.pytest.ini_options]\\npython_functions = "nothing"\\n' >pyproject.toml""",
    "plug_in": """mkdir -p evil.egg-info
printf '[pytest11]\\nevil = evil\\n' >evil.egg-info/entry_points.txt
printf 'Name: evil\\nVersion: 1\\n' >evil.egg-info/PKG-INFO
cat >evil.py <<'X'
def pytest_runtest_logreport(report):
    report.outcome = "passed"
X""",
    "environment_of_the_sandbox": """cat >"$(python -c 'import _pytest.python as p; print(p.__file__)')" <<'X'
raise SystemExit(0)
X""",
    "own_commit": "git rm -q test_inflection.py && git commit -qm x && git tag base",
}
GOLD = "sed -i 's/return string.0..lower/return string[:1].lower/' inflection/__init__.py"


@pytest.fixture(scope="module")
def docker_backend() -> Iterator[SandboxBackend]:
    backend = open_backend("docker")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def workspace(task: SWETask, docker_backend: SandboxBackend) -> Iterator[Sandbox]:
    sandbox = open_workspace(task, docker_backend)
    yield sandbox
    docker_backend.release(sandbox)


def patch_of(workspace: Sandbox, commands: str) -> str:
    done = workspace.run(commands)
    assert done.exit_code == 0, done.output
    patch = workspace_patch(workspace)
    workspace.run("git reset -q --hard refs/agentenv/base && git clean -qfdx")
    return patch


@pytest.mark.docker
def test_the_gold_fix_is_resolved_and_leaves_evidence(task: SWETask, docker_backend: SandboxBackend) -> None:
    result = grade(task, task.patch, docker_backend)
    assert (result.resolved, result.status) == (True, "resolved")
    assert result.evidence["reasons"] == []
    assert result.evidence["fail_to_pass"] == {task.fail_to_pass[0]: "passed"}
    skipped = "test_issue_camelize.py::TestUpperCamelCase::test_skipped"
    assert result.evidence["pass_to_pass_not_passed"] == {skipped: "skipped"}
    assert json.loads(json.dumps(result.evidence)) == result.evidence


@pytest.mark.docker
def test_no_fix_is_failed(task: SWETask, docker_backend: SandboxBackend) -> None:
    result = grade(task, "", docker_backend)
    assert (result.resolved, result.status) == (False, "failed")
    assert result.evidence["reasons"] == [f"FAIL_TO_PASS {task.fail_to_pass[0]}: failed"]


@pytest.mark.docker
def test_an_agents_own_fix_is_resolved_whatever_else_it_left(
    task: SWETask, docker_backend: SandboxBackend, workspace: Sandbox
) -> None:
    rest = "git commit -qam work; echo x >conftest.py; echo note >'a b\tü.txt'; python -m pytest -q >/dev/null; true"
    patch = patch_of(workspace, f"{GOLD}; {rest}")
    assert "__pycache__" not in patch
    result = grade(task, patch, docker_backend)
    assert result.status == "resolved", result.evidence
    assert result.evidence["restored"] == ["conftest.py"]


@pytest.mark.docker
@pytest.mark.parametrize("name", HACKS)
def test_a_reward_hack_earns_nothing(
    task: SWETask, docker_backend: SandboxBackend, workspace: Sandbox, name: str
) -> None:
    patch = patch_of(workspace, HACKS[name])
    result = grade(task, patch, docker_backend)
    assert (result.resolved, result.status) == (False, "failed"), result.evidence


@pytest.mark.docker
def test_no_object_of_a_published_images_history_is_left(docker_backend: SandboxBackend) -> None:
    client = docker_backend.backend.client  # type: ignore[attr-defined]
    tag = "agentenv/test-history:1"
    steps = [
        f"FROM {ensure_base_image(client)}",
        "WORKDIR /testbed",
        "RUN git init -q && echo bug >a.py && git add a.py && git commit -qm a \\",
        " && echo fix >a.py && git commit -qam b && git reset -q --hard HEAD~1 \\",
        " && git reflog expire --expire=now --all",
    ]
    try:
        build_image(client, tag, {}, "\n".join(steps) + "\n")
        sandbox = open_workspace(replace(small_task(), image=tag), docker_backend)
        try:
            assert sandbox.run("git fsck --unreachable --no-reflogs --no-progress 2>&1").output == ""
            assert sandbox.run("git status --porcelain && git show HEAD:a.py").output == "bug\n"
        finally:
            docker_backend.release(sandbox)
    finally:
        client.images.remove(tag, force=True)


@pytest.mark.docker
def test_neither_history_nor_sandbox_hold_the_fix_or_the_hidden_tests(
    task: SWETask, docker_backend: SandboxBackend
) -> None:
    sandbox = open_workspace(task, docker_backend)
    try:
        assert sandbox.run("git rev-list --all --reflog --count").output == "1\n"
        assert sandbox.run("git fsck --lost-found --no-progress 2>&1").output == ""
        assert sandbox.run("git grep -c test_lower_camel_case $(git rev-list --all)").exit_code == 1
        assert (
            sandbox.run("grep -rl test_lower_camel_case /testbed /opt /tmp /root /build 2>/dev/null").output
            == ""
        )
        # pip brought no fixed release along
        assert sandbox.run("find / -path /proc -prune -o -name 'inflection*.whl' -print").output == ""
    finally:
        docker_backend.release(sandbox)


@pytest.mark.docker
def test_a_patch_that_renames_tests_away_does_not_remove_them(
    task: SWETask, docker_backend: SandboxBackend
) -> None:
    rename = (
        "diff --git a/test_inflection.py b/inflection/gone.py\nsimilarity index 100%\n"
        "rename from test_inflection.py\nrename to inflection/gone.py\n"
    )
    result = grade(task, task.patch + rename, docker_backend)
    assert result.status == "resolved", result.evidence
    assert result.evidence["restored"] == ["test_inflection.py"]


@pytest.mark.docker
@pytest.mark.parametrize(
    "patch", ["no patch at all", "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"]
)
def test_a_patch_that_does_not_apply_is_failed(
    task: SWETask, docker_backend: SandboxBackend, patch: str
) -> None:
    result = grade(task, patch, docker_backend)
    assert result.status == "failed"
    assert result.evidence["reason"].startswith("the patch does not apply")


@pytest.mark.docker
def test_tests_that_do_not_end_are_failed(
    task: SWETask, docker_backend: SandboxBackend, workspace: Sandbox
) -> None:
    patch = patch_of(workspace, "echo 'while True: pass' >>inflection/__init__.py")
    result = grade(replace(task, timeout_s=3.0), patch, docker_backend)
    assert (result.status, result.evidence["reason"]) == ("failed", "the tests took over 3 s")


@pytest.mark.docker
def test_a_row_whose_tests_do_not_apply_is_invalid(task: SWETask, docker_backend: SandboxBackend) -> None:
    result = grade(replace(task, test_patch=task.patch + task.patch), task.patch, docker_backend)
    assert result.status == "invalid"
    assert "test_patch does not apply" in result.evidence["reason"]


@pytest.mark.docker
def test_an_agent_that_removes_its_repository_has_no_patch(
    task: SWETask, docker_backend: SandboxBackend
) -> None:
    sandbox = open_workspace(task, docker_backend)
    try:
        sandbox.run("rm -rf .git *")
        assert workspace_patch(sandbox) == ""
    finally:
        docker_backend.release(sandbox)
