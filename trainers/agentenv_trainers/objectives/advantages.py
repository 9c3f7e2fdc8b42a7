"""Advantages and critic targets of whole episodes, per token or per step (one action is one step).

Invariants:

* Rows hold the action tokens of one episode only, in order, with padding on the right.
* Steps and tokens share :func:`skip_observation_gae`; only what counts as a unit of the recursion differs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentenv_trainers.objectives.gae import length_adaptive_lambda, skip_observation_gae

ValueGranularity = Literal["token", "step_mean", "step_last"]
"""Unit of the recursion: each token; each step, valued by the mean of its tokens or by its last token."""


class AdvantageEstimate(NamedTuple):
    """[E, L] each, zero on padding."""

    advantages: Tensor
    returns: Tensor


def estimate_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    step_ids: Tensor,
    *,
    gamma: float,
    gae_lambda: float | None,
    alpha: float = 1.5,
    granularity: ValueGranularity = "token",
    bootstrap_values: Tensor | None = None,
) -> AdvantageEstimate:
    """Advantages and lambda-returns of the action tokens of a batch of episodes.

    Source: SAO, arXiv 2607.07508, eqs. 4 and 5 (tokens) and its appendix (step values; lambda from the number
    of steps).

    Args:
        rewards: [E] reward of each episode, given on its last action token.
        values: [E, L] critic estimates, detached.
        mask: [E, L] bool, true on real tokens (a prefix of each row, at least one token).
        step_ids: [E, L] int, number of the step that wrote the token, 0, 1, 2, ...; read only where mask is
            true.
        gamma: discount per unit.
        gae_lambda: fixed lambda, or None for the length-adaptive one.
        alpha: of the length-adaptive lambda.
        granularity: unit of the recursion.
        bootstrap_values: [E] value of the state after the end where an episode was cut off, else 0.

    Raises:
        ValueError: unknown granularity, shapes that do not fit, a row without a real token or with one behind padding,
            or (of steps) numbers that leave one out.
    """
    mask = mask.bool()
    if (
        not (values.shape == mask.shape == step_ids.shape and values.dim() == 2)
        or rewards.shape != values.shape[:1]
    ):
        raise ValueError(
            f"values {tuple(values.shape)}, mask {tuple(mask.shape)} and step_ids {tuple(step_ids.shape)} must have "
            f"one shape [E, L], and rewards {tuple(rewards.shape)} be [E]"
        )
    if not _is_prefix(mask):
        raise ValueError("mask must be true on the first tokens of each row, at least one, and only on them")
    if granularity == "token":
        units, unit_mask = values, mask
    elif granularity in ("step_mean", "step_last"):
        units, unit_mask = _step_values(values, mask, step_ids, granularity)
    else:
        raise ValueError(f"granularity is {granularity!r}, must be one of 'token', 'step_mean', 'step_last'")
    if not _is_prefix(unit_mask):
        raise ValueError("step_ids must count the steps of each row from 0 and leave none out")
    counts = unit_mask.sum(dim=1)
    unit_rewards = torch.zeros_like(units).scatter(
        1, (counts - 1).unsqueeze(1), rewards.to(units.dtype).unsqueeze(1)
    )
    advantages, returns = skip_observation_gae(
        unit_rewards,
        units,
        unit_mask,
        gamma=gamma,
        gae_lambda=length_adaptive_lambda(counts, alpha=alpha) if gae_lambda is None else gae_lambda,
        bootstrap_values=bootstrap_values,
    )
    if granularity != "token":
        sources = torch.where(mask, step_ids, 0)
        advantages = torch.where(mask, advantages.gather(1, sources), 0.0)
        returns = torch.where(mask, returns.gather(1, sources), 0.0)
    return AdvantageEstimate(advantages, returns)


def _is_prefix(mask: Tensor) -> bool:
    """Whether each row begins with a true entry and has none after its first false one."""
    return bool(mask[:, :1].all()) and not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _step_values(
    values: Tensor, mask: Tensor, step_ids: Tensor, granularity: ValueGranularity
) -> tuple[Tensor, Tensor]:
    """[E, S] value of each step and the mask of the steps that exist."""
    if bool((mask & (step_ids < 0)).any()):
        raise ValueError("step_ids must not be negative")
    steps = int(torch.where(mask, step_ids, 0).max()) + 1
    target = torch.where(mask, step_ids, steps)
    rows = values.size(0)
    sizes = torch.zeros(rows, steps + 1, dtype=values.dtype, device=values.device)
    sizes = sizes.scatter_add(1, target, torch.ones_like(values))[:, :steps]
    if granularity == "step_mean":
        sums = torch.zeros(rows, steps + 1, dtype=values.dtype, device=values.device)
        units = sums.scatter_add(1, target, values)[:, :steps] / sizes.clamp(min=1.0)
    else:
        # Tokens of a step lie side by side, so its last token is where the cumulated size ends.
        ends = (sizes.cumsum(dim=1) - 1).clamp(min=0).long()
        units = torch.where(sizes > 0, values.gather(1, ends), 0.0)
    return units, sizes > 0
