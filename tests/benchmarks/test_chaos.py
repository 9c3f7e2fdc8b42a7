"""The chaos benchmark at a small size: what it counts, what it writes, and when it fails."""

import argparse
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from agentenv.report.progress import Progress

SMALL = ["--episodes", "40", "--num_envs", "8", "--batch_size", "16", "--group_size", "2"]


@pytest.fixture(scope="module")
def chaos(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/chaos.py")


def test_a_small_run_loses_nothing_and_writes_what_it_saw(
    chaos: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chaos.MARK, "")  # restored afterwards: the benchmark sets its own
    monkeypatch.setattr(chaos, "STEP_TIMEOUT_S", 3.0)  # other tests may keep the processors busy
    file = tmp_path / "figures" / "chaos.json"
    assert chaos.main([*SMALL, "--fault_rate", "0.4", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for words in (
        "assumed: ",
        "episodes lost: 0 ",
        "memory by tenth",
        "discarded at 40%: ",
        "step_timeout_s 3.0",
    ):
        assert words in out
    results = json.loads(file.read_text())
    faulty, control = results["runs"]
    assert faulty["fault_rate"] == 0.4 and control["fault_rate"] == 0.0
    for run in (faulty, control):
        assert run["produced"] >= 40
        assert run["lost"] == run["stale"] == run["twice"] == run["orphans"] == 0
        assert run["healthy_per_s"] == pytest.approx(run["consumed"] / run["wall_s"])
        assert len(run["rss_mb"]) == 10
    assert faulty["workers_replaced"] > 0 and control["workers_replaced"] == 0
    assert set(control["discarded"]) <= {"stopped"}
    assert any(reason.startswith("step_") for reason in faulty["discarded"])
    bars = {bar["name"]: bar for bar in results["bars"]}
    assert bars["episodes lost"]["holds"] and bars["processes left after the stop"]["holds"]
    assert len(bars) == 6


def test_a_missed_bar_fails_only_where_it_is_checked(
    chaos: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(chaos.MARK, "")

    def play(args: argparse.Namespace, fault_rate: float, progress: Progress) -> object:
        return chaos.Outcome(fault_rate, consumed=10, wall_s=1.0, rss_mb=[1.0] * 10, lost=int(fault_rate > 0))

    monkeypatch.setattr(chaos, "play", play)
    assert chaos.main([]) == 0
    assert chaos.main(["--check"]) == 1
    assert "MISSED  episodes lost: 1 (bar: == 0)" in capsys.readouterr().out
    assert chaos.main(["--check", "--fault_rate", "0"]) == 0


def test_an_episode_that_is_nowhere_is_lost(chaos: ModuleType) -> None:
    outcome = chaos.Outcome(0.2, consumed=5)
    counts = {"produced": 10, "buffered": 2, "discarded": {"step_timeout": 2}}
    chaos.account(outcome, SimpleNamespace(counts=lambda: counts))
    assert outcome.lost == 1
    chaos.account(outcome, SimpleNamespace(counts=lambda: {**counts, "buffered": 3}))
    assert outcome.lost == 1, "what was lost once stays in the figure"


def test_a_process_that_was_left_is_found_by_its_mark(
    chaos: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chaos.MARK, "mark-of-the-test")
    monkeypatch.setattr(chaos, "ORPHAN_WAIT_S", 0.1)
    assert chaos.orphans() == 0
    left = subprocess.Popen(["sleep", "60"], start_new_session=True, env=dict(os.environ))
    try:
        assert chaos.marked() == [left.pid]
        assert chaos.orphans() == 1
    finally:
        left.kill()
        left.wait()


def test_memory_by_tenths(chaos: ModuleType) -> None:
    samples = [(5, 1.0), (15, 2.0), (20, 4.0), (95, 7.0), (130, 9.0)]
    assert chaos.deciles(samples, 100) == [1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 8.0]
    assert chaos.deciles([(60, 2.0)], 100) == [2.0] * 10


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--episodes", "9"], "--episodes is 9, must be at least 10"),
        (["--fault_rate", "1.5"], "--fault_rate is 1.5, must be between 0 and 1"),
        (["--batch_size", "10"], "batch_size is 10, must be a multiple of group_size 4"),
        (["--asynchrony", "-1"], "asynchrony is -1.0"),
    ],
)
def test_bad_input_is_refused(
    chaos: ModuleType, arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        chaos.main(arguments)
    assert caught.value.code == 2
    assert match in capsys.readouterr().err


def test_progress_is_shown_while_it_runs(chaos: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chaos.MARK, "mark-of-the-progress-test")
    stream = io.StringIO()
    args = argparse.Namespace(episodes=10, num_envs=4, batch_size=8, group_size=2, asynchrony=1.0, seed=0)
    with Progress(stream, interval_s=0.0) as progress:
        outcome = chaos.play(args, 0.0, progress)
    assert outcome.consumed >= 8 and "without faults  episode" in stream.getvalue()
