"""How a program ends: every exit code of `agentenv` and of the recipes, and what is said with it.

Invariants:
- What raises on purpose (`agentenv.errors`) ends in one line on stderr; what nobody foresaw keeps its traceback.
- docs/console.md has the same table (tested).
"""

import os
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

from agentenv.console.output import complain
from agentenv.errors import AgentEnvError, UsageError

__all__ = ["ExitCode", "run_program"]


class ExitCode(IntEnum):
    """Of a process."""

    DONE = 0
    """Done; also where the reader of a pipe (`| head`) has gone."""
    FAILED = 1
    """It failed, or a bar of `--check` was missed."""
    USAGE = 2
    """Bad input: the message says what, where and what is allowed."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM."""


def run_program(call: Callable[[], int], *, name: str = "") -> int:
    """Run a program and turn what it raises into one line on stderr and an exit code.

    Args:
        call: the program, which returns its exit code.
        name: that its messages begin with; empty: none.
    """
    try:
        return call()
    except UsageError as error:
        complain(str(error), name)
        return ExitCode.USAGE
    except AgentEnvError as error:
        complain(str(error), name)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        complain("interrupted", name, kind="")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; without this the interpreter complains while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception as error:
        if not complain(f"{type(error).__name__}: {error}", name, trace=traceback.format_exc()):
            raise
        return ExitCode.FAILED
