"""What the commands `agentenv swe ...` share: where code runs, and how a signal ends them.

Invariant: code of others runs without isolation only where two options say so.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from agentenv.errors import UsageError

__all__ = ["add_sandbox_options", "check_sandbox_options", "terminable"]


def add_sandbox_options(parser: argparse.ArgumentParser, whose: str) -> None:
    """Add `--sandbox` and `--allow-unisolated`.

    Args:
        parser: of the command.
        whose: what brings the code, for the help: "rows" or "package".
    """
    parser.add_argument(
        "--sandbox",
        choices=("docker", "local-unisolated"),
        default="docker",
        help="where tests run (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-unisolated",
        action="store_true",
        help=f"with --sandbox local-unisolated: run the code of the {whose} with all the rights of this user",
    )


def check_sandbox_options(args: argparse.Namespace, whose: str) -> None:
    """Refuse the one option without the other.

    Raises:
        UsageError: nothing isolates, and nobody has allowed that.
    """
    if args.sandbox == "local-unisolated" and not args.allow_unisolated:
        raise UsageError(
            f"--sandbox local-unisolated would run the code of the {whose} with all the rights of this user; "
            "--allow-unisolated does so all the same"
        )


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the command as an exception, so that sandboxes are removed on the way out.

    The first of them counts; those that follow would only disturb the removal.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if ended:
            return
        ended.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    ended: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.getsignal(number)
            if (
                previous != signal.SIG_IGN
            ):  # a shell's background job ignores SIGINT, and is to go on doing so
                signal.signal(number, leave)
                before[number] = previous
    except ValueError:  # not the main thread: whoever runs it ends it
        yield
        return
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
