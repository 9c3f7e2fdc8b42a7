"""The curves of a long run are thinned to means."""

import pytest

from agentenv.viewer.run_files import thinned


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
