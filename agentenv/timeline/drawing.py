"""Draws timelines with matplotlib: who was busy when, a row for each, weight syncs as lines through all rows.

Invariants:

* All runs of a picture have one scale of time, each from the start of its window.
* Rows that are left out, for there are too many, are counted in the row's label.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.timeline.reading import RecordedTrace, Span
from agentenv.timeline.shares import Segment, Shares, Window, innermost, tracks_of, weight_syncs

__all__ = ["draw"]

MOST_ROWS = 16
"""Of one kind, in a picture."""
_PIXELS = 2400
"""Of the widest row: what is shorter than one is left to what is around it."""
_COLOURS: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "waiting": "#e5e7eb",
        "critic update": "#8b5cf6",
        "policy update": "#15803d",
        "weight sync": "#b91c1c",
        "evaluation": "#94a3b8",
        "checkpoint": "#57534e",
    },
    "engines": {"busy": "#0e7490"},
    "environments": {
        "generate": "#0b6bcb",
        "step": "#f59e0b",
        "reset": "#a16207",
        "barrier": "#cbd5e1",
        "settling": "#fca5a5",
    },
}
_NAMES = {
    "waiting": "trainer waits for a batch",
    "busy": "engine has requests",
    "generate": "waits for the policy",
    "step": "environment acts",
    "barrier": "waits for the others",
}
_SYNC = "#b91c1c"
_MARKS = {"failed": ("x", "#b91c1c"), "cancelled": ("|", "#111827"), "discarded": ("|", "#6b7280")}


def draw(names: Sequence[str], traces: Sequence[RecordedTrace], found: Sequence[Shares]) -> Any:
    """The picture of runs, one below the other.

    Args:
        names: of the runs.
        traces: theirs.
        found: the shares of what is drawn of each.

    Returns:
        a matplotlib figure.
    """
    from matplotlib.figure import Figure

    rows = [_rows(trace) for trace in traces]
    heights = [len(of_run) + 2.5 for of_run in rows]
    figure = Figure(figsize=(11.0, 0.8 + 0.19 * sum(heights)), layout="constrained")
    panels = figure.subplots(
        len(traces), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    legend: dict[str, Any] = {}
    for name, trace, share, of_run, axes in zip(names, traces, found, rows, panels, strict=True):
        _draw_run(axes, trace, share.window, of_run, legend)
        axes.set_title(f"{_plain(name)}: {_steps(share.window)}\n{headline(share)}", fontsize=9, loc="left")
    panels[-1].set_xlabel("seconds from the start of the first step drawn")
    panels[0].set_xlim(0.0, max(share.window.seconds for share in found))
    figure.legend(
        legend.values(), legend.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8
    )
    return figure


def headline(found: Shares) -> str:
    """The shares of time in which something stood still, in a line."""
    parts = []
    if (trainer := found.states.get("trainer")) is not None:
        parts.append(f"trainer waits {trainer['waiting']:.0%}")
    if (slots := found.states.get("environments")) is not None:
        parts.append(
            f"environments without episode {slots['idle']:.0%}, waiting for the policy {slots['generate']:.0%}"
        )
    if (engines := found.states.get("engines")) is not None:
        parts.append(f"engines idle {engines['idle']:.0%}")
    return "; ".join(parts)


def _steps(window: Window) -> str:
    if window.steps is None:
        return f"{window.seconds:.1f} s"
    return f"training steps {window.steps[0]} to {window.steps[1]}, {window.seconds:.1f} s"


def _plain(text: str) -> str:
    """Without what matplotlib would take for mathematics."""
    return text.replace("$", r"\$")


def _rows(trace: RecordedTrace) -> list[tuple[str, str, list[Span]]]:
    """Kind, label and spans of the rows, from top to bottom."""
    rows = []
    for kind in _COLOURS:
        tracks = list(tracks_of(trace, kind).items())
        chosen = tracks
        if len(tracks) > MOST_ROWS:
            places = [round(number * (len(tracks) - 1) / (MOST_ROWS - 1)) for number in range(MOST_ROWS)]
            chosen = [tracks[place] for place in places]
        for number, (name, spans) in enumerate(chosen):
            more = f" ({len(chosen)} of {len(tracks)})" if number == 0 and len(chosen) < len(tracks) else ""
            rows.append((kind, _plain(name) + more, spans))
    return rows


def _draw_run(
    axes: Any,
    trace: RecordedTrace,
    window: Window,
    rows: Sequence[tuple[str, str, list[Span]]],
    legend: dict[str, Any],
) -> None:
    ends: dict[str, tuple[float, int]] = {}
    for row, (kind, _, spans) in enumerate(rows):
        bars: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for segment in _thinned(innermost(kind, spans, window), window):
            bars[segment.state].append((segment.start_s - window.start_s, segment.end_s - segment.start_s))
        for state, colour in _COLOURS[kind].items():
            if state in bars:
                drawn = axes.broken_barh(bars[state], (row - 0.4, 0.8), facecolor=colour, linewidth=0)
                legend.setdefault(_NAMES.get(state, state), drawn)
        if kind == "environments":
            for span in spans:
                if span.name == "episode":
                    ends[str(span.arguments.get("episode"))] = (span.end_s, row)
    for moment in weight_syncs(trace, window):
        line = axes.axvline(moment - window.start_s, color=_SYNC, linewidth=0.8, alpha=0.8, zorder=3)
        legend.setdefault("engines have new weights", line)
    for kind, (marker, colour) in _MARKS.items():
        places = [
            ends[episode]
            for instant in trace.instants
            if instant.name == kind and (episode := str(instant.arguments.get("episode"))) in ends
        ]
        inside = [(at - window.start_s, row) for at, row in places if window.start_s <= at < window.end_s]
        if inside:
            drawn = axes.scatter(*zip(*inside, strict=True), marker=marker, color=colour, s=22, zorder=4)
            legend.setdefault(f"episode {kind}", drawn)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [label for _, label, _ in rows], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _thinned(segments: Sequence[Segment], window: Window) -> list[Segment]:
    """Segments in which nothing is shorter than a pixel, where there are more than can be seen."""
    if len(segments) <= _PIXELS:
        return list(segments)
    pixel = window.seconds / _PIXELS
    thinned: list[Segment] = []
    lasting: defaultdict[str, float] = defaultdict(float)
    start = segments[0].start_s
    for segment in segments:
        lasting[segment.state] += segment.end_s - segment.start_s
        if segment.end_s - start >= pixel:
            thinned.append(Segment(max(lasting, key=lambda state: lasting[state]), start, segment.end_s))
            lasting.clear()
            start = segment.end_s
    return thinned
