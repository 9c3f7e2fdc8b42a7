"""A file of lines that grows, is replaced, or is cut while it is read.

Invariants:
- Each whole line is handed on once, in order; the last one, while it is being written, comes with its line end.
- A file that was replaced, cut or overwritten is read from its start, after the reader has been told.
- No more than one line and one part of the file is in memory; nothing blocks, whatever stands at the path.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentenv.report.text_files import open_regular

__all__ = ["MAX_LINE_BYTES", "FollowedFile"]

MAX_LINE_BYTES: Final = 64 << 20
"""A longer line is handed on as an empty one."""
_PART_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 256


class FollowedFile:
    """Follows one file; not for several threads at once.

    Args:
        path: of the file; it may be missing.
        add: gets the offset of a line in bytes, and the line without its end.
        restart: called before the file is read from its start again, or when it has gone.
    """

    def __init__(self, path: Path, add: Callable[[int, bytes], None], restart: Callable[[], None]) -> None:
        self.path = path
        self._add, self._restart = add, restart
        self.identity: tuple[int, int] | None = None
        """Device and inode; None: there is no file."""
        self.size = self.read_bytes = 0
        self.complete = True
        """Whether :meth:`poll` last came to the file's end."""
        self._in_long_line = False
        self._last: tuple[int, bytes] = (0, b"")
        """Offset and start of the last line, by which a file that was overwritten in place is told."""

    def poll(self, *, budget_s: float = math.inf) -> None:
        """Read what is new.

        Args:
            budget_s: ends after about so many seconds, with :attr:`complete` False; the next call goes on.
        """
        try:
            with open_regular(self.path) as descriptor:
                found = os.fstat(descriptor)
                if self.identity is not None and self._replaced(descriptor, found):
                    self._forget()
                self.identity, self.size = (found.st_dev, found.st_ino), found.st_size
                self._read(descriptor, time.monotonic() + budget_s)
        except FileNotFoundError:
            if self.identity is not None:
                self._forget()

    def _replaced(self, descriptor: int, found: os.stat_result) -> bool:
        if self.identity != (found.st_dev, found.st_ino) or found.st_size < self.read_bytes:
            return True
        offset, head = self._last
        return os.pread(descriptor, len(head), offset) != head

    def _forget(self) -> None:
        self.identity, self.size, self.read_bytes, self.complete = None, 0, 0, True
        self._in_long_line, self._last = False, (0, b"")
        self._restart()

    def _read(self, descriptor: int, deadline: float) -> None:
        place, rest = self.read_bytes, b""  # `rest`: a line's start that lies before `place`
        while part := os.pread(descriptor, _PART_BYTES, place):
            place += len(part)
            begin = 0
            while (end := part.find(b"\n", begin)) >= 0:
                if self._in_long_line:
                    self._in_long_line, self.read_bytes = False, place - len(part) + end + 1
                else:
                    self._hand_on(rest + part[begin:end])
                begin, rest = end + 1, b""
            rest += part[begin:]
            if self._in_long_line:
                self.read_bytes, rest = place, b""
            elif len(rest) > MAX_LINE_BYTES:
                self._add(self.read_bytes, b"")
                self._in_long_line, self.read_bytes, rest = True, place, b""
            if time.monotonic() > deadline:
                break
        self.complete = place >= self.size

    def _hand_on(self, line: bytes) -> None:
        offset = self.read_bytes
        self._last = (offset, line[:_HEAD_BYTES])
        self.read_bytes += len(line) + 1
        self._add(offset, line)
