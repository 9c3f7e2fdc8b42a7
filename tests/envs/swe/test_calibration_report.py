"""What a calibration leaves: report, keep list, and the classes of reasons."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.calibrate import Calibration
from agentenv_envs.swe.calibration_report import reason_class, reason_table, write_keep_list, write_report

RESULTS = [Calibration("a", 1, 0, ""), Calibration("b", None, None, "no engine"), Calibration("c", 1, 0, "")]


def test_a_report_replaces_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_report(path, RESULTS[:2])
    assert json.loads(path.read_text()) == [
        {"instance_id": "a", "gold": 1, "noop": 0, "reason": ""},
        {"instance_id": "b", "gold": None, "noop": None, "reason": "no engine"},
    ]
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_keep_list_holds_the_ids_of_rows_that_calibrate(tmp_path: Path) -> None:
    path = tmp_path / "keep.txt"
    path.write_text("old\n" * 100)
    write_keep_list(path, RESULTS)
    assert path.read_text() == "a\nc\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_report, write_keep_list])
def test_a_file_that_can_not_be_written_leaves_nothing(
    tmp_path: Path, write: Callable[[Path, list[Calibration]], None]
) -> None:
    folder = tmp_path / "report.json"
    folder.mkdir()
    with pytest.raises(UsageError, match="can't be written"):
        write(folder, [])
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(UsageError, match="can't be written"):
        write(tmp_path / "missing" / "report.json", [])


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (Calibration("a", 1, 0, ""), "calibrates"),
        (
            Calibration("a", 0, 0, "the gold patch is failed: FAIL_TO_PASS t.py::x: failed"),
            "a FAIL_TO_PASS test fails with the fix",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: PASS_TO_PASS t.py::x: error"),
            "a PASS_TO_PASS test fails with the fix",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: PASS_TO_PASS t.py::x: missing"),
            "an expected test does not run",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: the tests took over 600 s"),
            "the tests take too long",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: the patch does not apply: error"),
            "the gold patch does not apply",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: exit code 4 of the process, 4 of pytest"),
            "the test run is not sound",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: the log names no test (exit code 2)"),
            "the tests leave no results",
        ),
        (
            Calibration("a", 0, 0, "the gold patch is failed: test_x: FAILED, expected PASSED"),
            "outcomes are not those of the row",
        ),
        (
            Calibration("line 3", None, None, "the row is refused: field 'patch' is missing"),
            "the row is refused",
        ),
        (Calibration("a", 1, 1, "the tests pass without the fix"), "the tests pass without the fix"),
        (
            Calibration("a", 0, 0, "not deterministic: after 1 times 1, the gold patch is failed: x"),
            "not deterministic",
        ),
        (
            Calibration(
                "a", None, None, "the gold patch is invalid: SandboxError: the image x can't be pulled"
            ),
            "the image is not there",
        ),
        (
            Calibration("a", 1, None, "the empty patch is invalid: SandboxTimeoutError: no answer"),
            "the sandbox failed",
        ),
        (
            Calibration(
                "a",
                None,
                None,
                "the gold patch is invalid: SandboxError: a: pip download for x==1 failed with",
            ),
            "the package can't be fetched",
        ),
        (
            Calibration(
                "a", None, None, "the gold patch is invalid: SandboxError: building the image x:1 failed: y"
            ),
            "the image can't be built",
        ),
        (
            Calibration("a", None, None, "source_root 'src' holds no module"),
            "the row can't be built as it is",
        ),
    ],
)
def test_a_reason_has_one_class(result: Calibration, name: str) -> None:
    assert reason_class(result) == name


def test_the_table_counts_classes_and_shows_an_example_of_each() -> None:
    long = Calibration("d", 0, 0, "the gold patch is failed: PASS_TO_PASS t.py::x: error" + " and more" * 30)
    header, *rows = reason_table([*RESULTS, long]).splitlines()
    assert header.split() == ["rows", "share", "class", "for", "example"]
    assert rows[0].split() == ["2", "50%", "calibrates", "a"]
    assert rows[1].startswith("    1    25%  a PASS_TO_PASS test fails with the fix  d: the gold patch")
    assert rows[1].endswith("...")
    assert rows[2].split(maxsplit=2) == ["1", "25%", "the row can't be built as it is         b: no engine"]
    assert sum(int(row.split()[0]) for row in rows) == 4
    assert max(map(len, rows)) < 160
