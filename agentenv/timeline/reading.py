"""Reads the traces that :mod:`agentenv.trace` writes.

Invariants:

* A trace that is being written, or whose writer was killed, is read to its last whole event.
* Nothing in a trace is trusted to be of the right kind: what cannot be one of its lines is a UsageError with its place.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agentenv.errors import UsageError
from agentenv.report.run_directory import trace_paths
from agentenv.trace import END, FORMAT, FULL

__all__ = ["Instant", "RecordedTrace", "Span", "find_trace", "read_trace"]

_NOTHING: Mapping[str, Any] = {}


class Span(NamedTuple):
    """Something that lasted."""

    name: str
    start_s: float
    """Since the trace was opened, as the next."""
    end_s: float
    arguments: Mapping[str, Any] = _NOTHING


class Instant(NamedTuple):
    """Something that happened."""

    name: str
    at_s: float
    arguments: Mapping[str, Any]


class CounterValue(NamedTuple):
    """Values from a moment on."""

    name: str
    at_s: float
    values: Mapping[str, float]


@dataclass
class RecordedTrace:
    """The events of a trace."""

    path: Path
    wall_time: str = ""
    """When it was opened."""
    is_whole: bool = False
    """Its writer closed it, and it did not grow full."""
    spans: dict[str, dict[str, list[Span]]] = field(default_factory=dict)
    """By group and track, in the order of their start; what contains another comes before it."""
    instants: list[Instant] = field(default_factory=list)
    counters: list[CounterValue] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """The last moment that it tells of."""
        ends = [spans[-1].end_s for tracks in self.spans.values() for spans in tracks.values()]
        return max(ends, default=0.0)


def find_trace(run: Path) -> Path:
    """The newest trace of a run.

    Args:
        run: its directory, or a trace itself.

    Raises:
        UsageError: there is none.
    """
    if run.is_file():
        return run
    if not run.is_dir():
        raise UsageError(f"{run}: no such run")
    paths = list(itertools.takewhile(Path.is_file, trace_paths(run)))
    if not paths:
        raise UsageError(f"{run}: no trace.json there; a recipe writes it with --trace true")
    return paths[-1]


def read_trace(path: Path) -> RecordedTrace:
    """All events of a trace, as far as they are whole.

    Raises:
        UsageError: it cannot be read, or is no trace of agentenv.
    """
    trace = RecordedTrace(path)
    reader = _Reader(trace)
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            opening, about = next(lines, ""), (_event(next(lines, "")) or {}).get("args")
            if opening != "[\n" or not isinstance(about, dict) or "agentenv_trace" not in about:
                raise UsageError(f"{path}: no trace of agentenv (its second line must name its format)")
            if about["agentenv_trace"] != FORMAT:
                raise UsageError(
                    f"{path}: a trace of format {about['agentenv_trace']!r}, this program reads {FORMAT}"
                )
            trace.wall_time = str(about.get("wall_time", ""))
            for number, line in enumerate(lines, 3):
                if line == "]\n":
                    break
                event = _event(line)
                if event is None and not line.endswith("\n"):
                    break  # cut here
                if event is None or not reader.take(event):
                    raise UsageError(f"{path}: line {number} is no event: {line[:80]!r}")
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror or error}") from None
    reader.finish()
    return trace


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.rstrip().removesuffix(","))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


class _Reader:
    """Puts events where they belong."""

    def __init__(self, trace: RecordedTrace) -> None:
        self._trace = trace
        self._groups: dict[int, str] = {}
        self._tracks: dict[int, tuple[int, str]] = {}
        self._spans: defaultdict[int, list[Span]] = defaultdict(list)

    def take(self, event: Mapping[str, Any]) -> bool:
        """Whether this is an event."""
        try:
            kind, name, arguments = event["ph"], event["name"], event.get("args", _NOTHING)
            if kind == "X":
                start = event["ts"] / 1e6
                self._spans[event["tid"]].append(Span(name, start, start + event["dur"] / 1e6, arguments))
            elif name in (END, FULL):
                self._trace.is_whole = name == END
            elif kind == "i":
                self._trace.instants.append(Instant(name, event["ts"] / 1e6, arguments))
            elif kind == "C":
                self._trace.counters.append(CounterValue(name, event["ts"] / 1e6, arguments))
            elif name == "process_name":
                self._groups[event["pid"]] = arguments["name"]
            elif name == "thread_name":
                self._tracks[event["tid"]] = (event["pid"], arguments["name"])
        except (KeyError, TypeError):
            return False
        return True

    def finish(self) -> None:
        """Sort the spans into their tracks."""
        for thread, spans in self._spans.items():
            process, name = self._tracks.get(thread, (-1, str(thread)))
            spans.sort(key=lambda span: (span.start_s, -span.end_s))
            self._trace.spans.setdefault(self._groups.get(process, "unknown"), {})[name] = spans
