"""An episode on a terminal, or in a file that its output was sent to.

Invariants:
- What an environment or a policy wrote can steer no terminal: control and direction-changing characters are shown as
  their code points.
- A reader that goes away (`| head`) ends nothing in the midst of an episode: the rest is written nowhere.
"""

import os
import sys
from typing import TextIO

from agentenv.report.transcripts import cut, revealed

__all__ = ["Screen"]

_MAX_CHARS = 20_000
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class Screen:
    """Where an episode is shown.

    Args:
        stream: default standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.is_terminal = self._stream.isatty()
        self._styled = self.is_terminal and not os.environ.get("NO_COLOR")
        self.is_left = False
        """The reader of a pipe has gone."""

    def title(self, text: str) -> None:
        """Show a line of ours that stands out."""
        self._write(self._style(revealed(text), _BOLD))

    def note(self, text: str) -> None:
        """Show a line of ours."""
        self._write(self._style(revealed(text), _DIM))

    def text(self, text: str) -> None:
        """Show what an environment or a policy wrote; of a very long text head and tail."""
        self._write(revealed(cut(text.replace("\r\n", "\n"), max_chars=_MAX_CHARS)))

    def _style(self, text: str, style: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._styled else text

    def _write(self, text: str) -> None:
        if self.is_left:
            return
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except BrokenPipeError:
            self.is_left = True
