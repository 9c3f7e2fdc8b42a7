"""What goes over the wire between OpenEnv's client and an environment of ours."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.types import Action, Observation
from pydantic import Field

__all__ = ["TextAction", "TextObservation"]


class TextAction(Action):
    """A turn of the policy."""

    text: str = Field(description="what the policy wrote")


class TextObservation(Observation):
    """An answer of the environment; `done` is `terminated or truncated`."""

    text: str = Field(description="what the environment answers")
    terminated: bool = Field(default=False, description="the task is over, its reward final")
    truncated: bool = Field(default=False, description="the episode was cut off, its task was not over")
    info: dict[str, Any] = Field(default_factory=dict, description="see agentenv.BaseEnv")
