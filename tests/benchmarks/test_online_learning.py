"""The online-learning benchmark: what is compared, measured and judged, and runs of it at a tiny size."""

from __future__ import annotations

import csv
import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentenv.errors import UsageError


@pytest.fixture(scope="module")
def modules(repository: Path) -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield {name: importlib.import_module(name) for name in ("online_learning", "online_learning_results")}


@pytest.fixture(scope="module")
def benchmark(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["online_learning"]


@pytest.fixture(scope="module")
def results(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["online_learning_results"]


def result(
    results: ModuleType, method: str, seed: int, phases: Sequence[float], *, steps: int = 40, **settings: Any
) -> Any:
    """A finished run whose reward is the same all through a phase."""
    names = ["plain", "polite", "loud"][: len(phases)]
    rewards = [reward for reward in phases for _ in range(steps)]
    return results.Result(
        method=method,
        seed=seed,
        settings={"phase_steps": steps, "styles": names, "learning_rate": 1e-3, "beta": 0.1, **settings},
        curves={"reward": rewards, "quality": [1.0] * len(rewards)},
        seconds=10.0,
    )


def some_results(results: ModuleType, sao: Sequence[float], baseline: Sequence[float]) -> Any:
    """Two runs of each method, 0.01 to either side of these rewards."""
    runs = [
        result(results, method, seed, [reward + change for reward in phases])
        for method, phases in (("gae", sao), ("running_mean", baseline))
        for seed, change in ((0, -0.01), (1, 0.01))
    ]
    random.Random(0).shuffle(runs)
    return results.Results(runs, wanted=4)


# What is compared


def test_both_methods_have_every_seed_and_are_tuned_alike_on_other_seeds(benchmark: ModuleType) -> None:
    runs = benchmark.grid(5, {})
    assert Counter(run.method for run in runs) == {"gae": 5, "running_mean": 5}
    assert [run.seed for run in runs] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "balanced after an interruption"
    tuning = benchmark.tuning({})
    candidates = {
        method: sorted(
            (run.seed, run.options["learning_rate"], run.options["beta"])
            for run in tuning
            if run.method == method
        )
        for method in ("gae", "running_mean")
    }
    assert candidates["gae"] == candidates["running_mean"]
    assert len(candidates["gae"]) == 4 * 3 * 4
    assert not {run.seed for run in tuning} & {run.seed for run in runs}
    assert len({run.name for run in tuning}) == len(tuning)
    for run in tuning:
        if run.method == "gae":
            assert run.options["critic_learning_rate"] == pytest.approx(5.0 * run.options["learning_rate"])


def test_the_recipe_has_what_was_chosen_among_the_candidates(benchmark: ModuleType, repository: Path) -> None:
    namespace: dict[str, Any] = {}
    source = (repository / "recipes" / "online_learning.py").read_text()
    start = source.index("TUNED: ")
    exec("from typing import Any\n" + source[start : source.index('"""', start)], namespace)
    for tuned in namespace["TUNED"].values():
        assert tuned["learning_rate"] in benchmark.TUNING["learning_rate"]
        assert tuned["beta"] in benchmark.TUNING["beta"]


def test_a_run_that_began_is_resumed(benchmark: ModuleType, tmp_path: Path) -> None:
    run = benchmark.Run("gae", 3, {"beta": 0.1, "smoke": True})
    command = run.command(tmp_path)
    assert command[2:] == [
        *("--advantage", "gae", "--seed", "3", "--output_dir", str(tmp_path)),
        *("--beta", "0.1", "--smoke", "True"),
    ]
    assert run.name == "gae-seed3-beta0.1"
    (tmp_path / "run.json").write_text("{}")
    assert run.command(tmp_path) == [*command, "--resume"]


# Measures and bars


def test_recovery_is_the_first_step_near_the_level_of_the_end(results: ModuleType) -> None:
    # The level of the end is 1.0. Means of five steps: step 12 has 3 of 5 rewards of 1, step 13 has 4, 0.8.
    assert results.recovery([0.0] * 9 + [1.0] * 30) == 13
    assert results.recovery([1.0] * 40) == 5, "no sooner than there are five steps to average"
    assert results.recovery([0.0] * 40) == 40, "nothing was learned: the whole phase"


def test_a_difference_is_taken_seed_by_seed(results: ModuleType) -> None:
    runs = [
        result(results, method, seed, [reward])
        for method, rewards in (("gae", (0.5, 0.7, 0.9)), ("running_mean", (0.4, 0.6, 0.8)))
        for seed, reward in enumerate(rewards)
    ]
    row = results.Results(runs, wanted=6).row("mean reward", "plain")
    # All three differences are 0.1, however far the seeds lie apart.
    assert row.difference.low == pytest.approx(0.1)
    assert row.difference.high == pytest.approx(0.1)
    assert row.values["gae"].high - row.values["gae"].low > 0.9


def test_phases_end_where_the_wish_changes_and_the_last_one_with_the_run(results: ModuleType) -> None:
    run = result(results, "gae", 0, [0.1, 0.2], steps=3)
    run.curves["reward"].append(0.3)
    assert run.phases == [[0.1] * 3, [0.2] * 3 + [0.3]]


def test_all_bars_hold_where_the_papers_claim_comes_out(results: ModuleType) -> None:
    bars = some_results(results, (0.6, 0.8, 0.8), (0.7, 0.7, 0.7)).bars()
    assert [bar.holds for bar in bars] == [True] * 10
    assert bars[-1].value == pytest.approx(0.1)
    assert "[+0.1" in bars[-1].name


@pytest.mark.parametrize(
    ("sao", "baseline", "missed"),
    [
        ((0.7, 0.8, 0.5), (0.8, 0.5, 0.5), ["SAO, loud wanted: reward, last 20 steps"]),
        ((0.7, 0.8, 0.8), (0.8, 0.4, 0.5), ["mean of the last 128 rewards, polite wanted: reward"]),
        ((0.8, 0.8, 0.8), (0.7, 0.7, 0.7), ["paper, baseline leads at first"]),
        ((0.7, 0.8, 0.7), (0.8, 0.9, 0.7), ["paper, SAO leads after a shift: SAO less running mean, polite"]),
    ],
)
def test_a_bar_is_missed_by_what_it_is_there_for(
    results: ModuleType, sao: Sequence[float], baseline: Sequence[float], missed: list[str]
) -> None:
    names = [bar.name for bar in some_results(results, sao, baseline).bars() if not bar.holds]
    assert len(names) == len(missed)
    for name, beginning in zip(names, missed, strict=True):
        assert name.startswith(beginning)


def test_runs_of_a_method_with_other_settings_are_no_seeds_of_it(results: ModuleType) -> None:
    runs = [result(results, "gae", 0, [0.5]), result(results, "gae", 1, [0.5], beta=0.0)]
    with pytest.raises(UsageError, match="runs of gae differ in beta: give another --output_dir"):
        results.Results(runs, wanted=2)


def test_without_a_single_run_there_is_a_bar_and_no_table(results: ModuleType, tmp_path: Path) -> None:
    nothing = results.Results([], wanted=6)
    assert [str(bar) for bar in nothing.bars()] == ["MISSED  runs that are missing: 6 (bar: == 0)"]
    assert results.markdown(nothing) == "no run is finished"
    results.draw(nothing, tmp_path / "figure.svg")
    results.write_csv(nothing, tmp_path / "curves.csv")


def test_the_best_of_each_methods_candidates_is_marked(results: ModuleType) -> None:
    runs = [
        result(results, "gae", seed, [reward + change], learning_rate=rate, beta=beta)
        for (rate, beta), reward in {(1e-4, 0.0): 0.5, (1e-3, 0.0): 0.7, (1e-3, 0.1): 0.6}.items()
        for seed, change in ((1000, 0.1), (1001, -0.1))
    ]
    assert results.tuning_table(runs).splitlines() == [
        "| method | beta | 0.0001 | 0.001 |",
        "| --- | --- | --- | --- |",
        "| SAO | 0 | 0.500 | **0.700** |",
        "| SAO | 0.1 | - | 0.600 |",
    ]


def test_table_csv_and_figure_say_what_the_runs_did(results: ModuleType, tmp_path: Path) -> None:
    found = some_results(results, (0.6, 0.8, 0.8), (0.7, 0.7, 0.7))
    table = results.markdown(found)
    # Deviation 0.01 sqrt(2) of two values, t = 12.706 with one degree of freedom.
    expected = (
        "| mean reward | polite | 0.800 [0.673, 0.927] | 0.700 [0.573, 0.827] | +0.100 [+0.100, +0.100] |"
    )
    assert expected in table
    assert "| steps until 0.8 of that | loud | 5.0 [5.0, 5.0] |" in table
    results.write_csv(found, tmp_path / "curves.csv")
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 120
    assert [row["wanted"] for row in rows if row["step"] in ("40", "41", "120")] == [
        "plain",
        "polite",
        "loud",
    ] * 4
    results.draw(found, tmp_path / "images" / "figure.svg")
    figure = (tmp_path / "images" / "figure.svg").read_text()
    assert figure.count('class="band') == 2
    assert all(f">{style}</text>" in figure for style in ("plain", "polite", "loud"))


def test_the_page_keeps_all_but_the_table(results: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{results.BEGIN}\nold\n{results.END}\n\nafter\n")
    results.write_docs(page, r"new \1")
    results.write_docs(page, r"newer \1")
    assert page.read_text() == f"before\n\n{results.BEGIN}\n\nnewer \\1\n\n{results.END}\n\nafter\n"


# Runs side by side


def start(repository: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(repository / "benchmarks" / "online_learning.py"), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_no_process_behind_and_goes_on(
    repository: Path, tmp_path: Path, benchmark: ModuleType
) -> None:
    options = ("--smoke", "--seeds", "1", "--workers", "1", "--output_dir", tmp_path, "--check")
    first = start(repository, *options)
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("gae-seed0: finished"):
            break
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130
    assert "the same command goes on" in errors
    assert processes_of(tmp_path) == []
    kept = (tmp_path / "runs" / "gae-seed0" / "summary.json").stat().st_mtime_ns

    second = start(repository, *options, "--json", tmp_path / "figures.json")
    out, errors = second.communicate(timeout=300)
    assert "1 of 2 runs are finished already" in errors
    assert (tmp_path / "runs" / "gae-seed0" / "summary.json").stat().st_mtime_ns == kept
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["missing"] == 0
    assert len(figures["rows"]) == 10
    assert "ok      runs that are missing: 0" in out
    assert second.returncode == (0 if all(bar["holds"] for bar in figures["bars"]) else 1)
    assert {"curves.csv", "online_learning.svg"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_missing(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [benchmark.Run("gae", 0, {"styles": "rude", "smoke": True})]
    with benchmark.Progress() as progress:
        assert benchmark.run_all(runs, tmp_path, workers=1, progress=progress) == []
    assert "gae-seed0: error: --styles: 'rude' is none of StyledReply-v0's" in capsys.readouterr().err


def test_results_of_another_experiment_are_not_mixed_in(benchmark: ModuleType, tmp_path: Path) -> None:
    benchmark.same_experiment(tmp_path, {"policy": "one", "options": {"smoke": True}})
    benchmark.same_experiment(tmp_path, {"policy": "one", "options": {"smoke": True}})
    with pytest.raises(UsageError, match=r"of another experiment \(policy\): give another"):
        benchmark.same_experiment(tmp_path, {"policy": "two", "options": {"smoke": True}})


def processes_of(folder: Path) -> list[int]:
    """Processes that have the folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
    return found
