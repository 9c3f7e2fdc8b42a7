"""Of what environments, engines and the trainer spent their time on: the shares of a window of a trace.

Invariants:

* At every moment of the window a track is in exactly one state, that of the innermost span over it, so that the shares
  of each kind of track sum to 1.
* :data:`STATES` says what each state means; a span of an unknown name counts as "other".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentenv.errors import UsageError
from agentenv.timeline.reading import RecordedTrace, Span

__all__ = [
    "STATES",
    "Segment",
    "Shares",
    "Window",
    "innermost",
    "shares",
    "tracks_of",
    "weight_syncs",
    "window_of",
]

STATES: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "waiting": "in get_batch: no batch is complete",
        "critic update": "targets, updates and values of the critic",
        "policy update": "forward and backward passes, optimizer step",
        "weight sync": "gathering the weights and bringing them to the engines",
        "evaluation": "episodes of an evaluation, or of the critic's pretraining, are played",
        "checkpoint": "a checkpoint is written",
        "other": "collating, logging, loading; the critic's pretraining",
    },
    "environments": {
        "generate": "waits for the policy's turn, from request to reply",
        "reset": "the environment is made or reset",
        "step": "the environment answers an action; an agent program does anything but wait for a reply",
        "barrier": "waits for the other environments (mode batch)",
        "settling": "waits for an environment call of a cancelled episode to end",
        "between": "in an episode, in none of these: tokens are put together",
        "idle": "has no episode: none may start yet, or the slot rests after a failure",
    },
    "engines": {
        "busy": "has at least one request",
        "idle": "has none",
    },
}
"""Kinds of tracks, and what their states mean."""

_STATE_OF: Mapping[str, Mapping[str, str]] = {
    "trainer": {name: name for name in STATES["trainer"]} | {"wait for batch": "waiting"},
    "environments": {name: name for name in STATES["environments"]}
    | {"program": "step", "settle": "settling", "episode": "between"},
    "engines": {"busy": "busy"},
}
_OUTSIDE = {"trainer": "other", "environments": "idle", "engines": "idle"}
_OF_A_STEP = ("wait for batch", "critic update", "policy update", "weight sync")


class Segment(NamedTuple):
    """A track is in one state from start to end."""

    state: str
    start_s: float
    end_s: float


class Window(NamedTuple):
    """A part of a trace, in seconds since it was opened."""

    start_s: float
    end_s: float
    steps: tuple[int, int] | None
    """First and last training step in it; None: the trace has no training."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Shares:
    """Shares of a window."""

    window: Window
    tracks: Mapping[str, int]
    """How many there are of each kind."""
    states: Mapping[str, Mapping[str, float]]
    """Kind -> state -> share of the time of all of its tracks, 0 to 1."""
    weight_syncs: int
    discarded: Mapping[str, int]
    """Episodes that came to nothing, under kind and reason."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "start_s": round(self.window.start_s, 6),
            "seconds": round(self.window.seconds, 6),
            "steps": list(self.window.steps) if self.window.steps else None,
            "tracks": dict(self.tracks),
            "shares": {kind: dict(states) for kind, states in self.states.items()},
            "weight_syncs": self.weight_syncs,
            "discarded": dict(self.discarded),
        }


def window_of(trace: RecordedTrace, steps: tuple[int | None, int | None] = (None, None)) -> Window:
    """From the start of a training step, when its batch is asked for, to the end of another.

    A step ends where the next one starts, the last one with its weight sync.

    Args:
        trace: the whole.
        steps: first and last, the first of a run being 1; None: the first and the last of the trace. Without training
            the window is the whole trace.

    Raises:
        UsageError: the trace has no such steps, or nothing at all.
    """
    trainer = tracks_of(trace, "trainer").get("trainer", [])
    of_steps = [span for span in trainer if span.name in _OF_A_STEP]
    starts: dict[int, float] = {}
    for span in of_steps:
        if span.name == "wait for batch":
            starts.setdefault(int(span.arguments.get("step", 0)), span.start_s)
    if not starts:
        if steps != (None, None):
            raise UsageError(f"--steps: {trace.path} has no training steps")
        if trace.end_s <= 0.0:
            raise UsageError(f"{trace.path}: nothing has happened yet")
        return Window(0.0, trace.end_s, None)
    known = sorted(starts)
    first = known[0] if steps[0] is None else steps[0]
    last = known[-1] if steps[1] is None else steps[1]
    if first > last or first not in starts or last not in starts:
        raise UsageError(
            f"--steps {first}:{last}: {trace.path} has the steps {known[0]} to {known[-1]}; both must be of these, the "
            "first not behind the last"
        )
    end = next((starts[step] for step in known if step > last), max(span.end_s for span in of_steps))
    return Window(starts[first], end, (first, last))


def innermost(kind: str, spans: Sequence[Span], window: Window) -> list[Segment]:
    """The states of a track over all of the window.

    Args:
        kind: of the track, one of :data:`STATES`.
        spans: in the order of :attr:`RecordedTrace.spans`.
        window: what is looked at.
    """
    names, outside = _STATE_OF[kind], _OUTSIDE[kind]
    segments: list[Segment] = []
    now, open_spans = window.start_s, list[Span]()

    def go_to(moment: float) -> None:
        """The innermost of the open spans lasts until then."""
        nonlocal now
        moment = min(moment, window.end_s)
        if moment <= now:
            return
        state = names.get(open_spans[-1].name, "other") if open_spans else outside
        if segments and segments[-1].state == state and segments[-1].end_s == now:
            segments[-1] = segments[-1]._replace(end_s=moment)
        else:
            segments.append(Segment(state, now, moment))
        now = moment

    for span in spans:
        if span.start_s >= window.end_s:
            break
        while open_spans and open_spans[-1].end_s <= span.start_s:
            go_to(open_spans[-1].end_s)
            open_spans.pop()
        go_to(span.start_s)
        open_spans.append(span)
    while open_spans:
        go_to(open_spans[-1].end_s)
        open_spans.pop()
    go_to(window.end_s)
    return segments


def shares(trace: RecordedTrace, window: Window) -> Shares:
    """The shares of a window."""
    tracks = {kind: found for kind in STATES if (found := tracks_of(trace, kind))}
    states = {kind: _shares_of(kind, found.values(), window) for kind, found in tracks.items()}
    discarded: defaultdict[str, int] = defaultdict(int)
    for instant in trace.instants:
        if window.start_s <= instant.at_s < window.end_s:
            discarded[f"{instant.name}: {instant.arguments.get('reason', '')}"] += 1
    return Shares(
        window,
        {kind: len(found) for kind, found in tracks.items()},
        states,
        len(weight_syncs(trace, window)),
        dict(sorted(discarded.items())),
    )


def tracks_of(trace: RecordedTrace, kind: str) -> dict[str, list[Span]]:
    """The tracks of a kind by name, in the order of their numbers; none where the trace has none."""
    if kind == "trainer":
        spans = trace.spans.get(kind, {}).get("trainer")
        return {} if spans is None else {"trainer": spans}
    found = trace.spans.get(kind, {})
    return {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}


def weight_syncs(trace: RecordedTrace, window: Window) -> list[float]:
    """When the engines had new weights."""
    spans = trace.spans.get("trainer", {}).get("weight syncs", [])
    return [span.end_s for span in spans if window.start_s < span.end_s <= window.end_s]


def _shares_of(kind: str, tracks: Iterable[Sequence[Span]], window: Window) -> dict[str, float]:
    seconds = dict.fromkeys(STATES[kind], 0.0)
    for spans in tracks:
        for segment in innermost(kind, spans, window):
            seconds[segment.state] = seconds.get(segment.state, 0.0) + segment.end_s - segment.start_s
    total = sum(seconds.values())
    return {state: value / total for state, value in seconds.items()}
