"""The command `agentenv swe calibrate`.

Invariants:
- stdout holds the result alone; progress and the table of reasons go to stderr.
- A row that can't be a task is reported with its reason, as one that does not calibrate.
- Exit code 0: every row calibrates; 1: some don't; 2: bad input; 130 and 143: ended by SIGINT and SIGTERM.
- A signal ends the command once: sandboxes are removed, the state is kept, and no further signal disturbs that.
- Code of rows runs without isolation only where two options say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentenv.console.output import is_quiet
from agentenv.errors import UsageError

from .command_options import add_sandbox_options, check_sandbox_options, terminable

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .calibration_state import CalibrationState
    from .data import SWETask

__all__ = ["add_calibrate"]

STATE_SUFFIX = ".state.jsonl"


def add_calibrate(commands: Any) -> None:
    """Add `calibrate`.

    Args:
        commands: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "calibrate",
        help="check that each row of a file tells its gold fix from no fix",
        description="Grade the gold patch and the empty patch of each row: they must earn 1 and 0, each time. "
        "A calibration that was interrupted goes on where the same command is given again.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="rows: a .jsonl, .json or .parquet file, or a hub name owner/name"
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the report to F (default: to stdout)")
    parser.add_argument(
        "--keep", metavar="F", type=Path, help="write the ids of the rows that calibrate to F, one a line"
    )
    parser.add_argument(
        "--state",
        metavar="F",
        type=Path,
        help="keep the results of finished rows in F, and go on from there "
        f"(default: beside the report, F{STATE_SUFFIX}; none without --json)",
    )
    parser.add_argument("--split", help="split of a hub data set, or of rows that have a field 'split'")
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        metavar="N",
        help="how often each patch is graded (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="rows that are worked on at a time (default: one per processor)",
    )
    add_sandbox_options(parser, "rows")
    parser.add_argument(
        "--sandbox-url",
        metavar="URL",
        help="take the sandboxes from a service, or from several with commas between their URLs",
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from .calibrate import Calibration, default_workers
    from .calibration_report import reason_table, write_keep_list, write_report
    from .calibration_state import CalibrationState
    from .data import RefusedRow, load_tasks

    check_sandbox_options(args, "rows")
    workers = default_workers() if args.workers is None else args.workers
    for name, value in (("--repeats", args.repeats), ("--workers", workers)):
        if value < 1:
            raise UsageError(f"{name} {value}: at least 1 is needed")
    state_path = args.state
    if state_path is None and args.json is not None:
        state_path = Path(f"{args.json}{STATE_SUFFIX}")
    _check_outputs({"--json": args.json, "--keep": args.keep, "--state": state_path, "FILE": Path(args.file)})
    refused: list[RefusedRow] = []
    tasks = load_tasks(args.file, args.split, refused=refused)
    no_tasks = [
        Calibration(row.instance_id, None, None, f"the row is refused: {row.reason}") for row in refused
    ]
    for result in no_tasks:
        sys.stderr.write(f"{result.instance_id}: {result.reason}\n")
    with contextlib.ExitStack() as stack:
        state = None
        if state_path is not None:
            state = stack.enter_context(
                CalibrationState(state_path, tasks, repeats=args.repeats, sandbox=args.sandbox)
            )
        results = _run(tasks, args, workers, state, state_path) + no_tasks
    if args.keep is not None:
        write_keep_list(args.keep, results)
    sys.stderr.write(reason_table(results))
    good = sum(result.calibrates for result in results)
    if args.json is None:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    else:
        write_report(args.json, results)
        sys.stdout.write(f"{good} of {len(results)} rows calibrate\n")
    sys.stdout.flush()
    return 0 if good == len(results) else 1


def _run(
    tasks: Sequence[SWETask],
    args: argparse.Namespace,
    workers: int,
    state: CalibrationState | None,
    state_path: Path | None,
) -> list[Calibration]:
    """Results of all rows, those that an earlier start found included."""
    from .calibrate import calibrate
    from .sandbox import open_backend

    found = {task.instance_id: known for task in tasks if state is not None and (known := state.get(task))}
    missing = [task for task in tasks if task.instance_id not in found]
    if found:
        sys.stderr.write(f"{len(found)} of {len(tasks)} rows are in {state_path} already\n")
    if not missing:
        return [found[task.instance_id] for task in tasks]

    def keep(result: Calibration) -> None:
        found[result.instance_id] = result
        if state is not None:
            state.add(result)
        progress.result(result)

    try:
        with terminable(), contextlib.ExitStack() as stack:
            backend = open_backend(args.sandbox, url=args.sandbox_url)
            stack.callback(backend.close)
            progress = stack.enter_context(_open_progress(len(tasks), len(found)))
            calibrate(
                missing,
                backend,
                repeats=args.repeats,
                workers=workers,
                on_step=progress.step,
                on_result=keep,
            )
    except (KeyboardInterrupt, SystemExit):
        how = f"; the same command goes on from {state_path}" if state is not None else ""
        done = sum(result.judged for result in found.values())
        sys.stderr.write(f"interrupted: {done} of {len(tasks)} rows are done{how}\n")
        raise
    return [found[task.instance_id] for task in tasks]


def _check_outputs(paths: dict[str, Path | None]) -> None:
    """Refuse what can't be written, and the same file twice, before any work is done."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if option != "FILE" and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"{option} {path}: is a folder, or lies in none that exists")
        before = seen.setdefault(os.path.realpath(path), option)
        if before != option:
            raise UsageError(f"{option} {path}: is the file of {before}, too")


class _Progress(Protocol):
    def step(self, text: str) -> None:
        """Show what is going on now."""

    def result(self, result: Calibration) -> None:
        """Show what came of a row."""


class _Lines:
    """One line per step and result, for files and for CI."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        """Show what is going on now."""
        if is_quiet():
            return
        sys.stderr.write(f"[{self._done}/{self._total}] {text}\n")
        sys.stderr.flush()

    def result(self, result: Calibration) -> None:
        """Show what came of a row."""
        self._done += 1
        self.step(f"{_summary(result)} ({time.monotonic() - self._began:.0f} s)")


class _Bar:
    """A bar of rich's, with a line that stays for each result."""

    def __init__(self, progress: Any, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=done)

    def step(self, text: str) -> None:
        """Show what is going on now."""
        self._progress.update(self._task, description=_plain(text))

    def result(self, result: Calibration) -> None:
        """Show what came of a row."""
        self._progress.console.print(_summary(result), markup=False, highlight=False, soft_wrap=True)
        self._progress.advance(self._task)


@contextlib.contextmanager
def _open_progress(total: int, done: int) -> Iterator[_Progress]:
    """A bar where stderr is a terminal and rich is installed, else lines."""
    if sys.stderr.isatty() and not is_quiet():
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
                yield _Bar(progress, total, done)
            return
    yield _Lines(total, done)


def _summary(result: Calibration) -> str:
    text = f"{result.instance_id}: gold {result.gold}, no-op {result.noop}"
    return f"{text}: {result.reason}" if result.reason else text


def _plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")
