"""``python -m agentenv.report RUN``: write report.html of a run directory, finished or still running."""

from __future__ import annotations

import argparse
import sys

from agentenv.errors import UsageError
from agentenv.report.page import write_report


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentenv.report", description=__doc__)
    parser.add_argument("run", help="output directory of a run")
    try:
        sys.stdout.write(f"{write_report(parser.parse_args().run)}\n")
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
