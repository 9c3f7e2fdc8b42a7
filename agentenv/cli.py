"""The console script `agentenv`: `list`, `info`, `eval`, `plan`, `proxy`, `simulate`, and what packages bring along.

A package adds commands by an entry point in the group `agentenv.commands`, name = "module:function", where
`function(subparsers)` adds argparse parsers, each with `set_defaults(run=callable(args) -> exit code)`.

Invariants:
- A `UsageError` is one line on stderr and exit code 2; so is what argparse refuses.
- A package whose commands cannot be loaded costs its own commands and no others.
- Nothing but a command's result goes to stdout.
"""

import argparse
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import agentenv
from agentenv import plan_command, proxy_command, registration
from agentenv.errors import UsageError
from agentenv.evaluation import command

__all__ = ["main"]

logger = logging.getLogger(__name__)

_COMMAND_GROUP = "agentenv.commands"
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        exit code
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(
            with_plugins=arguments[:1]
            not in (["list"], ["info"], ["eval"], ["plan"], ["proxy"], ["simulate"])
        )
        args = parser.parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except UsageError as error:
        sys.stderr.write(f"agentenv: error: {' '.join(str(error).split())}\n")
        return _EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("agentenv: interrupted\n")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; without this the interpreter complains while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(*, with_plugins: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentenv", description="Environments and training for LLM agents.")
    parser.add_argument("--version", action="version", version=f"agentenv {agentenv.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    lister = subparsers.add_parser("list", help="list the registered environments")
    lister.add_argument("--json", action="store_true", help="a JSON array of ids")
    lister.set_defaults(run=_list)

    info = subparsers.add_parser("info", help="show one environment")
    info.add_argument("id", help="such as SWE-v0")
    info.add_argument("--json", action="store_true", help="a JSON object")
    info.set_defaults(run=_info)

    simulate = subparsers.add_parser("simulate", help="reproduce a figure of ROLL Flash in virtual time")
    simulate.add_argument("name", metavar="NAME", help="fig7, fig8, fig9, fig10, async or theory")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    simulate.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it, with the paper's numbers")
    simulate.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    simulate.add_argument("--seeds", type=int, metavar="N", help="repetitions (default: the figure's own)")
    simulate.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per CPU)")
    simulate.set_defaults(run=_simulate)

    command.add_parser(subparsers)
    plan_command.add_parser(subparsers)
    proxy_command.add_parser(subparsers)

    if with_plugins:
        for plugin in sorted(metadata.entry_points(group=_COMMAND_GROUP), key=lambda point: point.name):
            try:
                plugin.load()(subparsers)
            except Exception as error:
                logger.warning("commands of %r (%s) are left out: %s", plugin.name, plugin.value, error)
    return parser


def _list(args: argparse.Namespace) -> int:
    ids = registration.registered_ids()
    _write(json.dumps(ids) if args.json else "\n".join(ids))
    return 0


def _info(args: argparse.Namespace) -> int:
    found = registration.spec(args.id)
    creator = registration.load_entry_point(found)
    described: dict[str, Any] = {
        "id": found.id,
        "entry_point": found.entry_point if isinstance(found.entry_point, str) else repr(found.entry_point),
        "arguments": _signature(creator),
        "kwargs": found.kwargs,
        "max_turns": found.max_episode_steps or getattr(creator, "max_turns", None),
        "policies": dict(getattr(creator, "policies", {})),
        "description": inspect.getdoc(creator) or "",
    }
    if args.json:
        _write(json.dumps(described, default=str))
        return 0
    description = described.pop("description")
    width = max(len(name) for name in described)
    lines = [f"{name:<{width}}  {value}" for name, value in described.items()]
    _write("\n".join([*lines, "", description] if description else lines))
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from agentenv.simulation import commands

    return commands.run(args)


def _signature(creator: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(creator))
    except (TypeError, ValueError):
        return "(...)"


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    # Flushed here, so that a reader that has gone is seen inside `main`.
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
