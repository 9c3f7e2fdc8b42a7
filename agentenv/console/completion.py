"""`agentenv completion SHELL`: a script that completes commands, options, environments and files (by shtab).

Invariant: the script goes to stdout and changes nothing; environments are asked for when it completes.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError

__all__ = ["add_parser"]

_SHELLS = ("bash", "zsh")
_ENVIRONMENT = ("env", "id")
"""Names of the arguments that are an environment."""

_PREAMBLE = {
    "bash": """\
_agentenv_environments() {
  compgen -W "$(agentenv list 2>/dev/null | cut -d' ' -f1)" -- "$1"
}
""",
    "zsh": """\
_agentenv_environments() {
  local ids=(${(f)"$(agentenv list 2>/dev/null | cut -d' ' -f1)"})
  compadd -a ids
}
""",
}
_EPILOG = """\
bash:  agentenv completion bash > ~/.local/share/bash-completion/completions/agentenv
zsh:   agentenv completion zsh > ~/.zfunc/_agentenv   (a folder of $fpath)"""


def add_parser(subparsers: Any) -> None:
    """Add `completion`."""
    parser = subparsers.add_parser(
        "completion", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise MissingExtraError("shtab", "console") from None
    from agentenv.cli import whole_parser

    parser = whole_parser()
    _mark(parser, shtab.FILE)
    preamble: Any = _PREAMBLE  # by shell, which its annotation does not tell
    script = shtab.complete(parser, shell=args.shell, root_prefix="agentenv", preamble=preamble)
    sys.stdout.write(f"{script}\n")
    sys.stdout.flush()
    return 0


def _mark(parser: argparse.ArgumentParser, files: Any) -> None:
    """Say of each argument what it can be, as shtab reads it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                _mark(command, files)
        elif not action.option_strings and action.dest in _ENVIRONMENT:
            action.complete = dict.fromkeys(_SHELLS, "_agentenv_environments")  # type: ignore[attr-defined]
        elif action.type is Path or action.dest in ("model", "run", "runs"):
            action.complete = files  # type: ignore[attr-defined]
