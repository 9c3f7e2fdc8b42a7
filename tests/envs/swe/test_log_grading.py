"""Verdicts by the log of a row's own command: the rules, and whole runs in Docker of each kind of row."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv_envs.swe.data import SWETask, parse_task
from agentenv_envs.swe.env import SWEEnv
from agentenv_envs.swe.grading import Grade, grade, open_workspace, workspace_patch
from agentenv_envs.swe.junit import TestStatus, junit_key
from agentenv_envs.swe.log_grading import LogRun, judge_log, output_of_tests, runs_pytest
from agentenv_envs.swe.log_parsers import STATUSES
from agentenv_envs.swe.sandbox import SandboxBackend, open_backend
from agentenv_envs.swe.sandbox.images import build_image, ensure_base_image
from agentenv_envs.swe.test_commands import eval_script, marked_script

F2P, P2P = "tests/test_a.py::test_fixed", "tests/test_a.py::test_kept"
HEADING = "=== short test summary info ==="
GOOD = f"{HEADING}\nPASSED {F2P}\nPASSED {P2P}\n"


def task(**changes: Any) -> SWETask:
    fields = {"log_parser": "pytest", "eval_script": eval_script("pytest -rA"), "timeout_s": 9, **changes}
    return SWETask("x", "text", "p", "t", (F2P,), (P2P,), ("tests/test_a.py",), **fields)


def run(log: str, exit_code: int = 0, **changes: Any) -> LogRun:
    output = f"PASSED early\ntests 1\n{log}\ndone 1 {exit_code}\nPASSED late\n"
    return replace(LogRun(False, output, len(output), "tests 1", "done 1"), **changes)


def reasons(log: str, exit_code: int = 0, row: SWETask | None = None, **changes: Any) -> list[str]:
    return judge_log(row or task(), run(log, exit_code, **changes))[0]


def test_a_log_in_which_all_is_well_resolves() -> None:
    assert reasons(GOOD) == []


@pytest.mark.parametrize(
    ("status", "good"), [("PASSED", True), ("XFAIL", True), ("SKIPPED", False), ("ERROR", False)]
)
def test_a_fail_to_pass_test_must_pass(status: str, good: bool) -> None:
    found = reasons(f"{HEADING}\n{status} {F2P}\nPASSED {P2P}\n")
    assert found == ([] if good else [f"FAIL_TO_PASS {F2P}: {status}"])


def test_an_expected_failure_that_no_file_of_tests_names_is_no_pass() -> None:
    log = f"{HEADING}\nXFAIL {F2P}\nXFAIL {P2P}\n"
    assert reasons(log, has_xfail=False) == [f"FAIL_TO_PASS {F2P}: XFAIL"]


@pytest.mark.parametrize(("status", "good"), [("XFAIL", True), ("SKIPPED", True), ("FAILED", False)])
def test_a_pass_to_pass_test_may_be_skipped(status: str, good: bool) -> None:
    found = reasons(f"{HEADING}\nPASSED {F2P}\n{status} {P2P}\n")
    assert found == ([] if good else [f"PASS_TO_PASS {P2P}: {status}"])


@pytest.mark.parametrize("schema", ["swe-bench", "swe-smith"])
def test_a_missing_test_has_failed_in_every_data_set(schema: str) -> None:
    assert reasons(f"PASSED {F2P}\n", row=task(schema=schema)) == [f"PASS_TO_PASS {P2P}: missing"]


def test_an_expected_id_that_is_cut_short_is_found() -> None:
    row = replace(task(), fail_to_pass=("tests/test_a.py::test_fixed[log(a",))
    log = f"PASSED {P2P}\nPASSED tests/test_a.py::test_fixed[log(a,b)]\n"
    assert reasons(log, row=row) == []
    log += "FAILED tests/test_a.py::test_fixed[log(a,c)]\n"
    assert reasons(log, 1, row=row) == ["FAIL_TO_PASS tests/test_a.py::test_fixed[log(a: missing"]


def test_lines_before_the_last_summary_do_not_count() -> None:
    spoofed = f"PASSED {F2P}\n{HEADING}\nPASSED {F2P}\n{HEADING}\nERROR tests/test_a.py\nPASSED {P2P}\n"
    assert reasons(spoofed, 1) == [f"FAIL_TO_PASS {F2P}: missing"]


def test_pytests_own_tests_are_read_whole() -> None:
    row = task(repo="pytest-dev/pytest")
    assert reasons(f"PASSED {F2P}\n{HEADING}\nPASSED {P2P}\n", row=row) == []


def test_a_command_that_failed_without_a_failed_test_is_not_believed() -> None:
    assert reasons(GOOD, 1) == ["exit code 1, though the log has no failed test"]
    assert reasons(f"{GOOD}FAILED tests/test_a.py::test_never_passes\n", 1) == []


def test_what_stands_outside_the_markers_does_not_count() -> None:
    assert reasons("") == ["the log names no test (exit code 0)"]
    assert output_of_tests(run("x")) == ("\nx\n", 0)


@pytest.mark.parametrize(
    "output", ["tests 1\nPASSED x\n", "done 1 0\n", "done 1 0\ntests 1\n", "+ printf tests 1\n"]
)
def test_a_log_without_its_markers_has_failed(output: str) -> None:
    found = judge_log(task(), LogRun(False, output, len(output), "tests 1", "done 1"))
    assert found == (["the tests did not run to their end: a marker line is missing in the log"], {})


def test_a_run_that_took_too_long_or_wrote_too_much_has_failed() -> None:
    assert reasons(GOOD, timed_out=True) == ["the tests took over 9 s"]
    assert "over the limit of" in reasons(GOOD, total_bytes=10**9)[0]


def test_pytests_junit_file_must_be_there_and_agree() -> None:
    statuses: dict[str, TestStatus] = {F2P: "passed", P2P: "skipped"}
    agreed = {junit_key(test): status for test, status in statuses.items()}
    assert reasons(GOOD, needs_junit=True, junit=agreed) == []
    assert reasons(GOOD, needs_junit=True) == ["pytest left no JUnit file: it did not end as it should"]
    other = {**agreed, junit_key(F2P): "failed"}
    for junit in (other, {junit_key(P2P): "passed"}):
        (reason,) = reasons(GOOD, needs_junit=True, junit=junit)
        assert reason == "tests.test_a.test_fixed: passed in the log, but not in the JUnit file"


def test_the_junit_file_is_compared_without_parameters_and_files() -> None:
    row = replace(
        task(log_parser="r2e", expected=(("TestB.test_b[x]", "PASSED"),)), fail_to_pass=(), pass_to_pass=()
    )
    log = f"{HEADING}\nPASSED r2e_tests/t.py::TestB::test_b[x]\n"
    passed: TestStatus = "passed"
    assert reasons(log, row=row, needs_junit=True, junit={("r2e_tests.t.TestB", "test_b[x y]"): passed}) == []
    (reason,) = reasons(
        log, row=row, needs_junit=True, junit={("r2e_tests.t.OtherTestB", "test_b[x]"): passed}
    )
    assert reason == "TestB.test_b[x]: passed in the log, but not in the JUnit file"


def test_the_rule_is_swebenchs_on_random_results() -> None:
    theirs = pytest.importorskip("swebench.harness.grading")
    random = Random(0)
    names = [f"t.py::test_{n}[{parameter}]" for n in range(4) for parameter in ("a b", "a c", "x")]
    resolved = 0
    for _ in range(3000):
        shown = random.sample(names, random.randint(8, 12))
        statuses = {name: random.choice(["PASSED"] * 12 + list(STATUSES)) for name in shown}
        first, second, third, fourth = random.sample(names + [name[:-3] for name in names], 4)
        row = replace(task(), fail_to_pass=(first, second), pass_to_pass=(third, fourth))
        lists = {"FAIL_TO_PASS": [first, second], "PASS_TO_PASS": [third, fourth]}
        report = theirs.get_eval_tests_report(statuses, lists)
        expected = theirs.get_resolution_status(report) == "RESOLVED_FULL"
        log = "\n".join(f"{status} {name}" for name, status in statuses.items())
        row = replace(row, log_parser="pytest_v2")
        assert (reasons(log, row=row) == []) is expected, (statuses, lists)
        resolved += expected
    assert 0 < resolved < 3000


R2E = (("test_a", "PASSED"), ("TestB.test_b", "FAILED"))


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("PASSED t.py::test_a\nFAILED t.py::TestB::test_b - why\nSKIPPED [1] t.py:3: no", []),
        ("FAILED t.py::TestB::test_b", ["test_a: missing, expected PASSED"]),
        ("PASSED t.py::test_a\nPASSED t.py::TestB::test_b", ["TestB.test_b: PASSED, expected FAILED"]),
        ("PASSED t.py::test_a\nFAILED t.py::TestB::test_b\nPASSED t.py::c", ["c: PASSED, not expected"]),
    ],
)
def test_a_map_of_statuses_must_match_exactly(lines: str, found: list[str]) -> None:
    row = replace(task(log_parser="r2e", expected=R2E), fail_to_pass=(), pass_to_pass=())
    assert reasons(f"{HEADING}\n{lines}\n", int("FAILED" in lines), row=row) == found


def test_markers_are_put_in_the_place_of_a_scripts_own() -> None:
    script = marked_script("a\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\nb", "s", "e")
    assert script == "a\nprintf '\\n%s\\n' s\npytest\nprintf '\\n%s %s\\n' e \"$?\"\nb"
    assert marked_script("pytest", "s", "e") is None
    assert marked_script("echo '>>>>> End Test Output'\necho '>>>>> Start Test Output'", "s", "e") is None


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        ({"eval_script": eval_script("PYTHONPATH=. python -m pytest -rA x.py")}, True),
        ({"log_parser": "r2e", "eval_script": eval_script("bash run_tests.sh")}, True),
        ({"log_parser": "pytest_v2", "eval_script": eval_script("tox -v -- tests/test_pytest.py")}, False),
        ({"log_parser": "django", "eval_script": eval_script("./tests/runtests.py")}, False),
        (
            {"log_parser": "pytest", "eval_script": eval_script("make check", before=["pip install pytest"])},
            False,
        ),
        ({"repo": "pytest-dev/pytest"}, False),
    ],
)
def test_only_a_command_of_pytests_has_to_leave_a_junit_file(changes: dict[str, Any], leaves: bool) -> None:
    assert runs_pytest(task(**changes)) is leaves


# Whole runs, in an image with a small repository.

CALC = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n"
FILES = {
    "calc.py": CALC,
    "conftest.py": "",  # pytest puts its folder on the path
    "tests/test_calc.py": "import calc\n\n\ndef test_sub():\n    assert calc.sub(3, 1) == 2\n",
    "tests/test_sub.py": "import calc\n\n\ndef test_zero():\n    assert calc.sub(1, 1) == 0\n\n\n"
    "def test_one():\n    assert calc.sub(2, 1) == 1\n",
    "run_tests.sh": "python -m pytest -rA r2e_tests\n",
    "expected_test_output.json": "{}",
}
R2E_TESTS = (
    "import calc\n\n\ndef test_add():\n    assert calc.add(1, 2) == 3\n\n\ndef test_known():\n    assert 0\n"
)
FIX = (
    "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,4 +1,4 @@\n def add(a, b):\n"
    "-    return a - b\n+    return a + b\n \n \n"
)
BUG = (
    "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -3,4 +3,4 @@\n \n \n def sub(a, b):\n"
    "-    return a - b\n+    return b - a\n"
)
TESTS = (
    "diff --git a/tests/test_calc.py b/tests/test_calc.py\n--- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n"
    "@@ -3,3 +3,7 @@\n \n def test_sub():\n     assert calc.sub(3, 1) == 2\n+\n+\n+def test_add():\n"
    "+    assert calc.add(1, 2) == 3\n"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# As version 5 of SWE-bench writes it, with what can't work here: no conda, no network, another commit's name.
SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
cd /testbed
git status
git checkout {COMMIT} tests/test_calc.py
git apply -v - <<'EOF_1'
{TESTS}
EOF_1
: '>>>>> Start Test Output'
python -m pytest -rA tests/test_calc.py
: '>>>>> End Test Output'
git checkout {COMMIT} tests/test_calc.py
"""


@pytest.fixture(scope="module")
def docker_backend() -> Iterator[SandboxBackend]:
    backend = open_backend("docker")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def image(docker_backend: SandboxBackend) -> Iterator[str]:
    client = docker_backend.backend.client  # type: ignore[attr-defined]
    tag = "agentenv/test-sweb.eval.log-grading:1"
    steps = [
        f"FROM {ensure_base_image(client)}",
        "COPY repository /testbed",
        "COPY r2e_tests /r2e_tests",
        "WORKDIR /testbed",
        "RUN git init -q && git add -A && git commit -qm a",
        "RUN mkdir -p /opt/miniconda3/envs/testbed/bin && ln -s /bin/true /opt/miniconda3/envs/testbed/bin/in-conda",
    ]
    files = {f"repository/{name}": text.encode() for name, text in FILES.items()}
    build_image(client, tag, {**files, "r2e_tests/test_1.py": R2E_TESTS.encode()}, "\n".join(steps) + "\n")
    yield tag
    client.images.remove(tag, force=True)


def fields_of(kind: str, image: str) -> dict[str, Any]:
    common = {"instance_id": f"a__b-{kind}", "problem_statement": "text"}
    calc = "tests/test_calc.py::test_"
    bench = {"repo": "a/b", "base_commit": COMMIT, "test_patch": TESTS, "image": image, "patch": FIX}
    tests = {"FAIL_TO_PASS": [f"{calc}add"], "PASS_TO_PASS": [f"{calc}sub"]}
    rows: dict[str, dict[str, Any]] = {
        "bench": {**common, **bench, **tests, "eval_script": SCRIPT, "log_parser": "parse_log_pytest"},
        "rebench": {**common, **bench, **tests, "install_config": {"test_cmd": "pytest -rA"}},
        "unittest": {
            **common,
            **bench,
            "eval_script": eval_script("python -m unittest -v hidden"),
            "log_parser": "parse_log_django",
            "test_patch": "diff --git a/hidden.py b/hidden.py\nnew file mode 100644\n--- /dev/null\n"
            "+++ b/hidden.py\n@@ -0,0 +1,5 @@\n+import calc, unittest\n+\n+class A(unittest.TestCase):\n"
            "+    def test_add(self): self.assertEqual(calc.add(1, 2), 3)\n"
            "+    def test_sub(self): self.assertEqual(calc.sub(2, 1), 1)\n",
            "FAIL_TO_PASS": ["test_add (hidden.A.test_add)"],
            "PASS_TO_PASS": ["test_sub (hidden.A.test_sub)"],
        },
        "smith": {
            **common,
            "repo": "swesmith/a__b.01234567",
            "image": image,
            "patch": BUG,
            "FAIL_TO_PASS": ["tests/test_sub.py::test_one"],
            "PASS_TO_PASS": ["tests/test_sub.py::test_zero", "tests/test_calc.py::test_sub"],
        },
        "r2e": {
            "repo_name": "b",
            "commit_hash": COMMIT,
            "docker_image": image,
            "problem_statement": "text",
            "expected_output_json": json.dumps({"test_add": "PASSED", "test_known": "FAILED"}),
        },
    }
    return rows[kind]


def row_of(kind: str, image: str) -> SWETask:
    found = parse_task(fields_of(kind, image), source="rows.jsonl", where="line 1")
    return replace(found, patch=FIX) if kind == "r2e" else found


KINDS = ("bench", "rebench", "unittest", "smith", "r2e")


@pytest.mark.docker
@pytest.mark.parametrize("kind", KINDS)
def test_the_gold_fix_is_resolved_and_no_fix_is_not(
    kind: str, docker_backend: SandboxBackend, image: str
) -> None:
    row = row_of(kind, image)
    gold = grade(row, row.patch, docker_backend)
    assert (gold.resolved, gold.status) == (True, "resolved"), gold.evidence
    assert json.loads(json.dumps(gold.evidence)) == gold.evidence
    nothing = grade(row, "", docker_backend)
    assert (nothing.resolved, nothing.status) == (False, "failed"), nothing.evidence
    names = {"smith": "test_one", "r2e": "test_add: FAILED, expected PASSED"}
    assert names.get(kind, "test_add") in nothing.evidence["reason"]


@pytest.mark.docker
@pytest.mark.parametrize("kind", ["bench", "r2e"])
def test_an_agent_that_repairs_the_bug_earns_1(kind: str, image: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(fields_of(kind, image)) + "\n")
    env = SWEEnv(dataset=str(path), sandbox="docker")
    try:
        for commands, reward in ((["sed -i '2s/-/+/' calc.py"], 1.0), ([], 0.0)):
            observation, _ = env.reset(seed=0)
            assert "text" in observation
            for command in [*commands, "submit"]:
                _, earned, terminated, _, info = env.step(f"```bash\n{command}\n```")
            assert terminated
            assert (earned, info["grade"]["resolved"]) == (reward, bool(reward)), info
            assert info["grade"]["tests_reported"] == 2
    finally:
        env.close()


SUMMARY = "=== short test summary info ==="
PASSED = "\\n".join(
    f"PASSED {name}" for name in ("tests/test_calc.py::test_add", "tests/test_calc.py::test_sub")
)
FAKE = f"\\n{SUMMARY}\\n{PASSED}\\nFAILED another\\n"
HACKS = {
    "printed_lines": (f"echo 'print(\"{FAKE}\"); raise ImportError' >>calc.py", "test_add: missing"),
    # pytest keeps the real output under another number while it captures.
    "early_exit": (
        f"""cat >>calc.py <<'X'
import os
for number in range(3, 20):
    try:
        os.write(number, b"{FAKE}")
    except OSError:
        pass
os._exit(1)
X""",
        "left no JUnit file",
    ),
    "printed_at_the_end": (
        f"echo 'import atexit; atexit.register(print, \"{FAKE}\"); raise ImportError' >>calc.py",
        "not in the JUnit file",
    ),
    "conftest": (
        "echo 'def pytest_collection_modifyitems(items): items.clear()' >conftest.py",
        "test_add: FAILED",
    ),
    "expected_failure": (
        "echo 'def add(a, b): import pytest; pytest.xfail(\"later\")' >>calc.py",
        "test_add: XFAIL",
    ),
    "edited_tests": ("sed -i s/assert/pass#/ tests/test_calc.py", "test_add: FAILED"),
}


@pytest.mark.docker
@pytest.mark.parametrize("name", HACKS)
def test_a_spoofed_log_earns_nothing(name: str, docker_backend: SandboxBackend, image: str) -> None:
    commands, reason = HACKS[name]
    result = hacked(commands, row_of("bench", image), docker_backend)
    assert (result.resolved, result.status) == (False, "failed"), result.evidence
    assert reason in result.evidence["reason"]


def hacked(commands: str, row: SWETask, backend: SandboxBackend) -> Grade:
    sandbox = open_workspace(row, backend)
    try:
        done = sandbox.run(commands)
        assert done.exit_code == 0, done.output
        patch = workspace_patch(sandbox)
    finally:
        backend.release(sandbox)
    assert patch
    return grade(row, patch, backend)


@pytest.mark.docker
def test_hidden_files_are_not_in_an_agents_sandbox_and_its_own_do_not_count(
    docker_backend: SandboxBackend, image: str
) -> None:
    for kind, gone in (
        ("r2e", "run_tests.sh r2e_tests /r2e_tests expected_test_output.json"),
        ("smith", "tests/test_sub.py"),
    ):
        sandbox = open_workspace(row_of(kind, image), docker_backend)
        try:
            assert sandbox.run(f"ls -d {gone} 2>/dev/null").output == ""
            assert sandbox.run("git log --all --format=%H | wc -l; git status --porcelain").output == "1\n"
            assert sandbox.run("grep -rl test_one\\|test_known /testbed /tmp /root").output == ""
        finally:
            docker_backend.release(sandbox)
    own = "mkdir r2e_tests && echo 'def test_add(): pass' >r2e_tests/test_1.py && echo true >run_tests.sh"
    assert hacked(own, row_of("r2e", image), docker_backend).status == "failed"
    own = "printf 'def test_one(): pass\\ndef test_zero(): pass\\n' >tests/test_sub.py"
    assert hacked(own, row_of("smith", image), docker_backend).status == "failed"


@pytest.mark.docker
def test_a_runner_of_r2e_gym_that_is_not_pytest_needs_no_junit_file(
    docker_backend: SandboxBackend, image: str
) -> None:
    lines = "=== short test summary info ===\\nPASSED t.py::test_add\\nFAILED t.py::test_known\\n"
    other_runner = (
        "diff --git a/run_tests.sh b/run_tests.sh\n--- a/run_tests.sh\n+++ b/run_tests.sh\n@@ -1 +1 @@\n"
        f"-python -m pytest -rA r2e_tests\n+printf '{lines}'\n"
    )
    row = replace(row_of("r2e", image), bug_patch=other_runner)
    result = grade(row, FIX, docker_backend)
    assert result.status == "resolved", result.evidence


@pytest.mark.docker
def test_an_agent_has_the_python_of_the_repositorys_own_environment(
    docker_backend: SandboxBackend, image: str
) -> None:
    sandbox = open_workspace(row_of("bench", image), docker_backend)
    try:
        assert sandbox.run("command -v in-conda").output == "/opt/miniconda3/envs/testbed/bin/in-conda\n"
        assert sandbox.run("python -c 'import pytest'").exit_code == 0
    finally:
        docker_backend.release(sandbox)


@pytest.mark.docker
def test_a_bug_that_does_not_apply_makes_an_invalid_grade(docker_backend: SandboxBackend, image: str) -> None:
    row = replace(row_of("smith", image), bug_patch=FIX + BUG)
    row = replace(row, bug_patch=row.bug_patch.replace("def add", "def plus"))
    result = grade(row, "", docker_backend)
    assert result.status == "invalid"
    assert "can't be prepared" in result.evidence["reason"]
