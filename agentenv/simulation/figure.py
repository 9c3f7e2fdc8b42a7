"""What a simulated figure is made of: cases, measurements over seeds, a table with the paper's numbers, bars.

Invariants:

* A measurement is a function of (figure, case, seed), but where it is one of cost; cases are compared on the same
  seeds.
* Every parameter that the paper does not state stands in ``assumed``, and goes wherever the result goes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.report.bars import Bar
from agentenv.simulation.experiment import Run

Measurement = Mapping[str, float]
Measurements = Mapping[str, Sequence[Measurement]]
"""By case, one per seed, in the order of the seeds."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Student's interval of the mean; NaN for its ends where one value says nothing about them.

        Raises:
            ValueError: no values.
        """
        if not values:
            raise ValueError("Estimate.of got no values")
        mean = statistics.fmean(values)
        if len(values) == 1:
            return cls(mean, math.nan, math.nan, 1)
        half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half, len(values))

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON: an unknown end is null."""
        low, high = (None if math.isnan(end) else end for end in (self.low, self.high))
        return {"mean": self.mean, "low": low, "high": high, "seeds": self.seeds}

    def __str__(self) -> str:
        half = self.high - self.mean
        return show(self.mean) if math.isnan(half) else f"{show(self.mean)} ± {show(half)}"


def t_quantile(degrees: int) -> float:
    """The 97.5 % point of Student's t, to 0.3 %, from its expansion about the normal one."""
    if degrees <= 3:
        return (12.706, 4.303, 3.182)[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


Cell = str | float | Estimate | None
"""Of a table; None where there is nothing to say."""


@dataclass(frozen=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Rows by column, for JSON."""
        return [
            {
                column: cell.as_dict() if isinstance(cell, Estimate) else cell
                for column, cell in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        texts = [self.columns, *(tuple(_cell(cell) for cell in row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if number == 0 else text.rjust(width)
                for number, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in texts
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)


@dataclass(frozen=True)
class Summary:
    """What a figure came to."""

    table: Table
    bars: Sequence[Bar]
    notes: Sequence[str] = ()
    """Findings in words, one a line."""
    curves: Mapping[str, Any] = field(default_factory=dict)
    """What the plot is drawn from; JSON-able."""


@dataclass(frozen=True)
class Figure:
    """One figure of the paper, a check of its theory, or a question of ours. All functions are pure.

    ``measure`` runs in worker processes: it is a function of a module, and so are the others.
    """

    name: str
    """On the command line."""
    title: str
    cases: tuple[str, ...]
    seeds: int
    """How many by default."""
    assumed: Mapping[str, str]
    """Parameters that the paper does not state, with their values."""
    measure: Callable[[str, int], Measurement]
    """(case, seed) -> named numbers."""
    summarise: Callable[[Measurements], Summary]
    draw: Callable[[Summary, Any], None]
    """(summary, matplotlib Figure) -> the plot."""
    measures_cost: bool = False
    """Of CPU time or memory: each measurement is made in a process of its own, by default none beside another."""
    sized: Callable[[int], Figure] | None = None
    """The figure for another number of environments, where that can be chosen; UsageError where it is no good."""
    runs: Mapping[str, Run] = field(default_factory=dict)
    """Runs that show what the figure is about, by name; ``agentenv simulate NAME --trace`` traces them."""


def show(value: float) -> str:
    """A number with as many digits as a person reads."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def column(measurements: Sequence[Measurement], name: str) -> list[float]:
    """One number of every seed."""
    return [measurement[name] for measurement in measurements]


def ratio(measurements: Sequence[Measurement], above: str, below: str) -> Estimate:
    """The mean over seeds of a ratio."""
    return Estimate.of([measurement[above] / measurement[below] for measurement in measurements])


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return show(cell) if isinstance(cell, int | float) else str(cell)
