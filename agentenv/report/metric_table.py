"""What a training step logs, explained: the rows of `metrics.toml`, and the tables of docs/metrics.md made of them.

python -m agentenv.report.metric_table docs/metrics.md     after a change of metrics.toml
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Metric", "fill_page", "find_metric", "metric_table"]

_HEAD = "| name | unit | how it is computed | what bad looks like |\n|---|---|---|---|\n"
_TABLE = re.compile(
    r"(?P<before>^## (?P<section>\w+)\n(?:(?!## |\|).*\n)*)" + re.escape(_HEAD) + r"(?:\|.*\n)*", re.MULTILINE
)


@dataclass(frozen=True)
class Metric:
    """One row: a number, or several that belong together. All but the names is Markdown."""

    names: tuple[str, ...]
    """As logged; ``staleness/N`` and ``discarded/REASON`` stand for all of their kind."""
    how: str
    """How it is computed."""
    unit: str = ""
    bad: str = ""
    """What bad looks like; "" where nothing does."""


@cache
def metric_table() -> dict[str, tuple[Metric, ...]]:
    """All rows, by section of the page."""
    text = (Path(__file__).parent / "metrics.toml").read_text(encoding="utf-8")
    return {
        section: tuple(Metric(**{**row, "names": tuple(row["names"])}) for row in rows)
        for section, rows in tomllib.loads(text).items()
    }


def find_metric(name: str) -> Metric | None:
    """The row of a logged name; None for one that is not explained."""
    rows = [metric for section in metric_table().values() for metric in section]
    family = f"{name.partition('/')[0]}/"
    exact = [metric for metric in rows if name in metric.names]
    kind = [
        metric for metric in rows if "/" in name and any(known.startswith(family) for known in metric.names)
    ]
    return next(iter(exact + kind), None)


def fill_page(page: str) -> str:
    """The page with the table of each section made anew."""
    return _TABLE.sub(
        lambda match: match["before"] + _HEAD + "".join(map(_row, metric_table()[match["section"]])), page
    )


def _row(metric: Metric) -> str:
    names = ", ".join(f"`{name}`" for name in metric.names)
    cells = [f" {cell} " if cell else " " for cell in (names, metric.unit, metric.how, metric.bad)]
    return f"|{'|'.join(cells)}|\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill_page(path.read_text(encoding="utf-8")), encoding="utf-8")
