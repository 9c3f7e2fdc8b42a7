"""A recipe as a program: its exit codes are those of `agentenv.console.exit_codes`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence

import transformers

from agentenv.console.exit_codes import run_program
from agentenv.console.output import stderr_as, stderr_options
from agentenv_trainers.processes import disconnect


def run_recipe(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a recipe's main function and turn what it raises into one line on stderr and an exit code.

    Errors that nobody foresaw keep their traceback.

    Args:
        main: takes the arguments, returns the exit code.
        argv: arguments without the program's name; those of the process by default.
    """
    quiet, log_format = stderr_options(sys.argv[1:] if argv is None else argv)
    rank = os.environ.get("RANK", "0")
    try:
        with stderr_as(quiet=quiet, log_format=log_format):
            _quiet_libraries()
            return run_program(lambda: main(argv), name="" if rank == "0" else f"process {rank}")
    finally:
        disconnect()


def _quiet_libraries() -> None:
    """Leave the terminal to the progress line: what remains are warnings of this project and errors."""
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    for module in ("transformers", "trl", "accelerate", "torch"):
        logging.getLogger(module).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
