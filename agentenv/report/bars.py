"""Measured figures and the bars they must clear: what ``--check`` of benchmarks and simulations prints and judges.

Invariants:
- A value that is not a number clears no bar.
- Printing is judging: the returned verdict is that of the lines printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

Relation = Literal["<=", ">=", "=="]


@dataclass(frozen=True)
class Bar:
    """One figure and its limit.

    Args:
        name: what was measured, as a person reads it.
        value: the measured figure.
        relation: that must hold between ``value`` and ``limit``.
        limit: the bar.
        unit: of both, for reading.

    Raises:
        ValueError: an unknown relation.
    """

    name: str
    value: float
    relation: Relation
    limit: float
    unit: str = ""

    def __post_init__(self) -> None:
        if self.relation not in get_args(Relation):
            raise ValueError(
                f"Bar.relation is {self.relation!r}, must be one of {', '.join(get_args(Relation))}"
            )

    @property
    def holds(self) -> bool:
        """The figure clears its bar."""
        if self.relation == "<=":
            return self.value <= self.limit
        if self.relation == ">=":
            return self.value >= self.limit
        return self.value == self.limit

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file; a value that is not finite becomes a string, as JSON has no number for it."""
        return {
            "name": self.name,
            "value": _jsonable(self.value),
            "relation": self.relation,
            "limit": _jsonable(self.limit),
            "unit": self.unit,
            "holds": self.holds,
        }

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        verdict = "ok" if self.holds else "MISSED"
        limit = f"bar: {self.relation} {_short(self.limit)}{unit}"
        return f"{verdict:<6}  {self.name}: {_short(self.value)}{unit} ({limit})"


def print_bars(bars: Iterable[Bar], stream: IO[str] | None = None) -> bool:
    """Print each figure with its bar, one a line.

    Args:
        bars: what was measured.
        stream: where to; stdout by default.

    Returns:
        whether all of them hold.
    """
    bars = list(bars)
    out = stream if stream is not None else sys.stdout
    for bar in bars:
        out.write(f"{bar}\n")
    out.flush()
    return all(bar.holds for bar in bars)


def conclude(
    bars: Iterable[Bar],
    *,
    assumed: Mapping[str, object],
    figures: object,
    json_file: Path | None = None,
    check: bool = False,
) -> int:
    """The end of a benchmark: print what it assumed and its bars, write all of it, and judge.

    Args:
        bars: what was measured.
        assumed: sizes, versions, machine.
        figures: JSON-able, for the file.
        json_file: where to; its folder is made. None: nowhere.
        check: whether a missed bar counts.

    Returns:
        the exit code: 1 where one is missed and counts.
    """
    bars = list(bars)
    sys.stdout.write("assumed: " + ", ".join(f"{name} {value}" for name, value in assumed.items()) + "\n")
    held = print_bars(bars)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        results = {"assumed": dict(assumed), "figures": figures, "bars": [bar.as_dict() for bar in bars]}
        json_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(check and not held)


def _short(value: float) -> str:
    if isinstance(value, int) or (abs(value) < 1e15 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _jsonable(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)
