"""How a program ends: every exit code of `agentenv` and of the recipes, and what is said with it.

Invariants:
- What raises on purpose (`agentenv.errors`) ends in one line on stderr; what nobody foresaw keeps its traceback.
- SIGTERM unwinds the program as Ctrl-C does, so that what it opened is closed, unless the program handles it itself.
- docs/console.md has the same table (tested).
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
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
        with _ended_by_sigterm():
            return call()
    except UsageError as error:
        complain(str(error), name)
        return ExitCode.USAGE
    except AgentEnvError as error:
        complain(str(error), name)
        return ExitCode.FAILED
    except _Terminated:
        complain("terminated", name, kind="")
        return ExitCode.TERMINATED
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


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    owner = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == owner:
            raise _Terminated
        # A forked child ends at once, as it would have without this handler.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
