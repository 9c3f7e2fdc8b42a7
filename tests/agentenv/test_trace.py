"""The trace that a run writes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from agentenv.timeline import read_trace
from agentenv.trace import DISCARDED, TRAINER, ChromeTrace, NoTrace, Track, slot_track, timed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _opened(path: Path, clock: Clock, **options: int) -> ChromeTrace:
    trace = ChromeTrace(clock=clock, **options)
    trace.open(path)
    return trace


def test_a_closed_trace_is_json_in_the_array_format_of_the_trace_event_format(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "trace.json"
    trace = _opened(path, clock)
    trace.span(slot_track("slot-7"), "step", 100.5, 102.0, tokens=3)
    clock.now = 103.0
    trace.instant(DISCARDED, "failed", episode='g0-0"\n', reason="step_timeout")
    trace.counter("environments", running=2, buffered=0)
    trace.close()
    trace.close()
    events = json.loads(path.read_text())
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
    span, instant, counter, end = (event for event in events if event["ph"] != "M")
    assert end["name"] == "end of the trace"
    assert (span["ph"], span["ts"], span["dur"], span["args"]) == ("X", 500_000, 1_500_000, {"tokens": 3})
    assert (instant["ph"], instant["s"], instant["ts"]) == ("i", "t", 3_000_000)
    assert instant["args"] == {"episode": 'g0-0"\n', "reason": "step_timeout"}
    assert (counter["ph"], counter["args"]) == ("C", {"running": 2, "buffered": 0})
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert (span["pid"], "environments") in names and (instant["pid"], "episodes") in names
    # A thread with the number of a process would be taken for the process's main thread.
    assert {event["pid"] for event in events}.isdisjoint(event.get("tid") or -1 for event in events)
    assert path.read_text().count("wall_time") == 1


def test_what_came_before_the_trainers_last_span_is_in_the_file_and_soon_the_rest(tmp_path: Path) -> None:
    path, slot = tmp_path / "trace.json", slot_track("slot-0")
    trace = _opened(path, Clock())
    trace.span(slot, "reset", 100.0, 101.0)
    trace.span(TRAINER, "policy update", 100.0, 102.0)
    assert len(read_trace(path).spans["environments"]["slot-0"]) == 1
    trace.span(slot, "generate", 101.0, 103.0)
    # Nothing else happens: it must come by itself.
    deadline = time.monotonic() + 60.0
    while len(read_trace(path).spans["environments"]["slot-0"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(read_trace(path).spans["environments"]["slot-0"]) == 2
    assert not read_trace(path).is_whole
    trace.close()
    assert read_trace(path).is_whole


def test_times_are_rounded_so_that_what_lay_within_something_still_does(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "trace.json"
    trace = _opened(path, clock)
    outer = (100.000_000_4, 100.000_002_6)
    inner = (100.000_000_9, 100.000_002_5)
    trace.span(TRAINER, "outer", *outer)
    trace.span(TRAINER, "inner", *inner)
    trace.close()
    first, second = (e for e in json.loads(path.read_text()) if e["ph"] == "X")
    assert first["ts"] <= second["ts"] and second["ts"] + second["dur"] <= first["ts"] + first["dur"]


def test_a_full_trace_says_so_stays_below_its_limit_and_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "trace.json"
    trace = _opened(path, clock, max_bytes=3000)
    for number in range(100):
        trace.span(Track("environments", f"slot-{number}"), "step", 100.0, 101.0)
    trace.close()
    assert 2000 < path.stat().st_size <= 3000
    assert caplog.text.count("the trace is full at 3000 bytes") == 1
    assert json.loads(path.read_text())[-1]["name"] == "the trace is full"
    assert not read_trace(path).is_whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device on which every write fails")
def test_a_disk_that_is_full_costs_the_run_nothing_but_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    trace = _opened(Path("/dev/full"), Clock())
    trace.span(TRAINER, "policy update", 100.0, 101.0)
    trace.close()
    assert caplog.text.count("the trace can't be written (No space left on device)") == 1


def test_events_before_the_beginning_and_after_the_end_are_forgotten(tmp_path: Path) -> None:
    trace = ChromeTrace(clock=Clock())
    trace.span(TRAINER, "before", 0.0, 1.0)
    trace.open(tmp_path / "trace.json")
    trace.close()
    size = (tmp_path / "trace.json").stat().st_size
    trace.instant(DISCARDED, "failed")
    trace.counter("environments", running=1)
    assert (tmp_path / "trace.json").stat().st_size == size
    assert read_trace(tmp_path / "trace.json").spans == {}


def test_threads_that_write_at_once_tear_no_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = _opened(path, Clock())

    def write(name: str) -> None:
        for number in range(300):
            trace.span(Track("environments", name), "step", 100.0 + number, 100.5 + number)

    threads = [threading.Thread(target=write, args=(f"slot-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert [len(spans) for spans in read_trace(path).spans["environments"].values()] == [300] * 4


def test_a_span_of_what_raises_is_there_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = _opened(path, Clock())
    with pytest.raises(KeyError), timed(trace, TRAINER, "wait for batch", step=1):
        raise KeyError
    trace.close()
    assert [span.name for span in read_trace(path).spans["trainer"]["trainer"]] == ["wait for batch"]


def test_no_trace_is_nothing(tmp_path: Path) -> None:
    trace = NoTrace()
    trace.open(tmp_path / "trace.json")
    with timed(trace, TRAINER, "wait for batch"):
        trace.instant(DISCARDED, "failed", reason="x")
        trace.counter("environments", running=1)
    trace.close()
    assert not list(tmp_path.iterdir())
