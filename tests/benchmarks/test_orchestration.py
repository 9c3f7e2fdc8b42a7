"""The orchestration benchmark at a small size: what it plays and counts, what it writes, and when it fails."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SMALL = ["--num_envs", "16", "--turns", "3", "--repeats", "2"]


@pytest.fixture(scope="module")
def orchestration(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/orchestration.py")


def test_the_floors_play_every_step_of_every_episode(orchestration: ModuleType) -> None:
    load = orchestration.Load(num_envs=5, turns=3, batches=2)
    # Environment i plays the seeds i and i + 1: 3 4, 4 5, 5 6, 6 7 and 7 3 turns.
    steps = 7 + 9 + 11 + 13 + 10
    for options in ({"deadlines": False}, {"deadlines": True}, {"deadlines": True, "tokens": True}):
        assert orchestration.floor(load, **options).steps == steps


def test_the_production_run_counts_at_least_the_steps_of_its_batches(orchestration: ModuleType) -> None:
    measured = orchestration.production(orchestration.Load(num_envs=8, turns=3, batches=3))
    # Three batches of 8 episodes of 3 turns or more; what runs on beside the last batch is less than another two.
    assert 3 * 8 * 3 <= measured.steps < 5 * 8 * 7
    assert measured.step_us == pytest.approx(1e6 * measured.cpu_s / measured.steps)


def test_a_longer_first_prompt_is_a_longer_context_of_as_many_turns(orchestration: ModuleType) -> None:
    short = orchestration.Load(num_envs=2, turns=3, batches=1, prompt="x")
    long = orchestration.Load(num_envs=2, turns=3, batches=1, prompt="x" * 1001)
    assert long.context - short.context == 1000


def test_the_table_names_every_row_and_what_is_assumed_and_the_file_holds_them(
    orchestration: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "orchestration.json"
    assert orchestration.main([*SMALL, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    printed = capsys.readouterr().out
    for row in written["rows"]:
        assert row["name"] in printed
        assert row["step_us_min"] <= row["step_us"] <= row["step_us_max"]
        assert len(row["repeats"]) == 2
    assert [row["num_envs"] for row in written["rows"] if row["name"] == "agentenv"] == [16, 1, 2]
    assert "not installed" in printed
    for name in written["assumed"]:
        assert name in printed


@pytest.mark.parametrize(("limit", "status"), [(0.0, 1), (1e9, 0)])
def test_check_fails_exactly_where_the_bar_is_missed(
    orchestration: ModuleType, monkeypatch: pytest.MonkeyPatch, limit: float, status: int
) -> None:
    monkeypatch.setattr(orchestration, "LIMIT_US", limit)
    for name in ("TRACE_LIMIT_US", "NO_TRACE_LIMIT_US"):  # they say nothing at so small a size
        monkeypatch.setattr(orchestration, name, 1e9)
    assert orchestration.main([*SMALL, "--check"]) == status
    assert orchestration.main(SMALL) == 0


def test_a_peer_that_cannot_be_run_is_a_remark_and_no_failure(
    orchestration: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This Python lacks the peer, the other path lacks a Python.
    for python, reason in (
        (sys.executable, "No module named 'verifiers'"),
        (str(tmp_path / "no"), "No such file"),
    ):
        assert orchestration.main([*SMALL, "--peer_python", python]) == 0
        printed = capsys.readouterr().out
        assert "not installed" in printed
        assert reason in printed


@pytest.mark.parametrize("option", ["--num_envs", "--turns", "--repeats"])
def test_sizes_below_one_are_refused(
    orchestration: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        orchestration.main([option, "0"])
    assert f"{option} is 0, must be at least 1" in capsys.readouterr().err
