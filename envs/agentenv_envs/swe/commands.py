"""Commands of the console script: `agentenv swe calibrate`.

Invariants:
- stdout holds the result alone; progress goes to stderr.
- Exit code 0: every row calibrates; 1: some don't; 2: bad input.
- Code of rows runs without isolation only where two options say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from agentenv.errors import UsageError

if TYPE_CHECKING:
    from .calibrate import Calibration

__all__ = ["add_commands"]


def add_commands(subparsers: Any) -> None:
    """Add `swe` and its commands.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    swe = subparsers.add_parser("swe", help="software-engineering tasks")
    commands = swe.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = commands.add_parser(
        "calibrate",
        help="check that each row of a file tells its gold fix from no fix",
        description="Grade the gold patch and the empty patch of each row: they must earn 1 and 0, each time.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="rows: a .jsonl, .json or .parquet file, or a hub name owner/name"
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the report to F (default: to stdout)")
    parser.add_argument("--split", help="split of a hub data set, or of rows that have a field 'split'")
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        metavar="N",
        help="how often each patch is graded (default: %(default)s)",
    )
    parser.add_argument(
        "--sandbox",
        choices=("docker", "local-unisolated"),
        default="docker",
        help="where tests run (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-unisolated",
        action="store_true",
        help="with --sandbox local-unisolated: run the rows' code with all the rights of this user",
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from .calibrate import calibrate, write_report
    from .data import load_tasks
    from .sandbox import open_backend

    if args.sandbox == "local-unisolated" and not args.allow_unisolated:
        raise UsageError(
            "--sandbox local-unisolated would run the rows' code with all the rights of this user; "
            "--allow-unisolated does so all the same"
        )
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UsageError(f"--json {args.json}: is a folder, or lies in none that exists")
    tasks = load_tasks(args.file, args.split)
    backend = open_backend(args.sandbox)
    try:
        with _terminable(), _open_progress(len(tasks)) as progress:
            results = calibrate(
                tasks, backend, repeats=args.repeats, on_step=progress.step, on_result=progress.result
            )
    finally:
        backend.close()
    good = sum(result.calibrates for result in results)
    if args.json is None:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    else:
        write_report(args.json, results)
        sys.stdout.write(f"{good} of {len(results)} rows calibrate\n")
    sys.stdout.flush()
    return 0 if good == len(results) else 1


class _Progress(Protocol):
    def step(self, text: str) -> None:
        """Show what is going on now."""

    def result(self, result: Calibration) -> None:
        """Show what came of a row."""


class _Lines:
    """One line per step and result, for files and for CI."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        """Show what is going on now."""
        sys.stderr.write(f"[{self._done}/{self._total}] {text}\n")
        sys.stderr.flush()

    def result(self, result: Calibration) -> None:
        """Show what came of a row."""
        self._done += 1
        self.step(f"{_summary(result)} ({time.monotonic() - self._began:.0f} s)")


class _Bar:
    """A bar of rich's, with a line that stays for each result."""

    def __init__(self, progress: Any, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def step(self, text: str) -> None:
        """Show what is going on now."""
        self._progress.update(self._task, description=_plain(text))

    def result(self, result: Calibration) -> None:
        """Show what came of a row."""
        self._progress.console.print(_summary(result), markup=False, highlight=False, soft_wrap=True)
        self._progress.advance(self._task)


@contextlib.contextmanager
def _open_progress(total: int) -> Iterator[_Progress]:
    """A bar where stderr is a terminal and rich is installed, else lines."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            with Progress(*columns, console=Console(stderr=True)) as progress:
                yield _Bar(progress, total)
            return
    yield _Lines(total)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the command as an exception, so that sandboxes are removed on the way out."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: whoever runs it ends it
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _summary(result: Calibration) -> str:
    text = f"{result.instance_id}: gold {result.gold}, no-op {result.noop}"
    return f"{text}: {result.reason}" if result.reason else text


def _plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")
