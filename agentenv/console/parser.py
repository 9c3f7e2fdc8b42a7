"""The argument parser of `agentenv` and its commands: a mistake is one line with a cause and a next step."""

import argparse
import difflib
from collections.abc import Iterator
from typing import NoReturn

from agentenv.console.exit_codes import ExitCode
from agentenv.console.output import complain

__all__ = ["CommandParser"]

_UNKNOWN = "unrecognized arguments: "


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, without the usage of thirty options above it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end the program."""
        hint = f"{self.prog} --help lists the options"
        if message.startswith(_UNKNOWN):
            wrong = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            close = difflib.get_close_matches(wrong, set(_options(self)), n=1, cutoff=0.7)
            hint = f"did you mean {close[0]}?" if close else hint
        complain(f"{message}; {hint}", self.prog)
        raise SystemExit(int(ExitCode.USAGE))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Its options, and those of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
