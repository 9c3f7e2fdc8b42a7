"""Shares of time: worked numbers, and that nothing is counted twice or left out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import UsageError
from agentenv.timeline import RecordedTrace, Span, Window, innermost, shares, window_of


def _trace(**groups: dict[str, list[Span]]) -> RecordedTrace:
    return RecordedTrace(Path("trace.json"), spans=dict(groups))


TRAINING = [
    Span("weight sync", 0.5, 1.0),
    Span("wait for batch", 1.0, 4.0, {"step": 1}),
    Span("critic update", 4.0, 5.0),
    Span("policy update", 5.0, 7.0),
    Span("weight sync", 7.0, 8.0),
    Span("wait for batch", 9.0, 10.0, {"step": 2}),
    Span("policy update", 10.0, 12.0),
    Span("weight sync", 12.0, 13.0),
    Span("evaluation", 13.0, 50.0),
]


def test_the_innermost_span_says_what_a_track_does() -> None:
    spans = [
        Span("episode", 1.0, 9.0),
        Span("reset", 1.0, 2.0),
        Span("generate", 3.0, 5.0),
        Span("step", 5.0, 8.0),
        Span("episode", 9.0, 12.0),
    ]
    assert innermost("environments", spans, Window(0.0, 10.0, None)) == [
        ("idle", 0.0, 1.0),
        ("reset", 1.0, 2.0),
        ("between", 2.0, 3.0),
        ("generate", 3.0, 5.0),
        ("step", 5.0, 8.0),
        ("between", 8.0, 10.0),
    ]


def test_a_window_is_from_the_first_wait_to_the_last_sync_and_leaves_evaluations_out() -> None:
    trace = _trace(trainer={"trainer": TRAINING})
    assert window_of(trace) == Window(1.0, 13.0, (1, 2))
    assert window_of(trace, (1, 1)) == Window(1.0, 9.0, (1, 1))
    assert window_of(trace, (2, None)) == Window(9.0, 13.0, (2, 2))
    found = shares(trace, window_of(trace, (1, 1))).states["trainer"]
    # 3 of 8 seconds for the batch, 1 for the critic, 2 for the policy, 1 for the sync, 1 for what has no name.
    assert {name: share * 8.0 for name, share in found.items() if share} == {
        "waiting": 3.0,
        "critic update": 1.0,
        "policy update": 2.0,
        "weight sync": 1.0,
        "other": 1.0,
    }


@pytest.mark.parametrize("steps", [(0, None), (2, 1), (1, 3), (None, 9)])
def test_steps_that_the_trace_does_not_have_are_an_error_that_names_those_it_has(
    steps: tuple[int | None, int | None],
) -> None:
    with pytest.raises(UsageError, match=r"has the steps 1 to 2"):
        window_of(_trace(trainer={"trainer": TRAINING}), steps)


def test_a_trace_without_training_is_looked_at_whole_and_has_no_steps() -> None:
    trace = _trace(evaluation={"eval0-0": [Span("episode", 1.0, 3.0)]})
    assert window_of(trace) == Window(0.0, 3.0, None)
    with pytest.raises(UsageError, match="has no training steps"):
        window_of(trace, (1, 1))
    with pytest.raises(UsageError, match="nothing has happened yet"):
        window_of(_trace())


@st.composite
def _nested(draw: st.DrawFn, start: int = 0, end: int = 60, depth: int = 0) -> list[Span]:
    """Spans that nest, in whole seconds; unknown names among them."""
    spans: list[Span] = []
    now = start
    while now < end and draw(st.booleans()):
        begun = draw(st.integers(now, end))
        ended = draw(st.integers(begun, end))
        name = draw(st.sampled_from(["episode", "reset", "generate", "step", "barrier", "settle", "?"]))
        spans.append(Span(name, float(begun), float(ended)))
        if depth < 3:
            spans += draw(_nested(begun, ended, depth + 1))
        now = max(ended, now + 1)
    return spans


@given(
    st.lists(_nested(), min_size=1, max_size=4),
    st.tuples(st.integers(0, 60), st.integers(1, 20)),
)
def test_states_cover_the_window_without_a_gap_and_the_shares_sum_to_1(
    tracks: list[list[Span]], bounds: tuple[int, int]
) -> None:
    window = Window(float(bounds[0]), float(bounds[0] + bounds[1]), None)
    for spans in tracks:
        spans.sort(key=lambda span: (span.start_s, -span.end_s))
        segments = innermost("environments", spans, window)
        assert segments[0].start_s == window.start_s and segments[-1].end_s == window.end_s
        for before, after in pairwise(segments):
            assert before.end_s == after.start_s and before.state != after.state
    trace = _trace(environments={f"slot-{number}": spans for number, spans in enumerate(tracks)})
    found = shares(trace, window).states["environments"]
    assert sum(found.values()) == pytest.approx(1.0)
    assert all(0.0 <= share <= 1.0 for share in found.values())


def test_what_stands_still_is_read_off_a_moment_at_a_time() -> None:
    """Against a count of whole seconds, which needs no stack."""
    spans = [Span("episode", 2.0, 9.0), Span("generate", 3.0, 5.0), Span("step", 6.0, 9.0)]
    window = Window(0.0, 12.0, None)
    states = []
    for second in range(12):
        over = [span for span in spans if span.start_s <= second < span.end_s]
        states.append({"episode": "between"}.get(over[-1].name, over[-1].name) if over else "idle")
    found = shares(_trace(environments={"slot-0": spans}), window).states["environments"]
    assert {state: share * 12 for state, share in found.items() if share} == pytest.approx(
        {state: states.count(state) for state in set(states)}
    )
