"""Curves and intervals as SVG text: no drawing library, no script, nothing fetched.

Invariants:
- The output is well-formed XML; every text put into it is escaped.
- Non-finite values leave a gap in a curve; they never reach a coordinate.
- Colours are CSS variables with a light and a dark value, so that a chart follows the page it stands in;
  :func:`standalone` adds the variables to a chart that stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 236
"""Size of a chart in SVG user units; pages scale it."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 32

PALETTE = """
:root { --ink: #1f2328; --soft: #656d76; --grid: #e4e7eb; --paper: #ffffff; --card: #f6f8fa;
        --one: #0b6bcb; --two: #c2410c; --good: #1a7f37; --warn: #9a3412; --warn-paper: #fff1e7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4af; --grid: #30363d; --paper: #0d1117; --card: #161b22;
          --one: #58a6ff; --two: #ff9b5e; --good: #4cc764; --warn: #ffb58a; --warn-paper: #33190d; }
}
"""
"""The colours of page and charts as CSS variables."""

CHART_STYLE = """
.chart text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
.chart .level { paint-order: stroke; stroke: var(--back, var(--card)); stroke-width: 4; }
.chart .name { fill: var(--ink); font-weight: 600; }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .axis { stroke: var(--soft); stroke-width: 1; }
.chart .dashed { stroke-dasharray: 4 4; }
.chart .band { opacity: .16; }
.chart .raw { fill: none; stroke-width: 1; opacity: .35; }
.chart .smooth { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.chart .one { stroke: var(--one); } .chart .two { stroke: var(--two); }
.chart .fill-one { fill: var(--one); stroke: none; } .chart .fill-two { fill: var(--two); stroke: none; }
"""

_STANDALONE_STYLE = ":root { --back: var(--paper); } .paper { fill: var(--paper); }"


@dataclass(frozen=True)
class Series:
    """One curve: ``ys[i]`` at ``xs[i]``; None or a non-finite value is a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    band: Sequence[tuple[float, float]] = ()
    """Lower and upper end of an interval at each ``xs[i]``, drawn as it is given; empty: none."""


@dataclass(frozen=True)
class Interval:
    """One row of an interval chart: a value with the bounds of its confidence interval."""

    name: str
    value: float
    low: float
    high: float


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Centred moving mean; at the ends the window shrinks to what exists, gaps take no part.

    Args:
        values: one value a step.
        window: width in steps, at least 1.
    """
    if window < 1:
        raise ValueError(f"window is {window}, must be at least 1")
    half = window // 2
    result: list[float | None] = []
    for index in range(len(values)):
        around = values[max(0, index - half) : index + half + 1]
        near = [value for value in around if value is not None and math.isfinite(value)]
        result.append(sum(near) / len(near) if near else None)
    return result


def smoothing_window(steps: int) -> int:
    """Steps that the bold curves average over: an eighth of the run, odd, at least 1."""
    return max(1, steps // 8) | 1


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str = "step",
    y_range: tuple[float | None, float | None] = (None, None),
    window: int | None = None,
    percent: bool = False,
    levels: Sequence[tuple[float, str]] = (),
    marks: Sequence[tuple[float, str]] = (),
    label: str = "",
) -> str:
    """An ``<svg>`` with at most two curves, each raw (faint) and smoothed (bold).

    Args:
        series: one or two curves.
        x_label: name of the horizontal axis.
        y_range: fixed lower and upper end of the vertical axis; None follows the data.
        window: steps of the smoothing; None chooses by :func:`smoothing_window`, 1 draws the bold curve only.
        percent: write the vertical axis in per cent.
        levels: dashed horizontal lines ``(value, text)``, such as the success before training.
        marks: dashed vertical lines ``(x, text)``, such as a change of the task; those outside the curves are left out.
        label: what a screen reader says.
    """
    if not 1 <= len(series) <= 2:
        raise ValueError(f"a chart has one or two series, not {len(series)}")
    finite = [
        (x, y)
        for item in series
        for x, y in zip(item.xs, item.ys, strict=True)
        if y is not None and math.isfinite(y)
    ]
    if not finite:
        return _frame(_text("no data yet", WIDTH / 2, HEIGHT / 2, "middle"), label)
    finite_y = [y for _, y in finite] + [value for value, _ in levels]
    low = min(finite_y) if y_range[0] is None else y_range[0]
    high = max(finite_y) if y_range[1] is None else y_range[1]
    y_ticks = nice_ticks(low, high, 5)
    # A fixed end stays where it is; a free one moves out to the next tick.
    low = min(low, y_ticks[0]) if y_range[0] is None else low
    high = max(high, y_ticks[-1]) if y_range[1] is None else high
    if high <= low:
        high = low + 1.0
    x_low, x_high, at_x = _x_scale([x for x, _ in finite])
    top = _TOP + 12 if len(series) > 1 else _TOP

    def at_y(y: float) -> float:
        inside = min(max(y, low), high)
        return top + (high - inside) / (high - low) * (HEIGHT - top - _BOTTOM)

    parts = []
    for tick in y_ticks:
        if low - 1e-9 <= tick <= high + 1e-9:
            y = at_y(tick)
            parts.append(_line("grid", _LEFT, y, WIDTH - _RIGHT, y))
            parts.append(_text(f"{tick * 100:g}%" if percent else f"{tick:g}", _LEFT - 7, y + 4, "end"))
    base = HEIGHT - _BOTTOM
    parts.append(_x_axis(x_low, x_high, at_x, x_label))
    for x, text in marks:
        if x_low <= x <= x_high:
            parts.append(_line("axis dashed", at_x(x), top, at_x(x), base))
            parts.append(_text(text, at_x(x), top - 4, "start", "mark"))
    for index, item in enumerate(series):
        colour = ("one", "two")[index]
        if item.band:
            xs = [at_x(x) for x in item.xs]
            lower, upper = ([at_y(ends[side]) for ends in item.band] for side in (0, 1))
            outline = [*zip(xs, lower, strict=True), *reversed([*zip(xs, upper, strict=True)])]
            parts.append(f'<path class="band fill-{colour}" d="{_path(outline)}Z"/>')
        width = smoothing_window(len(item.ys)) if window is None else window
        curves = (
            [("smooth", item.ys)] if width == 1 else [("raw", item.ys), ("smooth", smooth(item.ys, width))]
        )
        for kind, ys in curves:
            points = [
                (at_x(x), at_y(y)) if y is not None and math.isfinite(y) else None
                for x, y in zip(item.xs, ys, strict=True)
            ]
            parts.append(f'<path class="{kind} {colour}" d="{_path(points)}"/>')
        if len(series) > 1:
            x = _LEFT + 8 + 150 * index
            parts.append(_line(f"smooth {colour}", x, 7, x + 16, 7))
            parts.append(_text(item.name, x + 21, 11, "start"))
    ends = [y for y in series[0].ys if y is not None and math.isfinite(y)]
    for value, text in levels:
        y = at_y(value)
        # The label goes to that end of the line that the curve keeps away from.
        at_left = bool(ends) and abs(ends[0] - value) > abs(ends[-1] - value)
        x = _LEFT + 4 if at_left else WIDTH - _RIGHT - 4
        parts.append(_line("axis dashed", _LEFT, y, WIDTH - _RIGHT, y))
        parts.append(_text(text, x, y - 5, "start" if at_left else "end", "level"))
    return _frame("".join(parts), label or series[0].name)


def stacked_chart(
    xs: Sequence[float], layers: Mapping[str, Sequence[float]], *, x_label: str = "step", label: str = ""
) -> str:
    """An ``<svg>`` of shares that make up the whole at each x, one band above the other, the first at the bottom.

    Args:
        xs: ascending.
        layers: per name one share at each x, between 0 and 1; at each x they add up to 1.
        x_label: name of the horizontal axis.
        label: what a screen reader says.
    """
    if not xs or not layers:
        return _frame(_text("no data yet", WIDTH / 2, HEIGHT / 2, "middle"), label)
    x_low, x_high, at_x = _x_scale(xs)
    top, base = _TOP + 12, HEIGHT - _BOTTOM

    def at_y(share: float) -> float:
        return top + (1.0 - min(max(share, 0.0), 1.0)) * (base - top)

    # Shares are those of a step: a single one is drawn as wide as the chart.
    columns = [at_x(x) for x in xs] if len(xs) > 1 else [at_x(x_low), at_x(x_high)]
    below = [0.0] * len(xs)
    parts = []
    for index, (name, shares) in enumerate(layers.items()):
        above = [low + share for low, share in zip(below, shares, strict=True)]
        edges = [list(edge) if len(xs) > 1 else list(edge) * 2 for edge in (below, above)]
        lower, upper = ([*zip(columns, map(at_y, edge), strict=True)] for edge in edges)
        shade = f'fill-opacity="{0.15 + 0.75 * index / max(1, len(layers) - 1):.2f}"'
        parts.append(f'<path class="fill-one" {shade} d="{_path([*lower, *reversed(upper)])}Z"/>')
        x = _LEFT + 8 + 104 * index
        parts.append(f'<rect class="fill-one" {shade} x="{x}" y="2" width="12" height="10"/>')
        parts.append(_text(name, x + 17, 11, "start"))
        below = above
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line("grid", _LEFT, at_y(tick), WIDTH - _RIGHT, at_y(tick)))
        parts.append(_text(f"{tick * 100:g}%", _LEFT - 7, at_y(tick) + 4, "end"))
    parts.append(_x_axis(x_low, x_high, at_x, x_label))
    return _frame("".join(parts), label)


def interval_chart(rows: Sequence[Interval], *, label: str = "", height_per_row: int = 44) -> str:
    """An ``<svg>`` of shares between 0 and 1 with their intervals, one row each."""
    height = height_per_row * len(rows) + 34
    left, right = 118, 24

    def at_x(share: float) -> float:
        return left + min(max(share, 0.0), 1.0) * (WIDTH - left - right)

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = at_x(tick)
        parts.append(_line("grid", x, 6, x, height - 24))
        parts.append(_text(f"{tick * 100:g}%", x, height - 8, "middle"))
    for index, row in enumerate(rows):
        x, y = at_x(row.value), 6 + height_per_row * (index + 0.5)
        colour = "two" if index % 2 else "one"
        parts.append(_text(row.name, left - 12, y + 4, "end", "name"))
        parts.append(_line(f"smooth {colour}", at_x(row.low), y, at_x(row.high), y))
        parts.append(f'<circle class="fill-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
        parts.append(_text(f"{row.value * 100:.1f}%", x, y - 10, "middle", "name"))
    return _frame("".join(parts), label, height=height)


def standalone(svg: str, *, title: str = "") -> str:
    """A chart as a file of its own: with namespace, colours and background, light or dark."""
    head, _, body = svg.partition(">")
    style = f"<style>{PALETTE}{CHART_STYLE}{_STANDALONE_STYLE}</style>"
    name = f"<title>{escape(title)}</title>" if title else ""
    background = '<rect class="paper" width="100%" height="100%" rx="6"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg">{name}{style}{background}{body}\n'


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` numbers, 1, 2 or 5 times a power of ten apart, from below ``low`` to above ``high``."""
    span = high - low
    if not span > 0:
        span = abs(high) or 1.0
    raw = span / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if raw <= factor * power * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _x_scale(xs: Sequence[float]) -> tuple[float, float, Callable[[float], float]]:
    """Both ends of the horizontal axis, and where an x lies on it."""
    low, high = min(xs), max(xs)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    return low, high, lambda x: _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)


def _x_axis(low: float, high: float, at_x: Callable[[float], float], name: str) -> str:
    base = HEIGHT - _BOTTOM
    parts = [_line("axis", _LEFT, base, WIDTH - _RIGHT, base)]
    for tick in nice_ticks(low, high, 7):
        # Steps are whole numbers: a short run gets no ticks between them.
        if low <= tick <= high and tick == round(tick):
            parts.append(_text(f"{tick:g}", at_x(tick), base + 15, "middle"))
    return "".join([*parts, _text(name, WIDTH - _RIGHT, HEIGHT - 3, "end")])


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(content: str, x: float, y: float, anchor: str, style: str = "") -> str:
    name = f' class="{style}"' if style else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    commands: list[str] = []
    pen_up = True
    for point in points:
        if point is not None:
            commands.append(f"{'M' if pen_up else 'L'}{point[0]:.1f} {point[1]:.1f}")
        pen_up = point is None
    # One point alone draws nothing as a path; a line to itself with round caps is a dot.
    return commands[0] + commands[0].replace("M", "L") if len(commands) == 1 else "".join(commands)


def _frame(content: str, label: str, *, height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">{content}</svg>'
    )
