"""What a run's trace shows: who was busy when, as shares of time and as a picture (``agentenv timeline RUN``)."""

from agentenv.timeline.reading import RecordedTrace, Span, find_trace, read_trace
from agentenv.timeline.shares import Shares, Window, innermost, shares, window_of

__all__ = [
    "RecordedTrace",
    "Shares",
    "Span",
    "Window",
    "find_trace",
    "innermost",
    "read_trace",
    "shares",
    "window_of",
]
