"""Calibration: scores and reasons, the report, and the command; whole runs in Docker."""

import argparse
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe import calibrate as calibrate_module
from agentenv_envs.swe.calibrate import Calibration, calibrate, write_report
from agentenv_envs.swe.commands import add_commands
from agentenv_envs.swe.data import SWETask, load_tasks
from agentenv_envs.swe.grading import Grade
from agentenv_envs.swe.sandbox import open_backend

FIXTURE = Path(__file__).parent / "fixtures" / "package_rows.jsonl"
BACKEND: Any = SimpleNamespace(kind="docker")
RESOLVED = Grade(True, "resolved", {"reason": ""})
FAILED = Grade(False, "failed", {"reason": "it fails"})
INVALID = Grade(False, "invalid", {"reason": "no engine"})


@pytest.fixture
def task() -> SWETask:
    return load_tasks(FIXTURE)[0]


@pytest.fixture
def grades(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let grading give these verdicts in turn; returns a list that fills with the patches graded."""

    def set_grades(*verdicts: Grade | Exception) -> list[str]:
        waiting, graded = list(verdicts), []

        def grade(task: SWETask, patch: str, backend: object, *, progress: object) -> Grade:
            graded.append("gold" if patch else "no-op")
            verdict = waiting.pop(0)
            if isinstance(verdict, Exception):
                raise verdict
            return verdict

        monkeypatch.setattr(calibrate_module, "grade", grade)
        return graded

    return set_grades


def run(task: SWETask, repeats: int = 2) -> Calibration:
    (result,) = calibrate([task], BACKEND, repeats=repeats)
    return result


def test_a_row_calibrates_if_gold_earns_1_and_nothing_earns_0_each_time(
    task: SWETask, grades: Callable[..., list[str]]
) -> None:
    graded = grades(RESOLVED, FAILED, RESOLVED, FAILED)
    result = run(task)
    assert result == Calibration(task.instance_id, 1, 0, "")
    assert result.calibrates
    assert graded == ["gold", "no-op", "gold", "no-op"]


@pytest.mark.parametrize(
    ("verdicts", "gold", "noop", "reason"),
    [
        ([FAILED, FAILED], 0, 0, "the gold patch is failed: it fails"),
        ([RESOLVED, RESOLVED], 1, 1, "the tests pass without the fix"),
        ([RESOLVED, FAILED, FAILED, FAILED], 0, 0, "the gold patch is failed: it fails"),
        ([RESOLVED, FAILED, RESOLVED, RESOLVED], 1, 1, "the tests pass without the fix"),
        ([INVALID], None, None, "the gold patch is invalid: no engine"),
        ([RESOLVED, INVALID], 1, None, "the empty patch is invalid: no engine"),
        ([UsageError("bad source_root")], None, None, "bad source_root"),
    ],
)
def test_a_row_that_does_not_calibrate_says_why(
    task: SWETask,
    grades: Callable[..., list[str]],
    verdicts: list[Grade | Exception],
    gold: int | None,
    noop: int | None,
    reason: str,
) -> None:
    graded = grades(*verdicts)
    result = run(task)
    assert result == Calibration(task.instance_id, gold, noop, reason)
    assert not result.calibrates
    assert len(graded) == len(verdicts)


def test_every_row_is_calibrated_and_told(task: SWETask, grades: Callable[..., list[str]]) -> None:
    grades(FAILED, FAILED, RESOLVED, FAILED)
    told: list[Calibration] = []
    steps: list[str] = []
    other = replace(task, instance_id="other")
    results = calibrate([task, other], BACKEND, repeats=1, on_step=steps.append, on_result=told.append)
    assert [result.calibrates for result in results] == [False, True]
    assert told == results
    assert steps[0] == f"{task.instance_id}: gold 1 of 1"
    assert steps[-1] == "other: no-op 1 of 1"


def test_no_repeats_are_refused(task: SWETask) -> None:
    with pytest.raises(UsageError, match="repeats=0: at least 1"):
        run(task, repeats=0)


def test_a_report_replaces_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_report(path, [Calibration("a", 1, 0, ""), Calibration("b", None, None, "no engine")])
    assert json.loads(path.read_text()) == [
        {"instance_id": "a", "gold": 1, "noop": 0, "reason": ""},
        {"instance_id": "b", "gold": None, "noop": None, "reason": "no engine"},
    ]
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_report_that_can_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "report.json"
    folder.mkdir()
    with pytest.raises(UsageError, match="can't be written"):
        write_report(folder, [])
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(UsageError, match="can't be written"):
        write_report(tmp_path / "missing" / "report.json", [])


# The command.


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["swe", "calibrate", *arguments])
    code: int = args.run(args)
    return code


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Back-ends that the command opens, by name; each must be closed again."""
    opened: list[str] = []
    closed: list[str] = []

    def fake(name: str) -> Any:
        opened.append(name)
        return SimpleNamespace(kind=name, close=lambda: closed.append(name))

    monkeypatch.setattr("agentenv_envs.swe.sandbox.open_backend", fake)
    yield opened
    assert closed == opened


@pytest.mark.parametrize(
    ("verdicts", "code", "summary"),
    [
        ([RESOLVED, FAILED], 0, "1 of 1 rows calibrate\n"),
        ([FAILED, FAILED], 1, "0 of 1 rows calibrate\n"),
        ([INVALID], 1, "0 of 1 rows calibrate\n"),
    ],
)
def test_the_exit_code_tells_whether_all_rows_calibrate(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    backends: list[str],
    grades: Callable[..., list[str]],
    verdicts: list[Grade],
    code: int,
    summary: str,
) -> None:
    grades(*verdicts)
    report = tmp_path / "report.json"
    assert command(str(FIXTURE), "--json", str(report), "--repeats", "1") == code
    out, err = capsys.readouterr()
    assert out == summary
    assert "[0/1] inflection-0.5.1__camelize-empty: gold 1 of 1" in err
    assert "[1/1] inflection-0.5.1__camelize-empty: gold" in err
    assert len(json.loads(report.read_text())) == 1
    assert backends == ["docker"]


def test_without_a_file_the_report_goes_to_stdout(
    capsys: pytest.CaptureFixture[str], backends: list[str], grades: Callable[..., list[str]]
) -> None:
    grades(RESOLVED, FAILED)
    assert command(str(FIXTURE), "--repeats", "1") == 0
    assert json.loads(capsys.readouterr().out)[0]["gold"] == 1
    assert backends == ["docker"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_back_end_is_closed_however_calibration_ends(
    monkeypatch: pytest.MonkeyPatch, backends: list[str], error: type[BaseException]
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(calibrate_module, "grade", broken)
    with pytest.raises(error):
        command(str(FIXTURE))
    assert backends == ["docker"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "no such file"),
        ([str(FIXTURE), "--sandbox", "local-unisolated"], "--allow-unisolated does so all the same"),
        ([str(FIXTURE), "--json", "missing/report.json"], "is a folder, or lies in none that exists"),
        ([str(FIXTURE), "--json", "."], "is a folder"),
        ([str(FIXTURE), "--repeats", "0"], "repeats=0"),
    ],
)
def test_bad_input_is_a_usage_error(backends: list[str], arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command(*arguments)


@pytest.mark.docker
def test_a_row_calibrates_in_docker_and_no_container_is_left(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert command(str(FIXTURE), "--json", str(report), "--repeats", "1") == 0
    assert json.loads(report.read_text()) == [
        {"instance_id": "inflection-0.5.1__camelize-empty", "gold": 1, "noop": 0, "reason": ""}
    ]
    backend = open_backend("docker")
    assert backend.left() == 0
    backend.close()


@pytest.mark.slow
def test_a_row_calibrates_without_isolation_where_two_options_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    # Kept between runs: building takes some seconds.
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("agentenv")))
    report = tmp_path / "report.json"
    options = ["--json", str(report), "--repeats", "1", "--sandbox", "local-unisolated", "--allow-unisolated"]
    assert command(str(FIXTURE), *options) == 0
    assert json.loads(report.read_text())[0]["reason"] == ""
