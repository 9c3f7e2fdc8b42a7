"""The learning benchmark: what is compared, how results are kept and judged, and a run of it at a tiny size."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv.trajectory import Trajectory
from agentenv_trainers.testing import ReplayController

MODULES = (
    "learning_methods",
    "learning_results",
    "learning_report",
    "learning_pool",
    "learning_run",
    "learning",
)
MARK = "AGENTENV_LEARNING_TEST"
"""Variable that all processes of a run inherit, and are found by."""


@pytest.fixture(scope="module")
def modules(repository: Path) -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture(scope="module")
def methods(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["learning_methods"]


@pytest.fixture(scope="module")
def results(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["learning_results"]


@pytest.fixture(scope="module")
def report(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["learning_report"]


# What is compared


def test_the_grid_has_every_method_at_every_staleness_and_no_run_twice(methods: ModuleType) -> None:
    runs = methods.grid(methods.Sizes(), "policy", seeds=5, staleness=(0, 2, 8))
    # 5 seeds of 6 methods at 3 staleness, of 7 ablations and a control at one; and the start.
    assert len(runs) == 5 * (6 * 3 + 7 + 1) + 1
    assert len({run.name for run in runs}) == len(runs)
    counts = Counter((run.method, run.staleness) for run in runs)
    assert counts["grpo_dis", 8] == 5
    assert counts["shuffled", methods.ABLATION_STALENESS] == 5
    assert counts["shuffled", 0] == 0
    assert len({(run.sizes.steps, run.sizes.batch_size) for run in runs}) == 1, "as many episodes for each"
    first = runs[1 : 1 + 26]
    assert {run.seed for run in first} == {0}, "what is finished after an interruption is balanced"


def test_every_method_is_tuned_as_much_as_every_other_on_seeds_that_no_reported_run_has(
    methods: ModuleType,
) -> None:
    runs = methods.tuning(methods.Sizes(), "policy")
    assert Counter(run.method for run in runs) == dict.fromkeys(methods.METHODS, 4 * 2 * 2)
    reported = {run.seed for run in methods.grid(methods.Sizes(), "p", seeds=methods.SEEDS, staleness=(0,))}
    assert not reported & {run.seed for run in runs}
    assert set(methods.LEARNING_RATES.values()) <= set(methods.TUNING_RATES)


@pytest.mark.parametrize(
    ("method", "base", "changed"),
    [
        ("grpo_dis", "grpo", {"objective", "clip_low", "clip_high"}),
        ("ppo", "sao", {"objective", "clip_low", "clip_high"}),
        ("sao_math", "sao", {"clip_low", "clip_high"}),
        ("k1", "sao", {"critic_updates"}),
        ("full_critic", "sao", {"freeze_critic_attention"}),
        ("step_mean", "sao", {"value_granularity"}),
        ("step_last", "sao", {"value_granularity"}),
        ("unmasked_gae", "sao", {"skip_observations"}),
        ("pool", "sao", set()),
        ("shuffled", "sao", set()),
        ("running_mean_per_task", "running_mean", {"advantage", "baseline_window"}),
    ],
)
def test_a_variant_differs_from_its_base_in_what_it_is_named_by_alone(
    modules: dict[str, ModuleType],
    methods: ModuleType,
    tmp_path: Path,
    method: str,
    base: str,
    changed: set[str],
) -> None:
    configs = []
    for name in (method, base):
        run = methods.make_run(name, 2, 0, methods.Sizes(), "policy", 3e-4)
        configs.append(modules["learning_run"].make_config(run, str(tmp_path)))
    one, other = (dataclasses.asdict(config) for config in configs)
    assert {name for name in one if repr(one[name]) != repr(other[name])} == changed


def test_all_train_on_episodes_without_a_bootstrapped_end_in_sync_with_the_trainer(
    modules: dict[str, ModuleType], methods: ModuleType, tmp_path: Path
) -> None:
    for name in methods.ALL:
        run = methods.make_run(name, 2, 0, methods.Sizes(), "policy")
        config = modules["learning_run"].make_config(run, str(tmp_path))
        assert (config.mode, config.truncation, config.trajectories_per_step) == ("sync", "zero", 32)
        assert config.group_size == (8 if name.startswith("grpo") else 1)


def test_shuffled_rewards_are_the_batchs_own_in_another_order(modules: dict[str, ModuleType]) -> None:
    def batch(step: int) -> list[Trajectory]:
        return [
            Trajectory([1], [2], [-1.0], [True], [step], reward=float(i), info={"success": i > 3})
            for i in range(8)
        ]

    source = modules["learning_run"].ShuffledRewards(ReplayController(batch), 3)
    orders = [[item.reward for item in source.get_batch(step)] for step in (0, 1, 0)]
    assert all(sorted(order) == [float(i) for i in range(8)] for order in orders)
    assert orders[0] != orders[1] and orders[0] == orders[2]
    assert [item.success for item in source.get_batch(0)] == [False] * 4 + [True] * 4
    assert source.steps == [0, 1, 0, 0], "all else is the source's"


def test_curves_keep_a_place_for_the_steps_that_lack_a_number(modules: dict[str, ModuleType]) -> None:
    seen = []
    curves = modules["learning_run"].Curves(
        ("success", "entropy", "unknown"), lambda step, _: seen.append(step)
    )
    state = type("State", (), {"global_step": 0})()
    for step, logs in enumerate(
        [{"success": 0.25}, {"success": 0.5, "entropy": 0.1234567}, {"success": 1.0, "entropy": math.nan}], 1
    ):
        state.global_step = step
        curves.on_log(None, state, None, logs)
    curves.on_log(None, state, None, {"train_runtime": 1.0, "success": 9.0})
    assert curves.values == {"success": [0.25, 0.5, 1.0], "entropy": [None, 0.123457, None]}
    assert seen == [1, 2, 3]


# Statistics and bars


def test_the_interval_of_a_mean_is_students(results: ModuleType) -> None:
    # Standard deviation 0.02, error 0.02 / sqrt(3), t = 4.302653 with two degrees of freedom.
    found = results.estimate([0.90, 0.92, 0.94])
    assert found.mean == pytest.approx(0.92)
    assert found.high - found.mean == pytest.approx(4.302653 * 0.02 / math.sqrt(3), rel=1e-6)
    assert str(found) == "0.920 [0.870, 0.970]"
    assert str(results.estimate([0.5])) == "0.500"
    assert str(results.estimate([])) == "-"


def test_the_interval_of_a_difference_is_welchs(results: ModuleType) -> None:
    # Variances 1 and 4 of three values: error sqrt(5/3), (25/9) / (17/18) = 2.94 degrees of freedom, t = 3.218759.
    found = results.difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert found.mean == -2.0
    assert found.high - found.mean == pytest.approx(3.218759 * math.sqrt(5 / 3), rel=1e-6)
    assert results.difference([0.5, 0.5], [0.25, 0.25]).low == 0.25
    assert results.difference([0.5], [0.25]).low is None


def finished_run(
    method: str, staleness: int, seed: int, success: float, curve: tuple[float, ...] = (0.25, 0.75)
) -> dict[str, Any]:
    run = {
        "method": method,
        "staleness": staleness,
        "seed": seed,
        "learning_rate": 3e-4,
        "sizes": {"steps": 2, "batch_size": 8, "evaluation_episodes": 100},
    }
    final = {"success": success, "interval": [success - 0.1, success + 0.1], "episodes": 100}
    curves = {"success": list(curve), "entropy": [None, 0.5]}
    return {"run": run, "final": final, "curves": curves, "seconds": {"total": 10.0, "cpu": 9.0}}


def some_results(results: ModuleType, methods: ModuleType, **finals: tuple[float, ...]) -> Any:
    """Two runs of everything, 0.9 each but where it is said otherwise; the start solves a fifth."""
    runs = [finished_run("start", 0, 0, 0.2)]
    for name in methods.ALL:
        for seed, success in enumerate(finals.get(name, (0.2, 0.22) if name == "shuffled" else (0.9, 0.9))):
            runs.append(finished_run(name, 2, seed, success))
    random.Random(0).shuffle(runs)  # they come as they end
    return results.Results(runs, staleness=[2], ablation_staleness=2, wanted=len(runs))


def test_all_bars_hold_where_sao_leads_and_the_control_is_flat(
    results: ModuleType, methods: ModuleType
) -> None:
    bars = some_results(results, methods, sao=(0.95, 0.91)).bars()
    assert [bar.holds for bar in bars] == [True] * 4
    assert bars[2].value == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("finals", "missed"),
    [
        ({"sao": (0.85, 0.87)}, ["final success, SAO less GRPO + DIS", "final success, SAO less PPO"]),
        ({"ppo": (0.91, 0.93)}, ["final success, SAO less PPO"]),
        ({"shuffled": (0.29, 0.30)}, ["gain with shuffled rewards"]),
        ({"shuffled": ()}, ["gain with shuffled rewards"]),
    ],
)
def test_a_bar_is_missed_by_what_it_is_there_for(
    results: ModuleType, methods: ModuleType, finals: dict[str, tuple[float, ...]], missed: list[str]
) -> None:
    names = [bar.name for bar in some_results(results, methods, **finals).bars() if not bar.holds]
    assert len(names) == len(missed)
    for name, beginning in zip(names, missed, strict=True):
        assert name.startswith(beginning)


def test_a_run_that_is_missing_has_a_bar_of_its_own(results: ModuleType) -> None:
    found = results.Results([finished_run("sao", 8, 0, 0.5)], staleness=[8], ablation_staleness=8, wanted=3)
    assert str(found.bars()[0]) == "MISSED  runs that are missing: 2 (bar: == 0)"


def test_tables_csv_and_figure_say_what_the_runs_did(
    results: ModuleType, report: ModuleType, methods: ModuleType, tmp_path: Path
) -> None:
    found = some_results(results, methods, sao=(0.95, 0.91))
    text = report.markdown(found)
    assert "| SAO | 0.930 [0.676, 1.184] |" in text
    assert "solves 0.200 [0.100, 0.300] of the held-out tasks (100 episodes)" in text
    assert "28 runs of 2 steps of 8 episodes" in text
    report.write_csv(found, tmp_path)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 28
    assert {row["training_success"] for row in rows} == {"0.5"}
    with (tmp_path / "curves.csv").open() as file:
        steps = [row for row in csv.DictReader(file) if (row["method"], row["seed"]) == ("k1", "1")]
    assert [(row["step"], row["success"], row["entropy"]) for row in steps] == [
        ("1", "0.25", ""),
        ("2", "0.75", "0.5"),
    ]
    figure = tmp_path / "images" / "figure.svg"
    report.draw(found, figure)
    drawn = figure.read_bytes()
    report.draw(found, figure)
    assert figure.read_bytes() == drawn, "the same results give the same file"
    assert b"<svg" in drawn


def test_a_point_of_a_curve_is_the_mean_of_the_steps_before(report: ModuleType) -> None:
    assert report.smoothed([0.0, 1.0, 2.0, 6.0], window=2) == [0.0, 0.5, 1.5, 4.0]


def test_the_page_keeps_all_but_the_tables_and_one_without_their_place_is_refused(
    report: ModuleType, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    report.write_docs(page, r"new \1")
    report.write_docs(page, r"newer \1")
    assert page.read_text() == f"before\n\n{report.BEGIN}\n\nnewer \\1\n\n{report.END}\n\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the results"):
        report.write_docs(page, "new")


def test_the_best_mean_of_a_methods_learning_rates_is_marked(report: ModuleType, methods: ModuleType) -> None:
    runs = []
    for rate, (fresh, stale) in zip(
        methods.TUNING_RATES, ((0.6, 0.8), (0.9, 0.7), (0.99, 0.1), (0.5, 0.5)), strict=True
    ):
        for staleness, success in ((0, fresh), (8, stale)):
            for seed, change in ((100, -0.01), (101, 0.01)):
                run = finished_run("grpo", staleness, seed, success + change)
                run["run"]["learning_rate"] = rate
                runs.append(run)
    expected = "| 0.700 (0.600 / 0.800) | **0.800** (0.900 / 0.700) | 0.545 (0.990 / 0.100) | 0.500 (0.500 / 0.500) |"
    assert f"| GRPO {expected}" in report.tuning_table(runs)


# Runs side by side


def test_a_failed_run_is_written_down_and_the_next_try_replaces_it(
    modules: dict[str, ModuleType],
    methods: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = modules["learning_pool"]
    monkeypatch.setattr(pool.signal, "signal", lambda *_: None)
    monkeypatch.setattr(pool.os, "nice", lambda _: None)
    run = methods.make_run("sao", 2, 0, methods.SMOKE, "policy")
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def fail(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("once")

    def succeed(run: Any, policy: Path, on_step: Any) -> dict[str, Any]:
        on_step(7, {})
        return {"run": run.as_dict(), "final": {"success": 1.0}}

    pool.work(run, tmp_path, tmp_path, theirs, fail)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{run.name}.failed.json"
    assert json.loads(file.read_text())["error"] == "ZeroDivisionError: once"
    assert pool.finished(run, tmp_path) is None
    pool.work(run, tmp_path, tmp_path, theirs, succeed)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{run.name}.json"
    assert pool.finished(run, tmp_path)["final"] == {"success": 1.0}
    assert ours.recv() == 7


def test_a_result_of_other_settings_is_not_taken_for_this_experiments(
    modules: dict[str, ModuleType], methods: ModuleType, tmp_path: Path
) -> None:
    pool = modules["learning_pool"]
    run = methods.make_run("sao", 2, 0, methods.SMOKE, "policy")
    pool.write(tmp_path / f"{run.name}.json", {"run": run.as_dict()})
    assert pool.finished(run, tmp_path) is not None
    other = dataclasses.replace(run, sizes=methods.Sizes(), policy="another")
    with pytest.raises(UsageError, match=r"other settings \(policy, sizes\): give another --output_dir"):
        pool.finished(other, tmp_path)


def start(repository: Path, *arguments: str | Path, mark: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, str(repository / "benchmarks" / "learning.py"), *map(str, arguments)]
    environment = {**os.environ, MARK: mark}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_an_interrupted_grid_leaves_no_process_behind_and_goes_on_with_what_is_missing(
    repository: Path, tmp_path: Path
) -> None:
    options = ("--smoke", "--seeds", "1", "--output_dir", tmp_path, "--json", tmp_path / "figures.json")
    mark = uuid.uuid4().hex
    first = start(repository, *options, mark=mark)
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("grpo-staleness1-seed0"):
            break
    assert len(marked(mark)) >= 3, "the command, what it forks from, and a run"
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130
    assert "the same command goes on" in errors
    deadline = time.monotonic() + 60.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    before = {file.name: file.read_bytes() for file in (tmp_path / "runs").glob("*.json")}
    assert 2 <= len(before) < 15

    second = start(repository, *options)
    out, errors = second.communicate(timeout=900)
    assert second.returncode == 0, errors
    assert f"{len(before)} of 15 runs are finished already" in errors
    assert "ok      runs that are missing: 0" in out
    files = sorted((tmp_path / "runs").iterdir())
    assert len(files) == 15, "six methods, seven ablations, control and start"
    for file in files:
        assert before.get(file.name, file.read_bytes()) == file.read_bytes(), "what was finished is kept"
        result = json.loads(file.read_text())
        if result["run"]["method"] == "start":
            assert result["final"]["episodes"] == 16
            continue
        assert result["curves"]["staleness_mean"] == [0.0, 1.0, 1.0]
        assert len(result["curves"]["success"]) == 3
        assert result["final"]["episodes"] == 8
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["runs"] == 14 and figures["missing"] == 0
    assert set(figures["final"]["1"]) == {"sao", "sao_math", "grpo", "grpo_dis", "ppo", "running_mean"}
    assert {"results.csv", "curves.csv", "learning.svg"} <= {file.name for file in tmp_path.iterdir()}


def marked(mark: str) -> list[int]:
    """Processes that have inherited the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
    return found


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--workers", "0"], "--workers is 0, must be at least 1"),
        (["--seeds", "0"], "--seeds is 0, must be at least 1"),
        (["--staleness", "2", "-1"], "--staleness is -1, must be at least 0"),
        (["--policy", "nowhere"], "--policy nowhere holds no model.safetensors"),
    ],
)
def test_bad_input_is_refused(
    modules: dict[str, ModuleType], arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        modules["learning"].main(arguments)
    assert caught.value.code == 2
    assert match in capsys.readouterr().err
