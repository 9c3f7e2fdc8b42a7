"""`agentenv view RUN`: the episodes of a run as a local web page.

Invariants:
- It listens on this machine alone (127.0.0.1), writes nothing to the run directory, and follows a run that is going on.
- The address, once it answers, goes to stderr; nothing goes to stdout. SIGINT and SIGTERM end it with exit code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, UsageError
from agentenv.listening import listen

__all__ = ["add_parser"]

_FILES = ("run.json", "trajectories.jsonl")


def add_parser(subparsers: Any) -> None:
    """Add `view`; loads nothing heavy.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "view",
        help="look at the episodes of a run in a browser",
        description="A local web page of a run, finished or going on: docs/viewer.md.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN", help="output directory of the run")
    parser.add_argument("--port", type=int, default=0, help="port; 0 is any (default: %(default)s)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        UsageError: there is no run, the port is in use, or the extra is not installed.
    """
    directory: Path = args.directory
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory")
    if not any((directory / name).exists() for name in _FILES):
        raise UsageError(f"{directory}: no run there ({' or '.join(_FILES)} is needed)")
    listener = listen("127.0.0.1", args.port)
    try:
        try:
            from agentenv.serving import AppServer, serve_until_signal
            from agentenv.viewer.app import create_app
        except ImportError as error:
            raise MissingExtraError(str(error.name), "view") from error
        server = AppServer(create_app(directory), listener)
        asyncio.run(serve_until_signal(server, lambda url: _announce(url, browser=not args.no_browser)))
    finally:
        listener.close()
    return 0


def _announce(url: str, *, browser: bool) -> None:
    sys.stderr.write(f"agentenv view: {url} (Ctrl-C ends it)\n")
    sys.stderr.flush()
    # Without a display, the module would start a browser in the terminal.
    if browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"}.intersection(os.environ)):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
