"""Ctrl-C and SIGTERM: the first ends the run cleanly, the second ends it at once.

Invariants:
- While a training step computes, the first signal only sets a flag, so that weights, optimizers and buffer
  are never cut in the middle of an update; where the run merely waits (`Interruption.at_once`), it raises.
- The handlers that were there before are put back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from agentenv.console.output import line_for_signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class Interrupted(KeyboardInterrupt):
    """The run was asked to end; raised where it may end at once."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruption:
    """Whether the user asked the run to end. A context manager, in the main thread.

    Args:
        force: what the second signal does; ends the process by default.
        quiet: say nothing of signals, as another process does.
    """

    def __init__(self, force: Any = os._exit, *, quiet: bool = False) -> None:
        self._force, self._quiet = force, quiet
        self._immediate = False
        self._before: dict[int, Any] = {}
        self.signum: int | None = None
        """The first signal, once it came."""

    @property
    def requested(self) -> bool:
        """Whether the run should end."""
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that ends because of the signal: 130 after Ctrl-C."""
        return 128 + (self.signum or 0)

    def check(self) -> None:
        """End here if the run was asked to.

        Raises:
            Interrupted: it was.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that a signal may leave at any point, because it changes nothing that is kept."""
        self._immediate = True
        try:
            # After the line above: a signal between the two would only set the flag, and the wait begin all the same.
            self.check()
            yield
        finally:
            self._immediate = False

    def __enter__(self) -> Interruption:
        self._before = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            # Plain writes: the progress line's lock may be held by the code that was interrupted.
            self._say("ended by force; the next start removes the sandboxes that are left")
            self._force(128 + signum)
            return
        self.signum = signum
        if self._immediate:
            self._immediate = False
            raise Interrupted(signum)
        self._say("ending after this training step; once more ends at once")

    def _say(self, text: str) -> None:
        if not self._quiet:
            os.write(_STDERR, line_for_signal(text))
