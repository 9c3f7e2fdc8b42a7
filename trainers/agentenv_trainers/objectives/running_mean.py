"""The cheapest baseline: the mean of the last rewards.

Invariants:

* A batch is compared with what came before it, never with itself, but for the very first.
* The order of the rewards counts: the newest are kept.
* The state is plain data for JSON.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any


class RunningMeanBaseline:
    """advantage = reward - mean of the last rewards before this batch, of all tasks or of the same task.

    Source: SAO, arXiv 2607.07508: the baseline of the online-learning experiment (section 4.5, the last 128 rewards)
    and of the ablation "running mean" (the last 8 rewards of each prompt).

    A task that was never seen is compared with the mean of all that is remembered of other tasks; the first batch, of
    which nothing is remembered, with its own mean.

    Args:
        window: how many rewards are remembered, of each task or in all; at least 1.
        per_task: compare with rewards of the same task. Memory grows with the number of different tasks.

    Raises:
        ValueError: window is below 1.
    """

    def __init__(self, window: int, per_task: bool = False) -> None:
        if window < 1:
            raise ValueError(f"window is {window}, must be at least 1")
        self.window = window
        self.per_task = per_task
        self._histories: dict[str, deque[float]] = {}

    def advantages(self, rewards: Sequence[float], task_ids: Sequence[str]) -> list[float]:
        """The batch's advantages, and remember its rewards.

        Args:
            rewards: of the batch's episodes, oldest first; without those that failed and have none.
            task_ids: of the same episodes; read only with ``per_task``.

        Returns:
            One number per episode, in units of reward.

        Raises:
            ValueError: the lengths differ, or a reward is not finite; nothing is remembered then.
        """
        if len(rewards) != len(task_ids):
            raise ValueError(f"{len(rewards)} rewards and {len(task_ids)} task_ids: must be as many")
        broken = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
        if broken:
            raise ValueError(f"rewards must be finite, those of rows {broken} are not")
        keys = [task_id if self.per_task else "" for task_id in task_ids]
        known = {key: _mean(self._histories[key]) for key in set(keys) if key in self._histories}
        otherwise = 0.0
        if len(known) < len(set(keys)):
            remembered = [reward for history in self._histories.values() for reward in history]
            otherwise = _mean(remembered or rewards)
        result = [reward - known.get(key, otherwise) for reward, key in zip(rewards, keys, strict=True)]
        for reward, key in zip(rewards, keys, strict=True):
            self._histories.setdefault(key, deque(maxlen=self.window)).append(float(reward))
        return result

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as JSON knows it."""
        return {
            "per_task": self.per_task,
            "histories": {key: list(history) for key, history in self._histories.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what ``state_dict`` returned; with a smaller window its newest rewards.

        Raises:
            ValueError: the state is per task and this baseline is not, or the other way round.
        """
        if state["per_task"] != self.per_task:
            raise ValueError(
                f"per_task is {self.per_task}, must be {state['per_task']} as in the saved state"
            )
        self._histories = {
            key: deque(history, maxlen=self.window) for key, history in state["histories"].items()
        }


def _mean(rewards: Sequence[float] | deque[float]) -> float:
    return math.fsum(rewards) / len(rewards)
