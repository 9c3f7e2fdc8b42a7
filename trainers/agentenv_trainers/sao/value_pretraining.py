"""Value pretraining: the critic learns the returns of the fixed starting policy before the policy moves.

Invariants:

* Targets are Monte-Carlo returns: rewards to come, no value enters them. An episode that was cut off is not
  bootstrapped, for there is no value yet to do it with; with ``truncation="drop"`` it is left out.
* A tenth of the trajectories is held out; the report's explained variance is measured on it.
* The same trajectories, settings and seed give the same critic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentenv.errors import UsageError
from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import TrajectoryBatch, reason_to_drop
from agentenv_trainers.objectives import estimate_advantages, explained_variance
from agentenv_trainers.sao.config import SAOConfig
from agentenv_trainers.sao.critic_learner import CriticLearner

logger = logging.getLogger(__name__)

_HELD_OUT = 0.1


@dataclass(frozen=True)
class PretrainingReport:
    """What value pretraining did."""

    steps: int
    trajectories: int
    """Trained on; the held-out ones not counted."""
    loss_first: float
    """Mean squared error of the first and of the last batch, before its update."""
    loss_last: float
    explained_variance: float
    """Of the held-out trajectories, after training; NaN where all had one result."""


def pretrain_values(
    learner: CriticLearner,
    trajectories: Sequence[Trajectory],
    deal: Callable[[Sequence[Trajectory]], list[Trajectory]],
    args: SAOConfig,
    build: Callable[[Sequence[Trajectory]], TrajectoryBatch],
    steps: int | None = None,
    epochs: float | None = None,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> PretrainingReport:
    """Train the critic on Monte-Carlo returns.

    Source: VC-PPO, arXiv 2503.01491 (value pretraining); SAO, arXiv 2607.07508.

    Args:
        learner: the critic.
        trajectories: episodes of the fixed policy, the same list on every process.
        deal: this process's share of a batch.
        args: settings; a batch has ``trajectories_per_step`` trajectories, or all if there are fewer.
        build: trajectories to tensors.
        steps: updates, one batch each; None: from ``epochs``, or ``args.value_pretrain_steps``.
        epochs: passes over the trajectories, instead of ``steps``.
        on_progress: called after each update with (update, updates in all, loss).

    Raises:
        UsageError: fewer than two trajectories that can be trained on, both steps and epochs given, or one of them
            below its range.
    """
    if steps is not None and epochs is not None:
        raise UsageError("pretrain_critic: give steps or epochs, not both")
    if steps is not None and steps < 1:
        raise UsageError(f"pretrain_critic: steps is {steps}, must be at least 1")
    if epochs is not None and not (epochs > 0.0 and math.isfinite(epochs)):
        raise UsageError(f"pretrain_critic: epochs is {epochs}, must be positive and finite")
    usable = [t for t in trajectories if reason_to_drop(t, args.truncation) is None]
    if len(usable) < 2:
        raise UsageError(f"pretrain_critic: {len(usable)} usable trajectories, at least 2 are needed")
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(usable), generator=generator).tolist()
    held_out = [usable[i] for i in order[: max(1, round(_HELD_OUT * len(usable)))]]
    training = [usable[i] for i in order[len(held_out) :]]
    size = min(args.trajectories_per_step, len(training))
    if steps is None:
        steps = (
            args.value_pretrain_steps if epochs is None else max(1, math.ceil(epochs * len(training) / size))
        )
    losses: list[float] = []
    with learner.pretraining():
        queue: list[int] = []
        for step in range(1, steps + 1):
            while len(queue) < size:
                queue += torch.randperm(len(training), generator=generator).tolist()
            chosen, queue = queue[:size], queue[size:]
            batch = build(deal([training[i] for i in chosen]))
            losses.append(learner.update(batch, monte_carlo_returns(batch, args.gamma), updates=1).loss)
            if on_progress is not None:
                on_progress(step, steps, losses[-1])
    learner.critic.head_is_trained = True
    batch = build(held_out)
    report = PretrainingReport(
        steps=steps,
        trajectories=len(training),
        loss_first=losses[0],
        loss_last=losses[-1],
        explained_variance=explained_variance(
            learner.values(batch).tokens, monte_carlo_returns(batch, args.gamma)
        ),
    )
    logger.info("value pretraining: %s", report)
    return report


def monte_carlo_returns(batch: TrajectoryBatch, gamma: float) -> Tensor:
    """[M] discounted reward to come at each value token; nothing follows the end of an episode."""
    zeros = torch.zeros(batch.num_values, device=batch.rewards.device)
    if not batch.num_values:
        return zeros
    padded, mask = batch.pad_episodes(zeros)
    step_ids, _ = batch.pad_episodes(batch.step_ids)
    return estimate_advantages(batch.rewards, padded, mask, step_ids, gamma=gamma, gae_lambda=1.0).returns[
        mask
    ]
