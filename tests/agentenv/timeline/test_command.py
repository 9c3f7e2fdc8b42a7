"""``agentenv timeline``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv import cli
from agentenv.trace import DISCARDED, TRAINER, ChromeTrace


def test_it_prints_shares_with_their_meanings_and_writes_json(
    simulated_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated_run(asynchrony=1.0)
    assert cli.main(["timeline", str(tmp_path), "--steps", "2:3", "--json", str(tmp_path / "t.json")]) == 0
    printed = capsys.readouterr().out
    assert "training steps 2 to 3" in printed and "2 weight syncs" in printed
    assert "in get_batch: no batch is complete" in printed
    (run,) = json.loads((tmp_path / "t.json").read_text())["runs"]
    assert run["steps"] == [2, 3] and run["is_whole"]
    assert run["tracks"] == {"trainer": 1, "environments": 16, "engines": 2}
    for states in run["shares"].values():
        assert sum(states.values()) == pytest.approx(1.0)
    waiting = run["shares"]["trainer"]["waiting"]
    assert f"{waiting:.1%}" in printed


def test_a_killed_run_is_shown_as_far_as_it_was_written(
    simulated_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated_run()
    path = tmp_path / "trace.json"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 7])
    assert cli.main(["timeline", str(tmp_path)]) == 0
    assert "the trace has no end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}/nothing"], "no such run"),
        (["{run}/empty"], "no trace.json there"),
        (["{run}", "--steps", "2:x"], "--steps is '2:x', must be like 3:8, 3: or 3"),
        (["{run}", "--steps", "9:"], "has the steps 1 to 4"),
        (["{run}", "--png", "{run}/a.gif"], "must end in one of .png, .svg, .pdf"),
        (["{run}", "--png", "{run}/no/a.png"], "no such directory"),
        (["{run}", "--json", "{run}"], "is a directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    simulated_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    simulated_run()
    (tmp_path / "empty").mkdir()
    assert cli.main(["timeline", *(text.format(run=tmp_path) for text in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and said in captured.err and not captured.out


def test_without_matplotlib_the_error_names_the_extra(
    simulated_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated_run()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["timeline", str(tmp_path), "--png", str(tmp_path / "a.png")]) == 2
    assert "agentenv-rl[plot]" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_two_runs_are_drawn_one_below_the_other(
    simulated_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for name, settings in (("sync", {"mode": "sync"}), ("ahead", {"redundant_groups": 2, "num_envs": 20})):
        simulated_run(**settings)
        (tmp_path / name).mkdir()
        (tmp_path / "trace.json").rename(tmp_path / name / "trace.json")
    picture = tmp_path / "timeline.svg"
    runs = [str(tmp_path / "sync"), str(tmp_path / "ahead")]
    assert cli.main(["timeline", *runs, "--steps", "1:2", "--png", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "sync: training steps 1 to 2" in printed and "ahead: training steps 1 to 2" in printed
    assert picture.read_text().startswith("<?xml")


def test_what_a_trace_holds_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ChromeTrace(clock=lambda: 1.0)
    trace.open(tmp_path / "trace.json")
    trace.span(TRAINER, "wait for batch", 0.5, 3.0, step=1)
    trace.instant(DISCARDED, "failed", episode="e", reason="\x1b]0;owned\x07\u202e")
    trace.close()
    assert cli.main(["timeline", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\u202e" not in printed and "owned" in printed
