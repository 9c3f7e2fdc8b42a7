"""`agentenv report RUN`: write report.html of a run directory, whether the run is over or going on."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from agentenv.report.page import write_report


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("report")
    parser.add_argument("directory", metavar="RUN", help="output directory of a run")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    sys.stdout.write(f"{write_report(args.directory)}\n")
    return 0
