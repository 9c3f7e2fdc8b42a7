"""One line that tells a person where a run is.

On a terminal the line is redrawn in place; elsewhere (a file, CI) whole lines are printed, at most one per
interval, so that a log stays readable. `--quiet` leaves the line out, `--log-format json` makes it an object.

    training  step 12/70  reward 0.41  success 0.38  staleness 0.8  7.9 episodes/s  3m20s left

Invariants:
- Only this class writes progress; library code logs.
- The text of an update holds no markup: what a model wrote can't colour or break the line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from agentenv.console.output import is_quiet, report_progress


class Progress:
    """The progress line of a run; use as a context manager or call :meth:`close`.

    Args:
        stream: where to write; default standard error.
        interval_s: least seconds between two lines where the stream is no terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: IO[str] | None = None,
        *,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._live = _open_live(self._stream)
        self._name, self._unit = "", ""
        self._total: int | None = None
        self._began = clock()
        self._first_done = 0
        self._printed_at: float | None = None

    def stage(self, name: str, *, unit: str, total: int | None = None, done: int = 0) -> None:
        """Begin a stage.

        Args:
            name: what is going on, such as "training".
            unit: what is counted ("step", "episode").
            total: how many there will be, where known.
            done: how many are done already (a resumed run); the time left counts from here.
        """
        self._name, self._unit, self._total = name, unit, total
        self._first_done = done
        self._began = self._clock()
        self._printed_at = None

    def update(self, done: int, values: Mapping[str, str] | None = None) -> None:
        """Show that ``done`` units of the stage are done, with named values already formatted."""
        if is_quiet():
            return
        line = self._line(done, values or {})
        if self._live is not None:
            self._live.update(line)
            return
        now = self._clock()
        last = self._total is not None and done >= self._total
        if self._printed_at is None or last or now - self._printed_at >= self._interval_s:
            self._printed_at = now
            fields = {"stage": self._name, "unit": self._unit, "done": done, "total": self._total}
            if not report_progress(line, {**fields, "values": dict(values or {})}):
                self._print(line)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not report_progress(text, {"stage": self._name}):
            self._print(text)

    def close(self) -> None:
        """Give the terminal back; may be called again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, done: int, values: Mapping[str, str]) -> str:
        count = f"{done}/{self._total}" if self._total is not None else f"{done}"
        parts = [f"{self._name}  {self._unit} {count}"]
        parts += [f"{name} {value}" for name, value in values.items()]
        if self._total is not None and self._first_done < done < self._total:
            per_unit = (self._clock() - self._began) / (done - self._first_done)
            parts.append(f"{format_seconds(per_unit * (self._total - done))} left")
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def format_seconds(seconds: float) -> str:
    """A duration as a person says it: 8s, 3m20s, 1h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class _Live:
    """The redrawn line, drawn by rich."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text: Callable[[str], Any] = lambda line: Text(line, no_wrap=True, overflow="ellipsis")
        self.console = Console(file=stream)
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def update(self, line: str) -> None:
        self._live.update(self._text(line))

    def stop(self) -> None:
        self._live.stop()


def _open_live(stream: IO[str]) -> _Live | None:
    """The redrawn line where the stream is a terminal and rich is installed, else None."""
    if is_quiet() or not stream.isatty():
        return None
    try:
        return _Live(stream)
    except ImportError:
        return None
