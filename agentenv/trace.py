"""What happened when: spans, instants and counters of a run, written as a Chrome trace that Perfetto opens.

Whatever plays, samples, trains or grades tells a :class:`Trace`; the default, :data:`NO_TRACE`, forgets at once. A
trace travels with the :class:`~agentenv.inference.proxy.LLMProxy`, which everything that plays episodes has.

The file is in the JSON Array Format of Google's "Trace Event Format": one event a line. A track is a thread of it and
its group a process; times are whole microseconds since the trace was opened.

Invariants:

* All times are of one clock, by default ``time.monotonic``, which is that of asyncio's loops; a simulation gives its
  own. Wall time stands once, in the first line.
* Spans of one track do not overlap unless one lies within the other.
* The file can be read at any moment: it holds whole lines, and its end bracket may be missing. What a killed run leaves
  out is at most the last second, and nothing that came before the trainer's last span.
* It never grows beyond ``max_bytes``; when it is full it says so, and no more is recorded.
* A trace that can't be written costs the run nothing but the trace.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, get_args

__all__ = [
    "DISCARDED",
    "FORMAT",
    "NO_TRACE",
    "TRAINER",
    "WEIGHTS",
    "ChromeTrace",
    "NoTrace",
    "Trace",
    "Track",
    "engine_track",
    "slot_track",
    "timed",
]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the names and arguments of events, in the first line."""
END, FULL = "end of the trace", "the trace is full"
"""Names of the last event."""
MAX_BYTES = 256 * 2**20
"""Of a trace: about two million events."""
_json = json.JSONEncoder(separators=(",", ":")).encode
_FLUSH_S = 0.5
_BUFFER_CHARS = 1 << 16
_ROOM_FOR_THE_END = 256
"""Bytes that are kept for the line that says that the trace is full, and the bracket."""


Group = Literal["trainer", "engines", "environments", "rewards", "episodes", "evaluation"]
_GROUPS: tuple[Group, ...] = get_args(Group)
"""From top to bottom."""


class Track(NamedTuple):
    """A row of the picture."""

    group: Group
    name: str


TRAINER = Track("trainer", "trainer")
WEIGHTS = Track("trainer", "weight syncs")
DISCARDED = Track("episodes", "discarded")


def slot_track(slot: str) -> Track:
    """The track of a slot by its name; those of evaluations stand apart from those that play for training."""
    return Track("evaluation" if slot.startswith("eval") else "environments", slot)


def engine_track(index: int) -> Track:
    """The track of an engine."""
    return Track("engines", f"engine {index}")


Argument = str | int | float


class Trace(Protocol):
    """Takes events, from any thread."""

    def now(self) -> float:
        """Seconds by the trace's clock."""
        ...

    def span(self, track: Track, name: str, start: float, end: float, **arguments: Argument) -> None:
        """Something lasted.

        Args:
            track: where it happened.
            name: of what it was; the same for all of its kind.
            start: in seconds, as the next by the trace's clock.
            end: not before ``start``.
            arguments: details.
        """
        ...

    def instant(self, track: Track, name: str, **arguments: Argument) -> None:
        """Something happened just now; arguments as those of :meth:`span`."""
        ...

    def counter(self, name: str, **values: float) -> None:
        """From now on these are the values."""
        ...


class NoTrace:
    """Forgets everything."""

    def open(self, path: Path) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def now(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()

    def span(self, track: Track, name: str, start: float, end: float, **arguments: Argument) -> None:
        """Nothing."""

    def instant(self, track: Track, name: str, **arguments: Argument) -> None:
        """Nothing."""

    def counter(self, name: str, **values: float) -> None:
        """Nothing."""


NO_TRACE: Trace = NoTrace()


@contextmanager
def timed(trace: Trace, track: Track, name: str, **arguments: Argument) -> Iterator[None]:
    """A span for what is done within, however it ends. For what is rare: it costs more than two readings of a clock."""
    began = trace.now()
    try:
        yield
    finally:
        trace.span(track, name, began, trace.now(), **arguments)


class ChromeTrace:
    """Writes events to a file as they come. Before :meth:`open` and after :meth:`close` they are forgotten.

    Args:
        clock: in seconds.
        max_bytes: of the file.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._zero = 0.0
        self._places: dict[Track, str] = {}
        """The text of process and thread of each track that has been met."""
        self._processes: dict[Group, int] = {}
        # No thread has the number of a process: that would make it the process's main thread.
        self._threads = itertools.count(101)
        self._ended = threading.Event()

    def open(self, path: Path) -> None:
        """Begin the file, over any that is there; to be called once.

        Raises:
            OSError: it can't be written.
        """
        with self._lock:
            self._file = path.open("w", encoding="utf-8", buffering=1 << 20)
            self._zero = self._clock()
            self._lines = ["[\n"]
            self._chars = self._written = 2
            wall = datetime.now().astimezone().isoformat(timespec="milliseconds")
            about = {"labels": f"opened {wall}", "agentenv_trace": FORMAT, "wall_time": wall}
            self._add(f'{{"ph":"M","pid":1,"name":"process_labels","args":{_json(about)}}}')
            self._flush()
        threading.Thread(target=self._flush_again_and_again, name="agentenv-trace", daemon=True).start()

    def close(self) -> None:
        """Write the end bracket; may be called again."""
        with self._lock:
            if self._file is None:
                return
            self._end(END)

    def now(self) -> float:
        """Seconds by the clock."""
        return self._clock()

    def span(self, track: Track, name: str, start: float, end: float, **arguments: Argument) -> None:
        """See :class:`Trace`."""
        with self._lock:
            if self._file is None:
                return
            # Whole microseconds: rounding keeps the order, so that what lay within something still does.
            begun = self._us(start)
            self._add(
                f'{{"ph":"X",{self._place(track)},"ts":{begun},"dur":{max(self._us(end) - begun, 0)},"name":"{name}"'
                + (f',"args":{_json(arguments)}}}' if arguments else "}")
            )
            if track.group == "trainer":
                self._flush()

    def instant(self, track: Track, name: str, **arguments: Argument) -> None:
        """See :class:`Trace`."""
        with self._lock:
            if self._file is None:
                return
            now = self._clock()
            self._add(
                f'{{"ph":"i","s":"t",{self._place(track)},"ts":{self._us(now)},"name":"{name}",'
                f'"args":{_json(arguments)}}}'
            )

    def counter(self, name: str, **values: float) -> None:
        """See :class:`Trace`."""
        with self._lock:
            if self._file is None:
                return
            now = self._clock()
            process = self._process("episodes")
            self._add(
                f'{{"ph":"C","pid":{process},"ts":{self._us(now)},"name":"{name}","args":{_json(values)}}}'
            )

    def _us(self, seconds: float) -> int:
        return max(int((seconds - self._zero) * 1e6), 0)

    def _place(self, track: Track) -> str:
        place = self._places.get(track)
        if place is None:
            process, thread = self._process(track.group), next(self._threads)
            place = self._places[track] = f'"pid":{process},"tid":{thread}'
            number = re.search(r"\d+$", track.name)
            self._name_thread(place, "thread_name", {"name": track.name})
            self._name_thread(place, "thread_sort_index", {"sort_index": int(number[0]) if number else 0})
        return place

    def _name_thread(self, place: str, what: str, arguments: dict[str, Any]) -> None:
        self._add(f'{{"ph":"M",{place},"name":"{what}","args":{_json(arguments)}}}')

    def _process(self, group: Group) -> int:
        number = self._processes.get(group)
        if number is None:
            number = self._processes[group] = _GROUPS.index(group) + 1
            for what, value in (
                ("process_name", {"name": group}),
                ("process_sort_index", {"sort_index": number}),
            ):
                self._add(f'{{"ph":"M","pid":{number},"name":"{what}","args":{_json(value)}}}')
        return number

    def _add(self, event: str) -> None:
        if self._file is None:
            return
        size = len(event) + 2
        if self._written + size + _ROOM_FOR_THE_END > self._max_bytes:
            self._end(FULL)
            logger.warning("the trace is full at %d bytes: nothing more is recorded", self._max_bytes)
            return
        self._lines.append(event + ",\n")
        self._chars += size
        self._written += size
        if self._chars > _BUFFER_CHARS:
            self._flush()

    def _flush_again_and_again(self) -> None:
        while not self._ended.wait(_FLUSH_S):
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines, self._chars = self._lines, [], 0
        if self._file is None:
            return
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            logger.warning(
                "the trace can't be written (%s): nothing more is recorded", error.strerror or error
            )
            self._let_go()

    def _end(self, why: str) -> None:
        """The last event, which has no comma behind it, and the bracket."""
        now = self._us(self._clock())
        self._lines.append(f'{{"ph":"i","s":"g","pid":1,"tid":100,"ts":{now},"name":"{why}"}}\n]\n')
        self._flush()
        self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, None
        self._ended.set()
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.debug("closing the trace failed: %s", error)
