"""Calibration: scores and reasons, rows at a time, and the command; whole runs in Docker."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe import calibrate as calibrate_module
from agentenv_envs.swe.calibrate import Calibration, calibrate
from agentenv_envs.swe.commands import add_commands
from agentenv_envs.swe.data import SWETask, load_tasks
from agentenv_envs.swe.grading import Grade
from agentenv_envs.swe.sandbox import SandboxSpec, open_backend
from agentenv_envs.swe.sandbox.labels import OWNER
from agentenv_envs.swe.sandbox.local_backend import LocalBackend

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

    def set_grades(*verdicts: Grade | BaseException) -> list[str]:
        waiting, graded = list(verdicts), []

        def grade(task: SWETask, patch: str, backend: object, *, progress: object) -> Grade:
            graded.append("gold" if patch else "no-op")
            verdict = waiting.pop(0)
            if isinstance(verdict, BaseException):
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
        (
            [RESOLVED, FAILED, FAILED, FAILED],
            0,
            0,
            "not deterministic: after 1 times 1, the gold patch is failed: it fails",
        ),
        ([RESOLVED, RESOLVED], 1, 1, "the tests pass without the fix"),
        (
            [RESOLVED, FAILED, RESOLVED, RESOLVED],
            1,
            1,
            "not deterministic: after 1 times 0, the tests pass without the fix",
        ),
        ([INVALID, INVALID], None, None, "the gold patch is invalid: no engine"),
        ([RESOLVED, INVALID, RESOLVED, INVALID], 1, None, "the empty patch is invalid: no engine"),
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


@pytest.mark.parametrize(
    ("name", "message"), [("repeats", "repeats=0: at least 1"), ("workers", "workers=0: at least 1")]
)
def test_less_than_one_repeat_or_worker_is_refused(task: SWETask, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate([task], BACKEND, **{name: 0})


def test_a_row_whose_sandbox_failed_is_tried_once_more_after_all_others(
    task: SWETask, grades: Callable[..., list[str]]
) -> None:
    grades(INVALID, RESOLVED, FAILED, RESOLVED, FAILED)
    told: list[Calibration] = []
    rows = [task, replace(task, instance_id="other")]
    results = calibrate(rows, BACKEND, repeats=1, on_result=told.append)
    assert [result.calibrates for result in results] == [True, True]
    assert [result.instance_id for result in told] == ["other", task.instance_id]


def test_rows_are_worked_on_at_the_same_time_and_results_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, task: SWETask
) -> None:
    together = threading.Barrier(3)  # breaks, and fails the test, where fewer than three come

    def grade(task: SWETask, patch: str, backend: object, *, progress: object) -> Grade:
        together.wait(60.0)
        time.sleep(0.2 / int(task.instance_id))
        return RESOLVED if patch else FAILED

    monkeypatch.setattr(calibrate_module, "grade", grade)
    threads: set[int] = set()
    told: list[str] = []

    def on_result(result: Calibration) -> None:
        threads.add(threading.get_ident())
        told.append(result.instance_id)

    rows = [replace(task, instance_id=name) for name in "123"]
    results = calibrate(rows, BACKEND, repeats=1, workers=3, on_result=on_result)
    assert [result.instance_id for result in results] == ["1", "2", "3"]
    assert sorted(told) == ["1", "2", "3"]
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_sandboxes_in_use_are_given_back_at_once_where_calibration_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, task: SWETask, error: type[BaseException]
) -> None:
    both_run = threading.Barrier(3)

    def grade(task: SWETask, patch: str, backend: Any, *, progress: Callable[[str], None]) -> Grade:
        if task.instance_id == "third":
            both_run.wait(60.0)
            raise error
        sandbox = backend.acquire(SandboxSpec(workdir="/work"))
        try:
            both_run.wait(60.0)
            sandbox.run("sleep 300", timeout_s=400.0)
        finally:
            backend.release(sandbox)
        raise AssertionError("a sandbox that was taken away must not lead to a verdict")

    monkeypatch.setattr(calibrate_module, "grade", grade)
    backend = LocalBackend()
    told: list[Calibration] = []
    rows = [replace(task, instance_id=name) for name in ("first", "second", "third")]
    began = time.monotonic()
    with pytest.raises(error):
        calibrate(rows, backend, workers=3, on_result=told.append)
    assert time.monotonic() - began < 100.0
    assert backend.left() == 0
    assert told == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("calibration")]
    backend.close()


def test_no_sandbox_is_made_once_calibration_has_ended(
    monkeypatch: pytest.MonkeyPatch, task: SWETask
) -> None:
    kept: list[Any] = []

    def grade(task: SWETask, patch: str, backend: Any, *, progress: object) -> Grade:
        kept.append(backend)
        return RESOLVED if patch else FAILED

    monkeypatch.setattr(calibrate_module, "grade", grade)
    backend = LocalBackend()
    calibrate([task], backend)
    with pytest.raises(SandboxError, match="has ended"):
        kept[0].acquire(SandboxSpec())
    assert backend.left() == 0
    backend.close()


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

    def fake(name: str, *, url: str | None) -> Any:
        shown = name if url is None else f"{name} at {url}"
        opened.append(shown)
        return SimpleNamespace(kind=name, close=lambda: closed.append(shown))

    monkeypatch.setattr("agentenv_envs.swe.sandbox.open_backend", fake)
    yield opened
    assert closed == opened


@pytest.mark.parametrize(
    ("verdicts", "code", "summary"),
    [
        ([RESOLVED, FAILED], 0, "1 of 1 rows calibrate\n"),
        ([FAILED, FAILED], 1, "0 of 1 rows calibrate\n"),
        ([INVALID, INVALID], 1, "0 of 1 rows calibrate\n"),
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


def test_sandboxes_may_come_from_a_service(backends: list[str], grades: Callable[..., list[str]]) -> None:
    grades(RESOLVED, FAILED)
    assert command(str(FIXTURE), "--repeats", "1", "--sandbox-url", "http://host:1") == 0
    assert backends == ["docker at http://host:1"]


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
        ([str(FIXTURE), "--repeats", "0"], "--repeats 0: at least 1"),
        ([str(FIXTURE), "--workers", "0"], "--workers 0: at least 1"),
        (
            [str(FIXTURE), "--keep", "missing/keep.txt"],
            "--keep missing/keep.txt: is a folder, or lies in none",
        ),
        ([str(FIXTURE), "--state", "."], "--state .: is a folder"),
        (
            [str(FIXTURE), "--json", "a.json", "--keep", "./a.json"],
            "--keep a.json: is the file of --json, too",
        ),
        ([str(FIXTURE), "--json", str(FIXTURE)], "FILE .*: is the file of --json, too"),
    ],
)
def test_bad_input_is_a_usage_error_and_nothing_is_written(
    backends: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = FIXTURE.read_bytes()
    with pytest.raises(UsageError, match=message):
        command(*arguments)
    assert list(tmp_path.iterdir()) == []
    assert FIXTURE.read_bytes() == rows
    assert backends == []


@pytest.fixture
def three_rows(tmp_path: Path) -> Path:
    row = json.loads(FIXTURE.read_text().splitlines()[0])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"instance_id": name}) + "\n" for name in "abc"))
    return path


def test_a_second_start_does_only_what_is_missing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    backends: list[str],
    three_rows: Path,
    grades: Callable[..., list[str]],
) -> None:
    options = [str(three_rows), "--json", str(tmp_path / "report.json"), "--repeats", "1", "--workers", "1"]
    grades(RESOLVED, FAILED, FAILED, FAILED, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        command(*options)
    state = tmp_path / "report.json.state.jsonl"
    assert "interrupted: 2 of 3 rows are done; the same command goes on from" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()
    assert len(state.read_text().splitlines()) == 2

    with state.open("a") as file:
        file.write('{"row": "torn')
    graded = grades(RESOLVED, FAILED)
    keep = tmp_path / "keep.txt"
    assert command(*options, "--keep", str(keep)) == 1
    assert graded == ["gold", "no-op"]
    out, err = capsys.readouterr()
    assert "2 of 3 rows are in" in err
    assert "[2/3] c: gold 1 of 1" in err
    assert "    2    67%  calibrates" in err
    assert out == "2 of 3 rows calibrate\n"
    assert [row["gold"] for row in json.loads((tmp_path / "report.json").read_text())] == [1, 0, 1]
    assert keep.read_text() == "a\nc\n"

    assert grades() == []
    assert command(*options) == 1, "nothing is graded when all is done, and no engine is asked for"
    assert backends == ["docker", "docker"]


def test_a_row_that_can_not_be_a_task_is_reported_and_the_others_are_calibrated(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    backends: list[str],
    three_rows: Path,
    grades: Callable[..., list[str]],
) -> None:
    a, b, c = three_rows.read_text().splitlines()
    broken = json.dumps(json.loads(b) | {"patch": 7})
    three_rows.write_text(f"{a}\n{broken}\n{c}\n{a}\n")
    grades(RESOLVED, FAILED, RESOLVED, FAILED)
    keep, report = tmp_path / "keep.txt", tmp_path / "report.json"
    options = ["--repeats", "1", "--workers", "1", "--keep", str(keep), "--json", str(report)]
    assert command(str(three_rows), *options) == 1
    out, err = capsys.readouterr()
    assert out == "2 of 4 rows calibrate\n"
    assert "b: the row is refused: field 'patch' must be a string" in err
    assert "    2    50%  the row is refused" in err
    assert keep.read_text() == "a\nc\n"
    assert [row["instance_id"] for row in json.loads(report.read_text())] == ["a", "c", "b", "a"]
    assert backends == ["docker"]


def test_a_row_that_could_not_be_judged_is_tried_again_by_the_next_start(
    tmp_path: Path, backends: list[str], grades: Callable[..., list[str]]
) -> None:
    options = [str(FIXTURE), "--state", str(tmp_path / "state"), "--json", str(tmp_path / "report.json")]
    grades(INVALID, INVALID)
    assert command(*options) == 1
    assert json.loads((tmp_path / "report.json").read_text())[0]["gold"] is None
    grades(RESOLVED, FAILED, RESOLVED, FAILED)
    assert command(*options) == 0
    assert len(backends) == 2


def test_a_signal_ends_the_command_once(
    monkeypatch: pytest.MonkeyPatch, backends: list[str], tmp_path: Path
) -> None:
    def grade(task: SWETask, patch: str, backend: object, *, progress: object) -> Grade:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        return RESOLVED

    monkeypatch.setattr(calibrate_module, "grade", grade)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        command(str(FIXTURE), "--json", str(tmp_path / "report.json"))
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert backends == ["docker"]


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


@pytest.mark.docker
def test_a_killed_command_leaves_no_container_and_a_state_to_go_on_from(
    tmp_path: Path, three_rows: Path
) -> None:
    report = tmp_path / "report.json"
    options = [str(three_rows), "--json", str(report), "--repeats", "1", "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "swe", "calibrate", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[1/3] b: gold 1 of 1"):  # its sandbox is being made, or is in use
            break
    time.sleep(0.5)
    process.terminate()
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 143
    kept = len((tmp_path / "report.json.state.jsonl").read_text().splitlines())
    assert kept in (1, 2), "the second row may be quick"
    assert f"interrupted: {kept} of 3 rows are done; the same command goes on from" in rest
    assert not report.exists()
    backend = open_backend("docker")
    try:
        api = backend.backend.client.api  # type: ignore[attr-defined]
        owners = [item["Labels"].get(OWNER, "") for item in api.containers(all=True)]
        assert not [owner for owner in owners if owner.startswith(f"{process.pid} ")]
    finally:
        backend.close()


@pytest.mark.slow
def test_a_row_calibrates_without_isolation_where_two_options_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    # Kept between runs where pytest keeps a cache: building takes some seconds.
    cache = getattr(pytestconfig, "cache", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path if cache is None else cache.mkdir("agentenv")))
    report = tmp_path / "report.json"
    options = ["--json", str(report), "--repeats", "1", "--sandbox", "local-unisolated", "--allow-unisolated"]
    assert command(str(FIXTURE), *options) == 0
    assert json.loads(report.read_text())[0]["reason"] == ""
