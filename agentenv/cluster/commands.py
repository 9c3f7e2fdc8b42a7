"""`agentenv cluster`: servers on the nodes of a Ray cluster, for runs that name them by `ray`.

Invariants:

* A server a line goes to stdout: name, URL, node. Progress goes to stderr.
* Exit code 2: bad input; nothing that was started then is left.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from agentenv.cluster.placement import parse_resources
from agentenv.cluster.services import KINDS, ServiceState, find, serve, stop
from agentenv.errors import UsageError

__all__ = ["add_parser"]

_SERVE = """Start servers on the nodes of a Ray cluster and keep them running. {port} and {host} in the command become a
free port and the address of the node:

    agentenv cluster serve --kind sandbox --number 3 --resources docker=1 -- \\
        agentenv sandbox serve --host {host} --port {port} --token-file /etc/agentenv/tokens
"""


def add_parser(subparsers: Any) -> None:
    """Add `cluster` and its commands.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    cluster = subparsers.add_parser("cluster")
    commands = cluster.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = commands.add_parser(
        "serve",
        help="start servers on nodes and keep them running",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_address(parser)
    parser.add_argument("--kind", choices=KINDS, required=True, help="what runs look for")
    parser.add_argument("--number", type=int, default=1, metavar="N", help="servers (default: %(default)s)")
    parser.add_argument(
        "--resources",
        default="CPU=1",
        metavar="NAME=N,...",
        help="what each takes of its node, which decides where it can go (default: %(default)s)",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        default=900.0,
        metavar="S",
        help="until all listen (default: %(default)g)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="the server's, with {port}"
    )
    parser.set_defaults(run=_serve)
    parser = commands.add_parser("list", help="show the servers")
    _add_address(parser)
    parser.set_defaults(run=_list)
    parser = commands.add_parser("stop", help="end the servers")
    _add_address(parser)
    parser.add_argument("--kind", choices=KINDS, help="of this kind alone")
    parser.set_defaults(run=_stop)


def _add_address(parser: Any) -> None:
    parser.add_argument(
        "--address",
        default="auto",
        metavar="HOST:PORT",
        help="of the cluster's head; auto: the cluster that this machine is a node of (default: %(default)s)",
    )


def _serve(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("agentenv cluster serve: a command is needed, after --")
    serve(
        args.kind,
        command,
        number=args.number,
        resources=parse_resources(args.resources),
        address=args.address,
        start_timeout_s=args.start_timeout_s,
        say=_say,
    )
    return 0


def _list(args: argparse.Namespace) -> int:
    for state in find(address=args.address):
        _say(_line(state))
    return 0


def _stop(args: argparse.Namespace) -> int:
    number = stop(args.kind, address=args.address)
    sys.stderr.write(f"{number} ended\n")
    return 0


def _line(state: ServiceState) -> str:
    if not state.url:
        return f"{state.name}: waits for a node with room, or its node does not answer"
    more = "" if state.listens else f", does not listen{': ' if state.problem else ''}{state.problem}"
    return f"{state.name}: {state.url} on {state.host}, starts {state.starts}{more}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
