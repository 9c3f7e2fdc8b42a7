"""Episodes of weights that are a fixed number of batches old: staleness as an exact experimental variable.

In an asynchronous run staleness follows from timing and differs between episodes and machines. Here batch n is played
by the weights of version max(0, n - lag), all of it, on every machine.

Invariants:

* What batch n was sampled with are, bit for bit, the weights that the trainer gave under version max(0, n - lag).
* ``start_version`` and ``policy_versions`` of the trajectories are that version.
* ``lag + 1`` copies of the weights are held, where the trainer has them; a checkpoint holds them, too.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from agentenv.errors import UsageError
from agentenv.trajectory import Segment, Trajectory
from agentenv_trainers.controller import TrajectorySource


class LaggedSource:
    """A source of trajectories whose engines are ``lag`` batches behind the trainer.

    Meant for experiments with small policies: a checkpoint's JSON grows by the size of ``lag + 1`` policies.

    Args:
        source: plays each batch with the weights of its step alone, as an ``AsyncController`` with mode "sync" does;
            it counts steps, and is given older weights under a step's number.
        lag: batches between the weights that sample and those that are trained, at least 0.

    Raises:
        UsageError: ``lag`` is negative or no whole number, or ``source`` is a controller that plays ahead.
    """

    def __init__(self, source: TrajectorySource, lag: int) -> None:
        if isinstance(lag, bool) or not isinstance(lag, int) or lag < 0:
            raise UsageError(f"LaggedSource: lag is {lag!r}, must be a whole number of at least 0")
        alpha = getattr(getattr(source, "config", None), "alpha", 0.0)
        if alpha != 0.0:
            raise UsageError(
                f"LaggedSource: the source plays ahead (asynchrony {alpha:g}), so that its episodes have no exact "
                "lag: give mode='sync'"
            )
        self.lag = lag
        self._source = source
        self._weights: dict[int, dict[str, Tensor]] = {}
        """By version, oldest first."""
        self._caught_up = False

    def start(self) -> None:
        """Begin to play episodes."""
        self._source.start()

    def get_batch(self, step: int) -> list[Trajectory]:
        """The trajectories of a training step, under the versions that sampled them.

        Raises:
            agentenv.errors.RolloutError: as the source raises.
            UsageError: the source played an episode with weights that were not those of the step, or the engines were
                given the newest weights (:meth:`catch_up`) for this step.
        """
        if self._caught_up:
            raise UsageError(
                f"LaggedSource: after catch_up the engines have weights without lag {self.lag}: sync_weights must come "
                f"before the batch of step {step}"
            )
        return [self._relabelled(trajectory, step) for trajectory in self._source.get_batch(step)]

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take the weights of a version; the engines get those of ``lag`` versions before.

        Raises:
            UsageError: those are not there, because versions were left out or a run was continued without its state.
        """
        self._weights[version] = _copied(weights)
        wanted = max(0, version - self.lag)
        if wanted not in self._weights:
            raise UsageError(
                f"LaggedSource: version {version} with lag {self.lag} needs the weights of version {wanted}; there are "
                f"those of {sorted(self._weights)}"
            )
        self._weights = {
            number: self._weights[number] for number in sorted(self._weights) if number >= wanted
        }
        self._source.sync_weights(self._weights[wanted], version)
        self._caught_up = False

    def catch_up(self) -> None:
        """Give the engines the newest weights, for an evaluation of what the training has come to.

        Raises:
            UsageError: no weights were given yet.
        """
        if not self._weights:
            raise UsageError("LaggedSource.catch_up: there are no weights yet, sync_weights must come first")
        newest = max(self._weights)
        self._caught_up = self.lag > 0
        self._source.sync_weights(self._weights[newest], newest)

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the rollouts since the last call."""
        return self._source.metrics()

    def state_dict(self) -> dict[str, Any]:
        """That of the source, and the weights: safetensors files as base64 text, as the state is to be JSON-able."""
        return {
            "lag": self.lag,
            "weights": {
                str(version): base64.b64encode(save(weights)).decode("ascii")
                for version, weights in self._weights.items()
            },
            "source": self._source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`.

        Raises:
            UsageError: the state is not of such a source, or of one with another lag.
        """
        if "weights" not in state or state.get("lag") != self.lag:
            raise UsageError(
                f"LaggedSource: the state to continue from is of lag {state.get('lag')}, this one has lag {self.lag}"
            )
        self._weights = {
            int(version): load(base64.b64decode(text)) for version, text in state["weights"].items()
        }
        self._source.load_state_dict(state["source"])

    def _relabelled(self, trajectory: Trajectory, step: int) -> Trajectory:
        parts: list[Segment | Trajectory] = [*trajectory.earlier_segments, trajectory]
        seen = {trajectory.start_version, *(v for part in parts for v in part.policy_versions if v >= 0)}
        if seen != {step}:
            raise UsageError(
                f"LaggedSource: episode {trajectory.episode_id!r} of step {step} was played with the source's versions "
                f"{sorted(seen)}, must be {step} alone: give a source that plays nothing ahead (mode='sync')"
            )
        version = max(0, step - self.lag)
        return replace(
            trajectory,
            start_version=version,
            policy_versions=_replaced(trajectory.policy_versions, version),
            earlier_segments=[
                replace(segment, policy_versions=_replaced(segment.policy_versions, version))
                for segment in trajectory.earlier_segments
            ],
        )


def _replaced(versions: list[int], version: int) -> list[int]:
    """The version on action tokens; observation tokens keep theirs, which is negative."""
    return [version if old >= 0 else old for old in versions]


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
