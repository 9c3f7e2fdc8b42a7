"""Reading traces: whole, cut at any place, of something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv.timeline import RecordedTrace, find_trace, read_trace
from agentenv.trace import TRAINER, ChromeTrace


def _number_of_events(trace: RecordedTrace) -> int:
    spans = sum(len(spans) for tracks in trace.spans.values() for spans in tracks.values())
    return spans + len(trace.instants) + len(trace.counters)


def _written(path: Path) -> Path:
    trace = ChromeTrace(clock=lambda: 0.0)
    trace.open(path)
    for number in range(2):
        trace.span(TRAINER, "policy update", number, number + 0.5, step=number)
        trace.counter("environments", running=number, buffered=1)
    trace.close()
    return path


def test_a_trace_that_is_cut_anywhere_is_read_to_its_last_whole_event(tmp_path: Path) -> None:
    content = _written(tmp_path / "trace.json").read_bytes()
    # An event is whole with its closing brace, the comma or not.
    ends = [at for at in _ends_of_lines(content) if _last_line(content[:at]).endswith(b"}},")]
    ends = [at for at in ends if b'"ts":' in _last_line(content[:at])]
    assert len(ends) == 4
    cut = tmp_path / "cut.json"
    for end in range(content.index(b"\n", 2) + 1, len(content) + 1):
        cut.write_bytes(content[:end])
        trace = read_trace(cut)
        assert _number_of_events(trace) == sum(end >= at - len(b",\n") for at in ends)
        assert trace.is_whole == (b'"name":"end of the trace"}' in content[:end])


def _ends_of_lines(content: bytes) -> list[int]:
    return [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]


def _last_line(content: bytes) -> bytes:
    return content.splitlines()[-1]


def test_the_trace_of_a_run_is_the_newest_of_those_that_resumed_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no trace\.json there; a recipe writes it with --trace true"):
        find_trace(tmp_path)
    for name in ("trace.json", "trace-2.json"):
        _written(tmp_path / name)
    assert find_trace(tmp_path).name == "trace-2.json"
    assert find_trace(tmp_path / "trace.json").name == "trace.json"
    with pytest.raises(UsageError, match="no such run"):
        find_trace(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no trace of agentenv"),
        ('{"traceEvents": []}', "no trace of agentenv"),
        ('[\n{"ph":"M","args":{"agentenv_trace":99}},\n', "a trace of format 99"),
        ('[\n{"ph":"M","args":{"agentenv_trace":1}},\n{"ph":\n', "line 3 is no event"),
        ('[\n{"ph":"M","args":{"agentenv_trace":1}},\n{"ph":"X","name":"a"},\n', "line 3"),
        ('[\n{"ph":"M","args":{"agentenv_trace":1}},\n[1],\n', "line 3 is no event"),
        ("\x00\x01\x02", "no trace of agentenv"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        read_trace(path)


def test_a_run_that_has_just_begun_has_an_empty_trace(tmp_path: Path) -> None:
    trace, path = ChromeTrace(), tmp_path / "begun.json"
    trace.open(path)
    assert _number_of_events(read_trace(path)) == 0
    trace.close()
