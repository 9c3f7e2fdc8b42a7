"""Results of a run, read without trust; ids are compared with what pytest itself writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv_envs.swe.junit import RunRecord, junit_key, parse_junit, parse_record

ODD_TESTS = r"""
import pytest

ODD = ["/", "a::b", "x.py", "a[b]c", "\x1b[1m", "\u03b4", "\U0001f600", "a\nb", "", "é\\", '"<&>']

@pytest.mark.parametrize("x", ODD)
def test_odd(x):
    pass

class TestA:
    class TestB:
        @pytest.mark.parametrize("x", ["tests/a.py::x", "-"])
        def test_in(self, x):
            pass

def test_fails():
    assert 0

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_xfails():
    assert 0

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_teardown(broken):
    pass
"""


def test_every_id_of_a_real_run_maps_to_its_junit_entry(tmp_path: Path) -> None:
    folder = tmp_path / "unit.tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_odd.py").write_text(ODD_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "import json\nseen = []\n"
        "def pytest_collection_finish(session): seen.extend(i.nodeid for i in session.items)\n"
        "def pytest_sessionfinish(): json.dump(seen, open('ids.json', 'w'))\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=junit.xml"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )
    statuses = parse_junit((tmp_path / "junit.xml").read_bytes())
    ids = json.loads((tmp_path / "ids.json").read_text())
    assert len(ids) == 17
    assert {junit_key(test_id) for test_id in ids} == set(statuses)
    file = "unit.tests/deep/test_odd.py"
    found = {
        name: statuses[junit_key(f"{file}::test_{name}")]
        for name in ("fails", "skipped", "xfails", "teardown")
    }
    assert found == {"fails": "failed", "skipped": "skipped", "xfails": "xfailed", "teardown": "error"}
    assert statuses[junit_key(f"{file}::test_odd[\\x1b[1m]")] == "passed"


@pytest.mark.parametrize(
    ("test_id", "key"),
    [
        ("tests/test_a.py::test_b", ("tests.test_a", "test_b")),
        ("tests/test_a.py::TestC::test_b[/-/bar-/bar]", ("tests.test_a.TestC", "test_b[/-/bar-/bar]")),
        ("test_a.py::test_b[x.py::y]", ("test_a", "test_b[x.py::y]")),
    ],
)
def test_an_id_maps_to_class_and_name(test_id: str, key: tuple[str, str]) -> None:
    assert junit_key(test_id) == key


def junit(*cases: str) -> bytes:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>".encode()


def test_the_worst_of_two_entries_counts() -> None:
    passed = '<testcase classname="a" name="t"/>'
    error = '<testcase classname="a" name="t"><error message="failed on teardown">x</error></testcase>'
    assert parse_junit(junit(passed, error)) == {("a", "t"): "error"}
    assert parse_junit(junit(error, passed)) == {("a", "t"): "error"}


def test_what_could_not_be_collected_is_no_test() -> None:
    case = (
        '<testcase classname="" name="tests.test_a"><error message="collection failure">x</error></testcase>'
    )
    assert parse_junit(junit(case)) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"no xml", b"<html/>", b'<!DOCTYPE x [<!ENTITY a "b">]><testsuites/>', b"<testsuites>"],
)
def test_a_file_that_is_not_junit_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="JUnit"):
        parse_junit(content)


def test_a_record_is_read() -> None:
    record = parse_record(
        b'{"seal": "x", "exit_code": 1, "reported": ["a.py::b"], "failures": [], "changes": ["c"]}'
    )
    assert record == RunRecord("x", 1, ("a.py::b",), (), ("c",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"seal": "x", "exit_code": 1, "failures": [], "changes": []}',
        b'{"seal": 1, "exit_code": 1, "reported": [], "failures": [], "changes": []}',
        b'{"seal": "x", "exit_code": "1", "reported": [], "failures": [], "changes": []}',
        b'{"seal": "x", "exit_code": 1, "reported": [1], "failures": [], "changes": []}',
        b'{"seal": "x", "exit_code": 1, "reported": [], "failures": {}, "changes": []}',
        b"\xff",
    ],
)
def test_a_record_of_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        parse_record(content)
