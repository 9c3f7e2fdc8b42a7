"""``agentenv timeline RUN``: idle shares of runs from their traces, as a table, as JSON and as a picture.

Invariants:

* What is missing or wrong is found before anything is written.
* Text from a trace is shown with nothing hidden in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.output_files import check_can_plot, check_writable, save_plot
from agentenv.report.text_files import write_json
from agentenv.report.transcripts import revealed
from agentenv.timeline.reading import RecordedTrace, find_trace, read_trace
from agentenv.timeline.shares import STATES, Shares, shares, window_of

__all__ = ["add_parser", "run"]

_TITLES = {"trainer": "trainer", "environments": "environment slots", "engines": "engines"}


def add_parser(subparsers: Any) -> None:
    """Add `timeline`.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "timeline",
        description="Shares of time that the trainer, the environments and the engines of a run worked, waited or were "
        "idle, from the trace that a recipe writes with --trace true: docs/timeline.md.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run's directory, or a trace; several are compared",
    )
    parser.add_argument(
        "--steps", metavar="A:B", help="only these training steps, the first being 1; A: and :B are open"
    )
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="draw it (.svg and .pdf work, too)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the shares as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the timelines of ``args.runs``; returns the exit code.

    Raises:
        UsageError: a run has no trace, or not these steps; a file can't be written.
        MissingExtraError: a picture is asked for and matplotlib is missing.
    """
    steps = _steps(args.steps)
    check_writable("--json", args.json)
    check_can_plot("--png", args.png)
    traces = [read_trace(find_trace(path)) for path in args.runs]
    found = [shares(trace, window_of(trace, steps)) for trace in traces]
    names = [path.name or str(path) for path in args.runs]
    if args.json is not None:
        write_json(
            args.json,
            {
                "definitions": STATES,
                "runs": [
                    {"trace": str(trace.path), "is_whole": trace.is_whole, **share.as_dict()}
                    for trace, share in zip(traces, found, strict=True)
                ],
            },
        )
    if args.png is not None:
        from agentenv.timeline.drawing import draw

        save_plot(draw(names, traces, found), args.png)
    sys.stdout.write("\n\n".join(map(_table, names, traces, found)) + "\n")
    return 0


def _steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        one = int(first) if first else None
        return one, (int(last) if last else None) if colon else one
    except ValueError:
        raise UsageError(f"--steps is {text!r}, must be like 3:8, 3: or 3") from None


def _table(name: str, trace: RecordedTrace, found: Shares) -> str:
    window = found.window
    steps = f"training steps {window.steps[0]} to {window.steps[1]}" if window.steps else "no training steps"
    lines = [f"{name}: {steps}, {window.seconds:.1f} s, {found.weight_syncs} weight syncs"]
    if not trace.is_whole:
        lines.append(
            "the trace has no end: the run goes on, was killed, or wrote more than a trace holds; what had not ended "
            "is missing"
        )
    for kind, states in found.states.items():
        number = found.tracks[kind]
        total = window.seconds * number
        lines += ["", f"{_TITLES[kind]}{f' ({number})' if number > 1 else '':<30}  share   seconds"]
        # What a kind of track never did is left out, but for what is asked for.
        shown = [state for state, share in states.items() if share >= 0.0005 or state in ("waiting", "idle")]
        for state in shown:
            meaning = STATES[kind].get(state, "unknown")
            lines.append(f"  {state:<14} {states[state]:6.1%} {states[state] * total:9.1f}   {meaning}")
    if found.discarded:
        lines += ["", "episodes that came to nothing"]
        lines += [f"  {number:6}  {revealed(what)}" for what, number in found.discarded.items()]
    return "\n".join(lines)
