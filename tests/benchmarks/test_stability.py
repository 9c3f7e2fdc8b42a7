"""The stability benchmark: what it judges, and a run of it at a tiny size."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def stability(repository: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield importlib.import_module("stability")


def curves(**changes: Any) -> dict[str, list[float | None]]:
    """Fifty steps, of which the policy stands still for two, and that no bar objects to."""
    flat: dict[str, list[float | None]] = {
        "success": [0.9] * 50,
        "entropy": [None] * 2 + [0.2] * 48,
        "response_tokens": [20.0] * 50,
        "masked_share": [None] * 2 + [0.01] * 48,
        "explained_variance": [0.1] * 49 + [None],
    }
    return flat | changes


def missed(stability: ModuleType, values: dict[str, list[float | None]]) -> list[str]:
    sizes = stability.Sizes(steps=50, critic_only_steps=2)
    return [bar.name for bar in stability.bars_of(values, sizes) if not bar.holds]


def test_a_run_that_stays_as_it_was_misses_nothing(stability: ModuleType) -> None:
    assert missed(stability, curves()) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"success": [0.9] * 45 + [0.87] * 5}, "success, last tenth less second"),
        ({"success": [0.9] * 50, "entropy": [None] * 2 + [0.2] * 43 + [0.01] * 5}, "entropy, last tenth"),
        ({"response_tokens": [20.0] * 45 + [41.0] * 5}, "response length, last tenth over first"),
        ({"response_tokens": [20.0] * 45 + [9.0] * 5}, "response length, last tenth over first"),
        ({"masked_share": [None] * 2 + [0.06] * 48}, "masked share, mean"),
        ({"explained_variance": [-0.1] * 50}, "explained variance, mean"),
        ({"entropy": [None] * 2 + [0.2] * 20 + [None] + [0.2] * 27}, "numbers that are none"),
    ],
)
def test_a_collapse_is_seen_in_the_number_it_shows_in(
    stability: ModuleType, changes: dict[str, list[float | None]], name: str
) -> None:
    assert missed(stability, curves(**changes)) == [name]


def test_a_run_that_ended_early_is_no_long_run(stability: ModuleType) -> None:
    short = {name: values[:49] for name, values in curves().items()}
    assert missed(stability, short) == ["steps"]


def test_tenths_count_from_both_ends_and_skip_what_is_no_number(stability: ModuleType) -> None:
    values = [None, 1.0, *(float(i) for i in range(2, 20))]
    assert stability.tenth(values, 0) == 1.0
    assert stability.tenth(values, 1) == 2.5
    assert stability.tenth(values, -1) == 18.5


@pytest.mark.slow
def test_a_short_run_writes_the_diagnostics_of_every_step(
    stability: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "new" / "stability.json"
    assert stability.main(["--smoke", "--output_dir", str(tmp_path), "--json", str(figures)]) == 0
    with (tmp_path / "diagnostics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 21)]
    assert [row["staleness_mean"] for row in rows[:6]] == ["0.0", "1.0", "2.0", "3.0", "4.0", "4.0"]
    for name in ("masked_low", "masked_high", "policy_grad_norm", "critic_grad_norm", "truncation_rate"):
        assert all(row[name] for row in rows[2:]), name
    written = json.loads(figures.read_text())
    assert {bar["name"]: bar["value"] for bar in written["bars"]}["steps"] == 20
    assert len(written["tenths"]["success"]) == 10
    assert "mean of each tenth of the steps:" in capsys.readouterr().out
    assert (tmp_path / "stability.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--learning_rate", "0"], "--learning_rate is 0.0, must be above 0"),
        (["--staleness", "-1"], "--staleness is -1, must be at least 0"),
        (["--policy", "nowhere"], "--policy nowhere holds no model.safetensors"),
    ],
)
def test_bad_input_is_refused(
    stability: ModuleType, arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        stability.main(arguments)
    assert caught.value.code == 2
    assert match in capsys.readouterr().err
