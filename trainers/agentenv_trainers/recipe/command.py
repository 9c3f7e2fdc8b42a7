"""A recipe as a program: what its exit code and its last line say.

0 done    1 the run failed    2 the user's mistake    130 ended by Ctrl-C (143 by SIGTERM)
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence

import transformers

from agentenv.errors import AgentEnvError, UsageError
from agentenv_trainers.processes import disconnect


def run_recipe(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a recipe's main function and turn what it raises into one line on stderr and an exit code.

    Errors that nobody foresaw keep their traceback.

    Args:
        main: takes the arguments, returns the exit code.
        argv: arguments without the program's name; those of the process by default.
    """
    _quiet_libraries()
    try:
        return main(argv)
    except UsageError as error:
        _say(error)
        return 2
    except AgentEnvError as error:
        _say(error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        disconnect()


def _say(error: Exception) -> None:
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"process {rank}: "
    sys.stderr.write(f"{who}error: {' '.join(str(error).split())}\n")


def _quiet_libraries() -> None:
    """Leave the terminal to the progress line: what remains are warnings of this project and errors."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    for module in ("transformers", "trl", "accelerate", "torch"):
        logging.getLogger(module).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
