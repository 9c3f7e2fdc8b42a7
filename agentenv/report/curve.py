"""The success curve of a run as an SVG file: ``python -m agentenv.report.curve RUN --svg FILE``.

Drawn from metrics.jsonl and run.json by the code that draws the report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import UsageError
from agentenv.report.charts import Series, line_chart, standalone
from agentenv.report.run_directory import read_json, read_lines, write_text


def success_curve(run: str | Path) -> str:
    """A chart of success over the steps, with the evaluations before and after as dashed lines.

    Args:
        run: path of a run directory.

    Raises:
        UsageError: there is no run or it has no training step.
    """
    path = Path(run)
    lines = list(read_lines(path / "metrics.jsonl"))
    if not lines:
        raise UsageError(f"{path / 'metrics.jsonl'}: no training step there")
    summary = read_json(path / "summary.json")
    levels = [
        (summary[phase]["success"], f"evaluated {phase} training: {summary[phase]['success']:.0%}")
        for phase in ("before", "after")
        if summary.get(phase)
    ]
    series = Series("success", [line["step"] for line in lines], [line.get("success") for line in lines])
    title = "Success per training step"
    chart = line_chart(
        [series], x_label="training step", y_range=(0.0, None), percent=True, levels=levels, label=title
    )
    return standalone(chart, title=title)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentenv.report.curve", description=__doc__)
    parser.add_argument("run", type=Path, help="output directory of a run")
    parser.add_argument("--svg", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    try:
        svg = success_curve(args.run)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.svg, svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
