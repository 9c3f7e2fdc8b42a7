"""The benchmark of the recipes' embedded defaults: what it says of finished runs, and what it writes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("learning_recipes")


def finished(work_dir: Path, name: str, before: float, after: float, seconds: float = 600.0) -> None:
    """A run as a recipe leaves it."""
    (work_dir / name).mkdir(parents=True)
    played = [{"success": success, "episodes": 256} for success in (before, after)]
    summary = {"status": "finished", "before": played[0], "after": played[1], "seconds": seconds}
    (work_dir / name / "summary.json").write_text(json.dumps(summary))


def run(script: ModuleType, tmp_path: Path, *options: str) -> int:
    work_dir, figures = tmp_path / "work", tmp_path / "figures.json"
    common = [
        "math_rlvr_grpo",
        "--seeds",
        "2",
        "--check",
        "--json",
        str(figures),
        "--work_dir",
        str(work_dir),
    ]
    return int(script.main([*common, *options]))


def test_runs_that_gain_where_the_control_does_not_hold_every_bar_and_make_a_table(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        finished(tmp_path / "work", f"math_rlvr_grpo-{seed}", 0.2, 0.5 + 0.1 * seed)
        finished(tmp_path / "work", f"math_rlvr_grpo-control-{seed}", 0.2, 0.15)
    docs = tmp_path / "page.md"
    docs.write_text(f"above\n\n{script.BEGIN}\n\nold\n\n{script.END}\n\nbelow\n")
    assert run(script, tmp_path, "--docs", str(docs)) == 0
    assert "every bar held" in capsys.readouterr().out
    text = docs.read_text()
    assert text.startswith("above") and text.endswith("below\n") and "old" not in text
    assert (
        "| `math_rlvr_grpo` | 0.20 | 0.50, 0.60 | 0.35 [-0.29, 0.99] | -0.05 [-0.05, -0.05] | 10.0 |" in text
    )
    figures = json.loads((tmp_path / "figures.json").read_text())["recipes"]["math_rlvr_grpo"]
    assert figures["trained"]["gain"]["values"] == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize(
    ("after", "control", "seconds"), [(0.25, 0.2, 600.0), (0.5, 0.4, 600.0), (0.5, 0.2, 1000.0)]
)
def test_too_small_a_gain_a_control_that_learns_and_a_long_run_each_miss_a_bar(
    script: ModuleType, tmp_path: Path, after: float, control: float, seconds: float
) -> None:
    for seed in (0, 1):
        finished(tmp_path / "work", f"math_rlvr_grpo-{seed}", 0.2, after, seconds)
        finished(tmp_path / "work", f"math_rlvr_grpo-control-{seed}", 0.2, control)
    assert run(script, tmp_path) == 1


def test_a_control_that_was_not_run_is_said_not_to_be_measured(script: ModuleType, tmp_path: Path) -> None:
    for seed in (0, 1):
        finished(tmp_path / "work", f"math_rlvr_grpo-{seed}", 0.2, 0.6)
    docs = tmp_path / "page.md"
    docs.write_text(f"{script.BEGIN}\n{script.END}\n")
    assert run(script, tmp_path, "--no-control", "--docs", str(docs)) == 0
    assert "| not measured | 10.0 |" in docs.read_text()


def test_an_unknown_recipe_is_refused_by_name(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["math_rlrv", "--json", str(tmp_path / "x.json")])
    assert "unknown: math_rlrv" in capsys.readouterr().err
