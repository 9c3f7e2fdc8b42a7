"""The console script `agentenv`: the commands of `agentenv.console.table`, and what packages bring along.

A package adds commands by an entry point in the group `agentenv.commands`, name = "module:function", where
`function(subparsers)` adds argparse parsers, each with `set_defaults(run=callable(args) -> exit code)`.

Invariants:
- A `UsageError` is one line on stderr and exit code 2; so is what argparse refuses.
- Of the built-in commands only the one that is run is imported; packages are asked when none of these has the name.
- A package whose commands cannot be loaded costs its own commands and no others.
- Nothing but a command's result goes to stdout.
"""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata

import agentenv
from agentenv.console.table import COMMANDS, command
from agentenv.errors import AgentEnvError, UsageError

__all__ = ["main"]

logger = logging.getLogger(__name__)

_COMMAND_GROUP = "agentenv.commands"
_EXIT_FAILED = 1
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
        args = _parser(arguments).parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except UsageError as error:
        _complain(error)
        return _EXIT_USAGE
    except AgentEnvError as error:
        _complain(error)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("agentenv: interrupted\n")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; without this the interpreter complains while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(error: Exception) -> None:
    from agentenv.report.transcripts import revealed

    # What an environment or a server said may be part of it.
    sys.stderr.write(f"agentenv: error: {revealed(' '.join(str(error).split()))}\n")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """What parses these arguments.

    Raises:
        UsageError: nothing has a command of the name that they give.
    """
    parser = argparse.ArgumentParser(
        prog="agentenv",
        usage="agentenv [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`agentenv COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"agentenv {agentenv.__version__}")
    subparsers = parser.add_subparsers(
        prog="agentenv", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    built_in = None if name is None else command(name)
    if built_in is not None:
        built_in.load()(subparsers)
        for added in subparsers.choices.values():
            added.description = added.description or f"{built_in.summary[0].upper()}{built_in.summary[1:]}."
        return parser
    _add_plugins(subparsers)
    groups = {title: [(found.name, found.summary) for found in group] for title, group in COMMANDS.items()}
    helps = {added.dest: added.help or "" for added in subparsers._choices_actions}
    groups["of installed packages"] = [(added, helps.get(added, "")) for added in subparsers.choices]
    if name is not None and name not in subparsers.choices:
        raise UsageError(_unknown_message(name, [known for group in groups.values() for known, _ in group]))
    parser.description = _overview(groups)
    return parser


def _add_plugins(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for plugin in sorted(metadata.entry_points(group=_COMMAND_GROUP), key=lambda point: point.name):
        if command(plugin.name) is not None:
            continue
        try:
            plugin.load()(subparsers)
        except Exception as error:
            logger.warning("commands of %r (%s) are left out: %s", plugin.name, plugin.value, error)


def _overview(groups: dict[str, list[tuple[str, str]]]) -> str:
    lines = ["Environments and training for LLM agents."]
    for title, commands in groups.items():
        if commands:
            lines += ["", f"{title}:", *(f"  {name:<10} {summary}" for name, summary in commands)]
    return "\n".join(lines)


def _unknown_message(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return f"there is no command {name!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"there is no command {name!r}; `agentenv --help` lists them"


if __name__ == "__main__":
    sys.exit(main())
