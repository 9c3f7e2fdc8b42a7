"""Wrappers that fit any text environment: limits, a cut for long observations, and recording.

A wrapper is a `gymnasium.Wrapper`; `env.unwrapped` is the environment itself.
"""

from agentenv.wrappers.base import TextWrapper
from agentenv.wrappers.limits import TextEncoder, TokenBudget, TurnLimit
from agentenv.wrappers.observation_cut import ObservationCut, cut_text
from agentenv.wrappers.record import Record

__all__ = ["ObservationCut", "Record", "TextEncoder", "TextWrapper", "TokenBudget", "TurnLimit", "cut_text"]
