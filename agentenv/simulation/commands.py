"""``agentenv simulate NAME``: measure a figure, print it beside the paper's where it is one, and judge it by its bars.

Invariants:

* Bad input, a path that can't be written and a missing matplotlib are found before anything is simulated.
* Only the result goes to stdout; progress goes to stderr.
* A file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.bars import print_bars
from agentenv.report.output_files import check_can_plot, check_writable, save_plot
from agentenv.report.progress import Progress
from agentenv.report.run_directory import write_json
from agentenv.simulation import figures
from agentenv.simulation.experiment import simulate
from agentenv.simulation.figure import Figure, Summary
from agentenv.simulation.measuring import measure_all


def add_parser(subparsers: Any) -> None:
    """Add `simulate`.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser("simulate")
    parser.add_argument("name", metavar="NAME", help="fig7, fig8, fig9, fig10, async, theory or scale")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it, with the paper's numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--seeds", type=int, metavar="N", help="repetitions (default: the figure's own)")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes (default: one per CPU; of scale 1: it measures CPU time, which grows where cores are shared)",
    )
    parser.add_argument(
        "--num_envs",
        type=int,
        metavar="N",
        help="environments of the largest run (scale only; default: 100000)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="instead: write traces of runs that show what it is about",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate the figure ``args.name``.

    Returns:
        exit code: 1 where ``args.check`` is set and a bar is missed, else 0.

    Raises:
        UsageError: an unknown name, a number out of range or a path that can't be written.
        MissingExtraError: a plot is asked for and matplotlib is missing.
    """
    figure = figures.load(args.name)
    if args.num_envs is not None:
        if figure.sized is None:
            raise UsageError(f"--num_envs: {figure.name} has sizes of its own; it goes with scale")
        figure = figure.sized(args.num_envs)
    seeds = figure.seeds if args.seeds is None else args.seeds
    most = 1 if figure.measures_cost else os.cpu_count() or 1
    jobs = most if args.jobs is None else args.jobs
    for option, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value < 1:
            raise UsageError(f"{option} is {value}, must be at least 1")
    check_writable("--json", args.json)
    check_can_plot("--plot", args.plot)
    if args.trace is not None:
        if args.json is not None or args.plot is not None or args.check:
            raise UsageError("--trace measures nothing: it goes without --json, --plot and --check")
        return _trace(figure, args.trace)
    with Progress() as progress:
        progress.stage(f"simulating {figure.name}", unit="run", total=seeds * len(figure.cases))
        results = measure_all(figure, seeds=seeds, jobs=jobs, on_done=progress.update)
    summary = figure.summarise(results)
    if args.json is not None:
        write_json(args.json, _as_dict(figure, seeds, summary))
    if args.plot is not None:
        _plot(figure, summary, args.plot)
    _print(figure, seeds, summary)
    held = print_bars(summary.bars)
    return 1 if args.check and not held else 0


def _as_dict(figure: Figure, seeds: int, summary: Summary) -> dict[str, Any]:
    return {
        "name": figure.name,
        "title": figure.title,
        "seeds": seeds,
        "assumed": dict(figure.assumed),
        "rows": summary.table.as_dicts(),
        "notes": list(summary.notes),
        "curves": summary.curves,
        "bars": [bar.as_dict() for bar in summary.bars],
        "all_bars_hold": all(bar.holds for bar in summary.bars),
    }


def _print(figure: Figure, seeds: int, summary: Summary) -> None:
    width = max(map(len, figure.assumed), default=0)
    lines = [
        f"{figure.name}: {figure.title}",
        f"{seeds} seeds; ± is the 95 % interval of a mean over them" if seeds > 1 else "1 seed",
        "",
    ]
    lines += [str(summary.table), ""]
    lines += [*summary.notes, ""] if summary.notes else []
    lines += [
        "Stated or assumed:",
        *(f"  {name:<{width}}  {text}" for name, text in figure.assumed.items()),
        "",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _plot(figure: Figure, summary: Summary, path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(8.0, 4.5), layout="constrained")
    figure.draw(summary, canvas)
    canvas.suptitle(figure.title, fontsize=10)
    save_plot(canvas, path)


def _trace(figure: Figure, folder: Path) -> int:
    """Play the figure's exemplary runs once and write their traces, a folder each."""
    if not figure.runs:
        named = ", ".join(name for name in figures.NAMES if figures.load(name).runs)
        raise UsageError(f"--trace: {figure.name} has no runs to be traced; there are some of {named}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--trace {folder}: exists already; must be a new or empty folder")
    with Progress() as progress:
        progress.stage(f"tracing {figure.name}", unit="run", total=len(figure.runs))
        for number, (name, run) in enumerate(figure.runs.items(), 1):
            place = folder / name
            place.mkdir(parents=True)
            simulate(run, seed=0, trace_path=place / "trace.json")
            progress.update(number)
            sys.stdout.write(f"{place / 'trace.json'}\n")
    return 0
