"""Commands of the console script: `agentenv swe ...`."""

from __future__ import annotations

from typing import Any

from .calibrate_command import add_calibrate
from .synth.command import add_synth

__all__ = ["add_commands"]


def add_commands(subparsers: Any) -> None:
    """Add `swe` and its commands.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    swe = subparsers.add_parser("swe")
    commands = swe.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_calibrate(commands)
    add_synth(commands)
