"""Curves: well-formed, scaled right, silent about what is not finite."""

import math
import re
from xml.etree import ElementTree

import pytest

from agentenv.report.charts import (
    Interval,
    Series,
    interval_chart,
    line_chart,
    nice_ticks,
    smooth,
    standalone,
)


def paths(svg: str, kind: str) -> list[str]:
    """The ``d`` of every path of a class."""
    return [
        node.get("d", "")
        for node in ElementTree.fromstring(svg).iter("path")
        if kind in node.get("class", "")
    ]


def test_smoothing_is_a_centred_mean_that_shrinks_at_the_ends():
    assert smooth([0.0, 3.0, 6.0, 3.0], 3) == [1.5, 3.0, 4.0, 4.5]


def test_gaps_and_non_finite_values_take_no_part_in_the_mean():
    assert smooth([1.0, None, math.nan, 5.0], 3) == [1.0, 1.0, 5.0, 5.0]
    assert smooth([None, None], 3) == [None, None]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.5, 1.0]), (0.13, 0.61, [0.0, 0.2, 0.4, 0.6, 0.8]), (1, 70, [0, 50, 100])],
)
def test_ticks_are_round_numbers_that_enclose_the_range(low, high, expected):
    assert nice_ticks(low, high, 4) == expected


def test_a_constant_curve_still_has_an_axis():
    ticks = nice_ticks(0.0, 0.0, 5)
    assert ticks[0] <= 0.0 < ticks[-1]
    ElementTree.fromstring(line_chart([Series("x", [1], [0.0])]))


def test_a_short_run_has_no_ticks_between_its_steps():
    svg = line_chart([Series("x", [1, 2], [0.0, 1.0])], y_range=(0.0, 1.0), percent=True)
    texts = [node.text or "" for node in ElementTree.fromstring(svg).iter("text")]
    assert [text for text in texts if not text.endswith("%")] == ["1", "2", "step"]


def test_higher_values_lie_higher_and_later_steps_further_right():
    [path] = paths(line_chart([Series("x", [1, 2], [0.0, 1.0])], window=1), "smooth")
    x1, y1, x2, y2 = map(float, re.findall(r"[\d.]+", path))
    assert x1 < x2
    assert y1 > y2  # SVG counts down the page


def test_a_value_that_is_not_finite_breaks_the_curve_and_reaches_no_coordinate():
    svg = line_chart([Series("x", [1, 2, 3, 4], [0.1, math.nan, math.inf, 0.2])], window=1)
    [path] = paths(svg, "smooth")
    assert path.count("M") == 2
    assert not re.search(r"nan|inf", path)


def test_raw_and_smoothed_curves_are_both_drawn():
    svg = line_chart([Series("x", range(20), [0.5] * 20)])
    assert len(paths(svg, "raw")) == 1
    assert len(paths(svg, "smooth")) == 1


def test_a_series_without_any_number_says_so():
    assert "no data yet" in line_chart([Series("x", [1], [None])])


def test_two_series_are_named_and_three_are_refused():
    item = Series("<mean>", [1, 2], [1.0, 2.0])
    assert "&lt;mean&gt;" in line_chart([item, item])
    with pytest.raises(ValueError, match="one or two series, not 3"):
        line_chart([item] * 3)


def test_levels_widen_the_axis_so_that_they_are_visible():
    svg = line_chart([Series("x", [1, 2], [0.1, 0.2])], levels=[(0.9, "after: 90%")])
    ys = [float(node.get("y1", "nan")) for node in ElementTree.fromstring(svg).iter("line")]
    assert all(0 <= y <= 236 for y in ys)
    assert "after: 90%" in svg


def test_intervals_show_value_and_bounds():
    svg = interval_chart([Interval("before", 0.2, 0.1, 0.3), Interval("after", 0.5, 0.4, 0.6)])
    root = ElementTree.fromstring(svg)
    circles = [float(node.get("cx", "nan")) for node in root.iter("circle")]
    bars = [node for node in root.iter("line") if "smooth" in node.get("class", "")]
    assert circles[0] < circles[1]
    for circle, bar in zip(circles, bars, strict=True):
        assert float(bar.get("x1", "nan")) < circle < float(bar.get("x2", "nan"))


def test_a_standalone_chart_is_an_svg_file_with_its_own_colours():
    svg = standalone(line_chart([Series("x", [1, 2], [0.1, 0.2])], label="a > b"), title="A & B")
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_band_encloses_its_curve_and_lies_below_it_in_the_drawing_order():
    svg = line_chart([Series("x", [1, 2], [0.5, 0.5], band=[(0.4, 0.6), (0.3, 0.7)])], y_range=(0.0, 1.0))
    assert next(node.get("class") for node in ElementTree.fromstring(svg).iter("path")) == "band fill-one"
    [band], [curve] = paths(svg, "band"), paths(svg, "smooth")
    numbers = [float(number) for number in re.findall(r"[\d.]+", band)]
    (x1, low1), (x2, low2), (x3, high2), (x4, high1) = zip(numbers[::2], numbers[1::2], strict=True)
    assert (x1, x2) == (x4, x3)
    _, y1, _, y2 = map(float, re.findall(r"[\d.]+", curve))
    assert high2 < high1 < y1 == y2 < low1 < low2  # SVG counts down the page
    assert band.endswith("Z")


def test_a_mark_is_a_vertical_line_with_its_text_and_one_outside_the_curves_is_left_out():
    series = Series("x", [1, 2, 3], [0.0, 1.0, 0.0])
    svg = line_chart([series], window=1, marks=[(2, "a < b"), (9, "later")])
    [line] = [n for n in ElementTree.fromstring(svg).iter("line") if "dashed" in n.get("class", "")]
    [path] = paths(svg, "smooth")
    assert line.get("x1") == line.get("x2") == re.findall(r"[\d.]+", path)[2]
    assert [n.text for n in ElementTree.fromstring(svg).iter("text") if n.get("class") == "mark"] == ["a < b"]
