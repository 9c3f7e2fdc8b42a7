"""One episode as the trainer sees it: token ids, and for each token who wrote it and with what log-prob.

Invariants (checked by :meth:`Trajectory.validate`):

* ``completion_ids``, ``rollout_logprobs``, ``action_mask`` and ``policy_versions`` have one length.
* Observation tokens have mask False, log-prob 0.0 and version -1; action tokens have mask True, a log-prob
  that is finite and not above 0, and the version of the weights that sampled them.
* The ids are those that the engine sampled or was prompted with: nothing here was decoded and re-encoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

OBSERVATION_VERSION = -1
"""``policy_versions`` entry of a token that no policy sampled."""


@dataclass
class Segment:
    """Part of an episode that one unbroken token sequence covers; see ``Conversation.forks``."""

    prompt_ids: list[int]
    completion_ids: list[int]
    rollout_logprobs: list[float]
    action_mask: list[bool]
    policy_versions: list[int]


@dataclass
class Trajectory:
    """A finished episode.

    ``prompt_ids + completion_ids`` is the whole token sequence. After a fork (a chat template that rewrites history)
    it is that of the last segment, and ``earlier_segments`` holds the others, oldest first; :meth:`split` gives every
    segment as a trajectory of its own.
    """

    prompt_ids: list[int]
    """Ids of the first prompt: system text, first observation and the generation prompt."""
    completion_ids: list[int]
    """Sampled and observation tokens after the first prompt."""
    rollout_logprobs: list[float]
    """Natural log-prob of each sampled token under the distribution it was sampled from; 0.0 on observations."""
    action_mask: list[bool]
    """True where the policy sampled the token."""
    policy_versions: list[int]
    """Version of the weights that sampled the token; -1 on observations."""
    reward: float = 0.0
    """Sum of the rewards of all steps."""
    terminated: bool = False
    """The environment reached an end of its task."""
    truncated: bool = False
    """The episode was cut off (turn or token limit, or by the environment)."""
    end_reason: str = ""
    """terminated, truncated, max_turns, max_tokens; on a failed evaluation episode the failure's reason."""
    episode_id: str = ""
    task_id: str = ""
    group_id: str = ""
    """Episodes of one group played the same task."""
    seed: int = 0
    """Seed given to ``env.reset``: it names the task."""
    start_version: int = 0
    """Version of the weights when the episode started."""
    turns: int = 0
    duration_s: float = 0.0
    """Wall time from reset to end, in seconds."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """The conversation as readable text: ``{"role": ..., "content": ...}``."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON-able extras: success, family, metrics, rewards per turn, failure and the like."""
    earlier_segments: list[Segment] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """``info["success"]`` where the environment says so, else whether the reward is positive."""
        value = self.info.get("success")
        return bool(value) if value is not None else self.reward > 0.0

    @property
    def failed(self) -> bool:
        """True where infrastructure ended the episode: its reward means nothing and it must not be trained on."""
        return "failure" in self.info

    @property
    def num_action_tokens(self) -> int:
        """How many tokens the policy sampled, in all segments."""
        return sum(self.action_mask) + sum(sum(segment.action_mask) for segment in self.earlier_segments)

    def validate(self) -> None:
        """Check the invariants of the module docstring.

        Raises:
            ValueError: an invariant is broken; the message names episode, field and value.
        """
        parts: list[Segment | Trajectory] = [*self.earlier_segments, self]
        for part in parts:
            _validate_tokens(self.episode_id, part)
        if not math.isfinite(self.reward):
            raise ValueError(f"trajectory {self.episode_id!r}: reward is {self.reward}, must be finite")
        if self.terminated and self.truncated and not self.end_reason:
            raise ValueError(f"trajectory {self.episode_id!r}: ended without an end_reason")

    def split(self) -> list[Trajectory]:
        """Every segment as a trajectory of its own with this one's reward, oldest first (``[self]`` without forks)."""
        earlier = [
            replace(
                self,
                prompt_ids=segment.prompt_ids,
                completion_ids=segment.completion_ids,
                rollout_logprobs=segment.rollout_logprobs,
                action_mask=segment.action_mask,
                policy_versions=segment.policy_versions,
                earlier_segments=[],
            )
            for segment in self.earlier_segments
        ]
        return [*earlier, replace(self, earlier_segments=[])] if earlier else [self]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able mapping of all fields (lists are shared, not copied)."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["earlier_segments"] = [vars(segment) for segment in self.earlier_segments]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        values = dict(data)
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        missing = [name for name in _TOKEN_FIELDS if name not in values]
        if unknown or missing:
            raise ValueError(f"not a trajectory: unknown fields {unknown}, missing fields {missing}")
        values["earlier_segments"] = [Segment(**segment) for segment in values.get("earlier_segments", ())]
        return cls(**values)

    def to_json(self) -> str:
        """One line of JSON.

        Raises:
            ValueError: a value is NaN or infinite.
            TypeError: ``info`` holds something that JSON cannot.
        """
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trajectory:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: not JSON, or not a trajectory.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"not a trajectory: expected a JSON object, got {type(data).__name__}")
        return cls.from_dict(data)


_TOKEN_FIELDS = ("prompt_ids", "completion_ids", "rollout_logprobs", "action_mask", "policy_versions")


def _validate_tokens(episode_id: str, part: Segment | Trajectory) -> None:
    lengths = {name: len(getattr(part, name)) for name in _TOKEN_FIELDS[1:]}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"trajectory {episode_id!r}: lengths differ: {lengths}")
    rows = zip(part.action_mask, part.rollout_logprobs, part.policy_versions, strict=True)
    for index, (is_action, logprob, version) in enumerate(rows):
        if is_action and not (logprob <= 0.0 and math.isfinite(logprob) and version >= 0):
            raise ValueError(
                f"trajectory {episode_id!r}: action token {index} has log-prob {logprob} and version {version}; "
                "allowed: finite, <= 0, and a version >= 0"
            )
        if not is_action and not (logprob == 0.0 and version == OBSERVATION_VERSION):
            raise ValueError(
                f"trajectory {episode_id!r}: observation token {index} has log-prob {logprob} and version "
                f"{version}; must be 0.0 and {OBSERVATION_VERSION}"
            )
