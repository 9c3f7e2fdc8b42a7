"""The timeline benchmark's figures, from traces whose numbers are known; what it plays is the recipe's own test."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from agentenv.simulation import Constant, DecodeModel, Run, Workload, rollout_config, simulate
from agentenv.timeline import RecordedTrace, Span, Window


@pytest.fixture(scope="module")
def timeline(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/timeline.py")


def test_overlap_is_the_share_of_training_in_which_an_environment_has_an_episode(
    timeline: ModuleType,
) -> None:
    spans = {
        "trainer": {
            "trainer": [
                Span("critic update", 2.0, 4.0),
                Span("policy update", 4.0, 6.0),
                Span("weight sync", 6.0, 8.0),
            ]
        },
        "environments": {
            "slot-0": [Span("episode", 0.0, 3.0), Span("step", 1.0, 2.5)],
            "slot-1": [Span("episode", 2.5, 3.5), Span("episode", 5.5, 8.0)],
        },
    }
    # Of the 4 s from 2 to 6 there are episodes from 2 to 3.5 and from 5.5 to 6.
    trace = RecordedTrace(Path("t"), spans=spans)
    assert timeline.overlap(trace, Window(0.0, 8.0, None)) == pytest.approx(2.0 / 4.0)


def _runs(folder: Path) -> None:
    """Two simulated runs in place of the recipe's."""
    for alpha, mode in ((0, "sync"), (1, "async")):
        place = folder / f"alpha-{alpha}"
        place.mkdir(parents=True)
        config = rollout_config(batch_size=8, num_envs=8, mode=mode, asynchrony=float(alpha), num_steps=5)
        workload = Workload(turns=2, tokens=Constant(10.0), step_s=Constant(10.0))
        run = Run(config, workload, engines=(DecodeModel(base_s=0.1),), steps=5, train_s=15.0)
        outcome = simulate(run, trace_path=place / "trace.json")
        (place / "summary.json").write_text(json.dumps({"episodes": outcome.counts}))


def test_bars_hold_where_episodes_run_beside_training_and_are_missed_where_a_trace_is_wrong(
    timeline: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _runs(tmp_path)
    options = ["--output_dir", str(tmp_path), "--max_steps", "5", "--first", "2", "--check"]
    assert timeline.main([*options, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [bar["holds"] for bar in figures["bars"]] == [True] * 4
    # 22 s of episodes (2 turns of 1 and 10 s) cover all of 15 s of training.
    assert [run["overlap"] for run in figures["runs"].values()] == [0.0, pytest.approx(1.0)]
    (tmp_path / "alpha-1" / "summary.json").write_text('{"episodes": {"discarded": {"stale": 1}}}')
    assert timeline.main(options) == 1
    assert "MISSED  discarded episodes that a trace lacks or repeats" in capsys.readouterr().out


def test_a_first_step_behind_the_last_one_is_refused(timeline: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        timeline.main(["--output_dir", str(tmp_path), "--max_steps", "3", "--first", "3"])
