"""Runs a command until it ends, or until whoever asked for it has gone; then nothing of it is left.

    python -I guard.py PARENT_PID FOLDER COMMAND...

FOLDER is removed where the parent has gone; it may be empty.

Run as a program of its own, by any interpreter: standard library alone, and nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

_POLL_S = 0.25
_PATIENCE_S = 10.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The command's exit code."""
    parent, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    # This process has one thread.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_guard)  # noqa: PLW1509
    while child.poll() is None and not asked_to_stop and os.getppid() == parent:
        time.sleep(_POLL_S)
    ends_at = time.monotonic() + _PATIENCE_S
    _signal_group(child.pid, signal.SIGTERM)
    while child.poll() is None and time.monotonic() < ends_at:
        time.sleep(_POLL_S)
    # The command's own processes, too, which may have outlived it.
    _signal_group(child.pid, signal.SIGKILL)
    if folder and os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    return abs(child.wait())


def _die_with_guard() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
