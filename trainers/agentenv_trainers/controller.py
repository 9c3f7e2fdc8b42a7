"""What a trainer needs of the side that plays episodes; ``agentenv.rollout.AsyncController`` provides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from agentenv.trajectory import Trajectory


class TrajectorySource(Protocol):
    """Synchronous facade of the rollouts. All calls come from the trainer's thread."""

    def start(self) -> None:
        """Begin to play episodes; a second call does nothing."""

    def get_batch(self, step: int) -> list[Trajectory]:
        """Block until the trajectories of training step ``step`` (0, 1, ...) are there, fresh enough for it.

        Raises:
            agentenv.errors.RolloutError: the run must stop.
        """

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the engines new weights.

        The tensors are the trainer's own: they must have been copied when the call returns.
        """

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the rollouts since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """Prompt ledger and buffered trajectories, cut at one moment; JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; called before :meth:`start`."""
