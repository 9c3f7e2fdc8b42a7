"""The command `agentenv swe synth`.

Invariants:
- stdout holds one line, the result; progress goes to stderr.
- Exit code 0: the file holds as many rows as were asked for; 1: fewer were found; 2: bad input.
- Interrupted, it leaves whole rows and no sandbox; the same command then goes on.
- Code of the package runs without isolation only where two options say so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv_envs.swe.command_options import add_sandbox_options, check_sandbox_options, terminable

__all__ = ["add_synth"]


def add_synth(commands: Any) -> None:
    """Add `synth`.

    Args:
        commands: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "synth",
        help="make tasks from a tested Python package",
        description="Bring bugs into a package one edit at a time, keep those that some of its own tests find and "
        "others don't, and write each as a row in the SWE-bench schema. The same command goes on where it was "
        "interrupted. The package must be pure Python and hold its tests.",
    )
    parser.add_argument(
        "target", metavar="PACKAGE==VERSION|DIR", help="a release with its tests, or a folder"
    )
    parser.add_argument(
        "--output",
        metavar="F",
        type=Path,
        required=True,
        help="rows are appended to F (.jsonl); F.seen notes what was judged; a folder's archive lies beside F",
    )
    parser.add_argument(
        "--number",
        type=int,
        default=50,
        metavar="N",
        help="rows of it that F shall hold (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="order of the edits (default: 0)")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, min(8, os.cpu_count() or 1)),
        metavar="W",
        help="sandboxes that work at the same time (default: one per processor, at most 8: %(default)s)",
    )
    parser.add_argument(
        "--install",
        action="append",
        default=[],
        metavar="REQ",
        help="a requirement of the tests besides pytest; may be given several times",
    )
    parser.add_argument(
        "--source-root", metavar="P", help="folder in the package that modules lie in (default: found out)"
    )
    add_sandbox_options(parser, "package")
    parser.set_defaults(run=_synth)


def _synth(args: argparse.Namespace) -> int:
    from agentenv_envs.swe.repository import open_workspace
    from agentenv_envs.swe.sandbox import open_backend

    from .release import find_release
    from .rows import RowFile
    from .search import search

    check_sandbox_options(args, "package")
    for name in ("number", "workers"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: at least 1 is needed")
    if args.output.suffix != ".jsonl":
        raise UsageError(f"--output {args.output}: must end in .jsonl")
    for requirement in args.install:
        if not requirement.strip() or requirement.startswith("-"):
            raise UsageError(f"--install {requirement!r}: must be a requirement such as 'pytest<8'")
    backend = open_backend(args.sandbox)
    try:
        with terminable(), RowFile(args.output) as output:
            say = _speaker()
            say(f"{args.target}: fetching and building the source distribution")
            release = find_release(args.target, args.install, args.source_root, args.output.absolute().parent)
            task = release.task()
            found = search(
                release,
                lambda: open_workspace(task, backend, progress=say),
                output,
                number=args.number,
                seed=args.seed,
                workers=args.workers,
                say=say,
            )
    finally:
        backend.close()
    sys.stdout.write(
        f"{args.output}: {found.kept} rows of {release.package}, {found.added} of them new, "
        f"in {found.duration_s:.0f} s\n"
    )
    sys.stdout.flush()
    if found.kept < args.number:
        sys.stderr.write(
            f"{release.package}: all {found.candidates} edits are judged; another --seed finds no more\n"
        )
    return 0 if found.kept >= args.number else 1


def _speaker() -> Callable[[str], None]:
    """Lines on stderr."""

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    return say
