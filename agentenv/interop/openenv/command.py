"""`agentenv openenv serve ID`: an environment of ours for OpenEnv's clients.

Invariants:
- It listens on this machine alone, unless a token file says who else may come.
- The address, once the service listens, goes to stderr; SIGINT and SIGTERM end it with exit code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, UsageError
from agentenv.evaluation.options import add_environment_options, environment_options, whole

__all__ = ["add_parser", "run"]

_OWN_ADDRESSES = ("127.0.0.1", "::1", "localhost")


def add_parser(subparsers: Any) -> None:
    """Add `openenv`.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser("openenv")
    serve = parser.add_subparsers(metavar="ACTION", required=True).add_parser(
        "serve", help="serve an environment to OpenEnv's clients", description="See docs/interop.md."
    )
    add_environment_options(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="port; 0 is any (default: %(default)s)")
    serve.add_argument(
        "--max-sessions",
        type=whole(1),
        default=16,
        metavar="N",
        help="environments at the same time (default: %(default)s)",
    )
    serve.add_argument(
        "--token-file",
        type=Path,
        metavar="F",
        help="one line with the token that clients must send; needed for any --host but this machine's own",
    )
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        UsageError: bad input, or the address is in use.
        MissingExtraError: OpenEnv is not installed.
    """
    from agentenv.environment_source import find_environment
    from agentenv.listening import listen

    if args.token_file is None and args.host not in _OWN_ADDRESSES:
        raise UsageError(
            f"--host {args.host}: whoever reaches it could play, and run commands in, the environment: "
            "name who may with --token-file, or listen on 127.0.0.1"
        )
    token = None
    if args.token_file is not None:
        from agentenv.agents.desk import read_token

        token = read_token(args.token_file)
    try:
        import openenv.core.env_server  # noqa: F401 - what is missing shows before an environment is made
    except ImportError as error:
        raise MissingExtraError(str(error.name or "openenv"), "openenv") from error
    make = find_environment(args.env, environment_options(args), option="environment")
    listener = listen(args.host, args.port)
    try:
        from agentenv.interop.openenv.server import make_app
        from agentenv.serving import AppServer, serve_until_signal

        app = make_app(args.env, make, max_sessions=args.max_sessions, token=token)
        asyncio.run(serve_until_signal(AppServer(app, listener), _started))
    finally:
        listener.close()
    return 0


def _started(url: str) -> None:
    sys.stderr.write(f"agentenv openenv: {url}\n")
    sys.stderr.flush()
