"""The console script `agentenv`: the commands of `agentenv.console.table`, and what packages bring along.

A package adds commands by an entry point in the group `agentenv.commands`, name = "module:function", where
`function(subparsers)` adds argparse parsers, each with `set_defaults(run=callable(args) -> exit code)`.

Invariants:
- How a command ends stands in `agentenv.console.exit_codes`, what it writes to stderr in `agentenv.console.output`.
- Of the built-in commands only the one that is run is imported; packages are asked when none of these has the name.
- A package whose commands cannot be loaded costs its own commands and no others.
- Nothing but a command's result goes to stdout.
"""

import argparse
import difflib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, TypeAlias

import agentenv
from agentenv.console.exit_codes import run_program
from agentenv.console.output import add_options, stderr_as, stderr_options
from agentenv.console.parser import CommandParser
from agentenv.console.table import COMMANDS, Command, command
from agentenv.errors import UsageError

__all__ = ["main", "whole_parser"]

logger = logging.getLogger(__name__)

_COMMAND_GROUP = "agentenv.commands"

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        exit code
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    quiet, log_format = stderr_options(arguments)
    with stderr_as(quiet=quiet, log_format=log_format):
        return run_program(lambda: _run(arguments), name="agentenv")


def _run(arguments: Sequence[str]) -> int:
    args = _parser(arguments).parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """What parses these arguments.

    Raises:
        UsageError: nothing has a command of the name that they give.
    """
    parser, subparsers = _root()
    name = _command_name(arguments)
    built_in = None if name is None else command(name)
    if built_in is not None:
        _add(built_in, subparsers)
        _add_output_options(subparsers)
        return parser
    _add_plugins(subparsers)
    _add_output_options(subparsers)
    groups = {title: [(found.name, found.summary) for found in group] for title, group in COMMANDS.items()}
    helps = {added.dest: added.help or "" for added in subparsers._choices_actions}
    groups["of installed packages"] = [(added, helps.get(added, "")) for added in subparsers.choices]
    if name is not None and name not in subparsers.choices:
        raise UsageError(_unknown_message(name, [known for group in groups.values() for known, _ in group]))
    parser.description = _overview(groups)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """The parser with every command, built in or of a package: for what describes them all."""
    parser, subparsers = _root()
    subparsers.help = None
    for group in COMMANDS.values():
        for built_in in group:
            _add(built_in, subparsers)
            # As `add_parser(name, help=...)` would: the table alone says it.
            named = subparsers._ChoicesPseudoAction(built_in.name, (), built_in.summary)
            subparsers._choices_actions.append(named)
    _add_plugins(subparsers)
    _add_output_options(subparsers)
    return parser


def _root() -> tuple[argparse.ArgumentParser, Commands]:
    parser = CommandParser(
        prog="agentenv",
        usage="agentenv [-h] [--version] [--quiet] [--log-format text|json] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`agentenv COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"agentenv {agentenv.__version__}")
    add_options(parser)
    subparsers = parser.add_subparsers(
        prog="agentenv", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    return parser, subparsers


def _add(built_in: Command, subparsers: Commands) -> None:
    built_in.load()(subparsers)
    parser = subparsers.choices[built_in.name]
    parser.description = parser.description or f"{built_in.summary[0].upper()}{built_in.summary[1:]}."


def _command_name(arguments: Sequence[str]) -> str | None:
    """The first argument that is no option, nor the value of one that stands before the command."""
    before = ""
    for argument in arguments:
        if not argument.startswith("-") and before not in ("--log-format", "--log_format"):
            return argument
        before = argument
    return None


def _add_output_options(subparsers: Any) -> None:
    """Add them to every command, and to the commands of a command."""
    for parser in subparsers.choices.values():
        nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        for action in nested:
            _add_output_options(action)
        if not nested:
            add_options(parser)


def _add_plugins(subparsers: Commands) -> None:
    for plugin in sorted(metadata.entry_points(group=_COMMAND_GROUP), key=lambda point: point.name):
        if command(plugin.name) is not None:
            continue
        try:
            plugin.load()(subparsers)
        except Exception as error:
            logger.warning("commands of %r (%s) are left out: %s", plugin.name, plugin.value, error)


def _overview(groups: dict[str, list[tuple[str, str]]]) -> str:
    lines = ["Environments and training for LLM agents."]
    width = max(len(name) for commands in groups.values() for name, _ in commands)
    for title, commands in groups.items():
        if commands:
            lines += ["", f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in commands)]
    return "\n".join(lines)


def _unknown_message(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return f"there is no command {name!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"there is no command {name!r}; `agentenv --help` lists them"


if __name__ == "__main__":
    sys.exit(main())
