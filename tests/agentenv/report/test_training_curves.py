"""The curves of a run: those of a long one are thinned to means, and staleness is shown in bands."""

import re

import pytest

from agentenv.report.training_curves import render_curves, thinned


def test_few_lines_stay_as_they_are():
    lines = [{"step": 1.0}, {"step": 2.0}]
    assert thinned(lines, 2) is lines


def test_many_lines_become_means_of_neighbours_without_gaps():
    lines = [{"step": float(n), "reward": None if n % 2 else float(n)} for n in range(10)]
    assert thinned(lines, 5) == [
        {"step": 0.5, "reward": 0.0},
        {"step": 2.5, "reward": 2.0},
        {"step": 4.5, "reward": 4.0},
        {"step": 6.5, "reward": 6.0},
        {"step": 8.5, "reward": 8.0},
    ]


@pytest.mark.parametrize("count", [401, 1000, 99_999])
def test_every_line_counts_once(count):
    lines = [{"step": 1.0, f"only {n % 7}": 1.0} for n in range(count)]
    assert len(thinned(lines, 400)) == 400
    assert {name for line in thinned(lines, 400) for name in line} == {
        name for line in lines for name in line
    }


def test_episodes_that_only_some_of_the_lines_count_are_averaged_over_all_of_them():
    lines = [{"step": 1, "staleness/0": 8.0}, {"step": 2, "staleness/1": 8.0}]
    assert thinned(lines, 1) == [{"step": 1.5, "staleness/0": 4.0, "staleness/1": 4.0}]


def test_staleness_is_shown_as_shares_with_all_that_is_older_than_three_in_one_band():
    figures = render_curves(
        [
            {"step": 1, "staleness/0": 8.0},
            {"step": 2, "staleness/1": 4.0, "staleness/5": 2.0, "staleness/9": 2.0},
        ]
    )
    assert re.findall(r">(0 updates old|1|2|3|4 or more)</text>", figures)[:3] == [
        "0 updates old",
        "1",
        "4 or more",
    ]
    # The topmost of three bands, half of step 2: from (52, 26) at step 1 along its lower edge to half the height.
    assert 'd="M52.0 26.0L548.0 115.0L548.0 26.0L52.0 26.0Z"' in figures


def test_what_was_not_logged_has_no_curve():
    assert render_curves([]) == ""
    assert render_curves([{"step": 1, "reward": 0.5}]).count("<figure>") == 1
