"""Bars: who clears one, and what is printed about it."""

import io
import json
import math

import pytest

from agentenv.report.bars import Bar, conclude, print_bars


@pytest.mark.parametrize(
    ("value", "relation", "limit", "holds"),
    [
        (1.0, "<=", 1.0, True),
        (1.1, "<=", 1.0, False),
        (5.0, ">=", 5.0, True),
        (4.9, ">=", 5.0, False),
        (0, "==", 0, True),
        (1, "==", 0, False),
    ],
)
def test_a_bar_holds_as_its_relation_says(value, relation, limit, holds):
    assert Bar("figure", value, relation, limit).holds is holds


@pytest.mark.parametrize("relation", ["<=", ">=", "=="])
def test_what_is_not_a_number_clears_no_bar(relation):
    bar = Bar("figure", math.nan, relation, 1.0)
    assert not bar.holds
    assert json.loads(json.dumps(bar.as_dict(), allow_nan=False))["value"] == "nan"


def test_an_unknown_relation_is_refused():
    with pytest.raises(ValueError, match="relation is '<', must be one of <=, >=, =="):
        Bar("figure", 1.0, "<", 2.0)  # type: ignore[arg-type]


def test_every_figure_is_printed_with_its_bar_and_one_miss_is_a_miss():
    out = io.StringIO()
    good = Bar("speed-up", 5.25, ">=", 5.0, "x")
    bad = Bar("episodes lost", 3, "==", 0)
    assert not print_bars([bad, good], out)
    assert out.getvalue() == (
        "MISSED  episodes lost: 3 (bar: == 0)\nok      speed-up: 5.25 x (bar: >= 5 x)\n"
    )
    assert print_bars([good], out)


def test_a_benchmark_ends_with_its_file_and_a_verdict(tmp_path, capsys):
    bars = [Bar("speed-up", 4.0, ">=", 5.0, "x")]
    file = tmp_path / "new" / "file.json"
    assert conclude(bars, assumed={"cpus": 2, "load": 0.1}, figures={"rate": 4.0}, json_file=file) == 0
    assert conclude(bars, assumed={}, figures={}, check=True) == 1
    assert conclude([], assumed={}, figures={}, check=True) == 0
    assert capsys.readouterr().out.startswith("assumed: cpus 2, load 0.1\nMISSED  speed-up: 4 x")
    written = json.loads(file.read_text())
    assert written == {
        "assumed": {"cpus": 2, "load": 0.1},
        "figures": {"rate": 4.0},
        "bars": [bars[0].as_dict()],
    }


def test_large_figures_are_readable():
    assert str(Bar("memory", 1234567.8, "<=", 2e6, "bytes")) == (
        "ok      memory: 1,234,568 bytes (bar: <= 2,000,000 bytes)"
    )
