"""The curves of a run's training: which metrics the report draws, and what it says beside them.

Invariants:
- A curve of a metric that was not logged is left out.
- A page has at most :data:`MOST_POINTS` points of a curve, however long the run: neighbouring steps are averaged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from agentenv.report.charts import Series, line_chart, stacked_chart

MOST_POINTS = 500
"""A chart is about as many pixels wide."""


class Curve:
    """A chart of one or two metrics and what to say beside it."""

    def __init__(
        self,
        title: str,
        names: Mapping[str, str],
        text: str,
        *,
        y_range: tuple[float | None, float | None] = (None, None),
        percent: bool = False,
    ) -> None:
        self.title, self.names, self.text = title, names, text
        self.y_range, self.percent = y_range, percent

    def svg(self, metrics: Sequence[Mapping[str, Any]]) -> str:
        """The chart alone; empty where none of the metrics was logged."""
        series = []
        for name, label in self.names.items():
            lines = [line for line in metrics if name in line]
            if lines:
                series.append(Series(label, [line["step"] for line in lines], [line[name] for line in lines]))
        if not series:
            return ""
        return line_chart(series, y_range=self.y_range, percent=self.percent, label=self.title)


CURVES = (
    Curve("Success", {"success": "success"}, "Share of the batch's episodes that solved their task.",
          y_range=(0.0, None), percent=True),
    Curve("Reward", {"reward": "reward"}, "Mean reward of the batch."),
    Curve("Explained variance", {"explained_variance": "explained variance"},
          "How much of the returns' variance the critic predicts; 0 or below: the critic knows nothing.",
          y_range=(None, 1.0)),
    Curve("Masked share", {"masked_low": "ratio too low", "masked_high": "ratio too high"},
          "Tokens that the objective left without gradient; a steep rise means the rollouts are too old.",
          y_range=(0.0, None), percent=True),
    Curve("Staleness", {"staleness_mean": "mean", "staleness_max": "max"},
          "Weight updates between an episode's start and its use; bounded by the asynchrony setting.",
          y_range=(0.0, None)),
    Curve("Groups without a difference", {"zero_variance_share": "share"},
          "Groups whose rewards are all equal; nothing is learned from them.", y_range=(0.0, 1.0), percent=True),
    Curve("Response length", {"response_tokens": "tokens"},
          "Tokens the policy wrote per episode; a collapse often shows here first.", y_range=(0.0, None)),
    Curve("Cut off", {"truncation_rate": "share"}, "Episodes that a limit of turns or tokens ended.",
          y_range=(0.0, None), percent=True),
    Curve("Entropy", {"entropy": "entropy"}, "Of the policy, nats per token; near 0 it explores no more.",
          y_range=(0.0, None)),
    Curve("Gradient norms", {"policy_grad_norm": "policy", "critic_grad_norm": "critic"},
          "Before clipping. Spikes, or a steady climb, come before many a collapse.", y_range=(0.0, None)),
    Curve("Failures", {"failure_rate": "share"},
          "Episodes that an environment, a sandbox or an engine failed, of the last ones.",
          y_range=(0.0, None), percent=True),
    Curve("Speed", {"episodes_per_s": "episodes/s"}, "Finished episodes per second.", y_range=(0.0, None)),
)  # fmt: skip


def render_curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The figures of all curves; empty where no step has finished."""
    thin = thinned(metrics)
    figures = [_figure(curve.title, curve.text, curve.svg(thin)) for curve in CURVES]
    return "".join([*figures, _staleness_bands(thin)])


def thinned(metrics: Sequence[Mapping[str, Any]], points: int = MOST_POINTS) -> Sequence[Mapping[str, Any]]:
    """The lines, or where there are more than ``points`` so many means over lines that follow each other."""
    if len(metrics) <= points:
        return metrics
    edges = [len(metrics) * index // points for index in range(points + 1)]
    return [_mean(metrics[start:end]) for start, end in itertools.pairwise(edges)]


def _mean(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
        values = [value for value in values if math.isfinite(value)]
        # A number of episodes is logged only where there are such.
        count = len(lines) if name.startswith("staleness/") else len(values)
        means[name] = sum(values) / count if values else None
    return means


def _staleness_bands(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Which share of each batch started how many weight updates earlier."""
    ages = [
        (age, label)
        for age, label in ((0, "0 updates old"), (1, "1"), (2, "2"), (3, "3"), (4, "4 or more"))
        if any(line.get(f"staleness/{age}") for line in metrics) or age == 4
    ]
    lines = [(line, _ages(line)) for line in metrics]
    lines = [(line, counts) for line, counts in lines if sum(counts.values())]
    if not lines:
        return ""
    layers = {}
    for age, label in ages:
        shares = [
            sum(number for old, number in counts.items() if (old >= 4 if age == 4 else old == age))
            / sum(counts.values())
            for _, counts in lines
        ]
        if any(shares):
            layers[label] = shares
    svg = stacked_chart(
        [line["step"] for line, _ in lines], layers, label="Staleness of the batch's episodes"
    )
    return _figure(
        "Staleness of the batch",
        "Share of the episodes by the number of weight updates since their start.",
        svg,
    )


def _ages(line: Mapping[str, Any]) -> dict[int, float]:
    return {
        int(name.partition("/")[2]): value
        for name, value in line.items()
        if name.startswith("staleness/") and name.partition("/")[2].isdecimal() and value
    }


def _figure(title: str, text: str, svg: str) -> str:
    if not svg:
        return ""
    caption = f"<b>{escape(title)}</b><span>{escape(text)}</span>"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"
