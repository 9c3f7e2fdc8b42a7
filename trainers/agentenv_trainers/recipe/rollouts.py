"""The controller as a recipe's trainer sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from agentenv.report import RunDirectory
from agentenv.trajectory import Trajectory
from agentenv_trainers.controller import TrajectorySource
from agentenv_trainers.recipe.interruption import Interrupted, Interruption


class CountedSource(TrajectorySource, Protocol):
    """A source that counts its episodes."""

    def counts(self) -> dict[str, Any]:
        """``consumed`` and others, see ``AsyncController.counts``."""
        ...


class RecordedRollouts:
    """A source of trajectories that writes down what was trained on and whose wait a signal may end.

    Args:
        source: where the trajectories come from.
        run: where they are written.
        interruption: the signals.
        shuffle_seed: for a control run: the rewards of each batch are shuffled among its episodes, after they have
            been written down as they were.
        keep: most episodes of a step that are written down; None: all.
        next_step: number of the training step that the next batch is taken for, where a batch has several; None: that
            of the batch.
    """

    def __init__(
        self,
        source: CountedSource,
        run: RunDirectory,
        interruption: Interruption,
        *,
        shuffle_seed: int | None = None,
        keep: int | None = None,
        next_step: Callable[[], int] | None = None,
    ) -> None:
        self._source, self._run, self._interruption = source, run, interruption
        self._shuffle_seed, self._keep, self._next_step = shuffle_seed, keep, next_step
        self.batch_lost = False
        """A batch was taken from the buffer and not trained on, because a signal fell between the two."""

    def start(self) -> None:
        """Begin to play episodes."""
        self._source.start()

    def get_batch(self, step: int) -> list[Trajectory]:
        """The trajectories of a training step.

        Raises:
            Interrupted: the user ended the run.
        """
        consumed = self._source.counts()["consumed"]
        try:
            with self._interruption.at_once():
                batch = self._source.get_batch(step)
        except Interrupted:
            self.batch_lost = self._source.counts()["consumed"] != consumed
            raise
        used_in = step + 1 if self._next_step is None else self._next_step()
        self._run.log_trajectories("train", used_in, batch[: self._keep])
        if self._shuffle_seed is not None:
            rewards = [trajectory.reward for trajectory in batch]
            random.Random(f"{self._shuffle_seed}:{step}").shuffle(rewards)
            batch = [replace(item, reward=reward) for item, reward in zip(batch, rewards, strict=True)]
        return batch

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the engines new weights."""
        self._source.sync_weights(weights, version)

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the rollouts since the last call."""
        return self._source.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Prompt ledger and buffered trajectories."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self._source.load_state_dict(state)
