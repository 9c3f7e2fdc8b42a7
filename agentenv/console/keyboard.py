"""Actions that a person types, or that a pipe brings.

A line is an action. A line that opens a fenced block (three backticks) goes on to the line that closes it, and a line
of three double quotes goes on, with what stands between the two taken as it is, to the next such line.

Invariants:
- `/help`, `/look` and `/quit`, each alone on a line, are for the program; everything else is for the environment.
- The end of the input ends the episode; a block that it cuts short is no action.
"""

import contextlib
import sys
from typing import TextIO

from agentenv.console.screen import Screen

__all__ = ["Keyboard"]

_HELP = """\
Type an action and Enter. Several lines: open a block with ``` (the block is the action) or with \"\"\" alone on a line
(what stands in it is), and close it likewise.
/look shows the last observation again, /quit leaves, /help shows this; so do Ctrl-D and Ctrl-C leave."""
_FENCE, _QUOTES = "```", '"""'


class Keyboard:
    """Reads actions.

    Args:
        screen: for help.
        stream: default standard input.
    """

    def __init__(self, screen: Screen, stream: TextIO | None = None) -> None:
        self._screen = screen
        self._stream = sys.stdin if stream is None else stream
        self.is_terminal = self._stream.isatty()
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives `input` its line editing and history

    def action(self, turn: int, observation: str) -> str | None:
        """The next action; None: the person leaves.

        Args:
            turn: its number, for the prompt.
            observation: the latest, for `/look`.
        """
        while (line := self._line(f"[{turn}] > ")) is not None:
            command = line.strip()
            if command == "/help":
                self._screen.note(_HELP)
            elif command == "/look":
                self._screen.text(observation)
            elif command == "/quit":
                return None
            elif command == _QUOTES:
                return self._block([], _QUOTES)
            elif command.startswith(_FENCE) and _FENCE not in command[len(_FENCE) :]:
                block = self._block([line], _FENCE)
                return None if block is None else f"{block}\n{_FENCE}"
            elif command:
                return line
        return None

    def agrees(self, question: str) -> bool:
        """Whether the answer to a question is yes."""
        return (self._line(f"{question} [y/N] ") or "").strip().lower() in ("y", "yes")

    def _block(self, lines: list[str], end: str) -> str | None:
        while (line := self._line("... ")) is not None:
            if line.strip() == end:
                return "\n".join(lines)
            lines.append(line)
        return None

    def _line(self, prompt: str) -> str | None:
        if self.is_terminal:
            try:
                return input(prompt)
            except EOFError:
                self._screen.note("")  # the cursor still stands behind the prompt
                return None
        line = self._stream.readline()
        return line.rstrip("\r\n") if line else None
