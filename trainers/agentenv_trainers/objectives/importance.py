"""Importance weights of the off-policy objectives that TRL lacks or has in another form.

Invariants:

* The weights are detached: they scale the gradient of the log-prob and have none of their own.
* Bounds are applied to differences of log-probs, before the exponential, so nothing overflows.
* A token with a log-prob that is NaN or infinite, on either side, has weight 0.

Truncated importance sampling, min(r, C), is :func:`proximal_weights` with a cap; TRL has it as ``loss_type="cispo"``
with ``epsilon_high`` = C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentenv_trainers.objectives.gae import exact_dtype
from agentenv_trainers.objectives.ratio import log_bounds, log_ratio


def cispo_weights(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """clip(r, 1 - clip_low, 1 + clip_high), r = exp(policy_logprobs - rollout_logprobs).

    A token outside the bounds keeps the weight of the bound, and its gradient; that is the difference to
    :func:`double_sided_weights`. With clip_low 0.3 and clip_high 5.0 the ratios [0.5, 0.8, 2.0, 9.0] give
    [0.7, 0.8, 2.0, 6.0].
    Source: CISPO, arXiv 2506.13585 (MiniMax-M1), section 3.1. The paper and TRL set no lower bound: clip_low 1.

    Args:
        policy_logprobs: log-probs of the sampled tokens (nats) under the weights being trained; any shape.
        rollout_logprobs: log-probs that the engine reported when it sampled them; same shape.
        clip_low: distance of the lower bound from 1, in [0, 1]; at 1 there is no lower bound.
        clip_high: distance of the upper bound from 1, > 0.

    Returns:
        Detached weights, same shape.

    Raises:
        ValueError: shapes differ, or a bound is outside its range.
    """
    lower, upper = log_bounds(clip_low, clip_high)
    difference, finite = log_ratio(policy_logprobs, rollout_logprobs, "policy_logprobs", "rollout_logprobs")
    return torch.where(finite, torch.exp(difference.clamp(lower, upper)), 0.0)


def topr_weights(policy_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, positive: Tensor) -> Tensor:
    """1 in trajectories of positive return, min(product of r over the trajectory, 1) in the others.

    Good trajectories are learned from as if they were data; bad ones are unlearned only as far as the policy would
    still write them. A bad trajectory with the ratios [0.5, 0.5] has weight 0.25 at both tokens, one with
    [0.5, 4.0] has 1.
    Source: TOPR, arXiv 2503.14286, the "canonical" form: truncated to [1, 1] where the return is 0 or more, to [0, 1]
    where it is less. What return means, and its baseline, is the caller's matter.

    Args:
        policy_logprobs: [B, T] log-probs of the sampled tokens (nats) under the weights being trained.
        rollout_logprobs: [B, T] log-probs that the engine reported when it sampled them.
        mask: [B, T] bool, true where the policy sampled the token.
        positive: [B] bool, true where the trajectory's return (or advantage) is not negative.

    Returns:
        [B, T] detached weights, 0 outside the mask. Where a log-prob of a bad trajectory is not finite its ratio is
        unknown, and all of its weights are 0; in a good one only that token's is.

    Raises:
        ValueError: shapes do not fit.
    """
    # Differences and their sum are exact: rounding would add up over a long trajectory.
    exact = exact_dtype(policy_logprobs.device)
    difference, finite = log_ratio(
        policy_logprobs.to(exact), rollout_logprobs.to(exact), "policy_logprobs", "rollout_logprobs"
    )
    if difference.dim() != 2 or mask.shape != difference.shape or positive.shape != difference.shape[:1]:
        raise ValueError(
            f"policy_logprobs {tuple(policy_logprobs.shape)} must be [B, T], mask {tuple(mask.shape)} as well, and "
            f"positive {tuple(positive.shape)} [B]"
        )
    mask, positive = mask.bool(), positive.bool()
    known = (finite | ~mask).all(dim=1)
    product = torch.exp(torch.where(mask, difference, 0.0).sum(dim=1).clamp(max=0.0))
    of_rows = torch.where(positive, 1.0, torch.where(known, product, 0.0)).to(policy_logprobs.dtype)
    return torch.where(mask & finite, of_rows.unsqueeze(1), 0.0)


def proximal_weights(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float | None = None
) -> Tensor:
    """min(exp(proximal_logprobs - rollout_logprobs), cap).

    Source: Decoupled PPO, arXiv 2110.00641: the factor proximal / behaviour policy in front of the clipped
    objective, which is around the proximal policy; no cap. With a cap it is truncated importance sampling (the
    published cap is 2 to 5), and the correction for an engine whose log-probs differ from the trainer's under the same
    weights. With cap 5 the ratios [0.5, 1.0, 8.0] give [0.5, 1.0, 5.0].

    Args:
        proximal_logprobs: log-probs of the sampled tokens (nats) under the proximal policy, recomputed by the trainer;
            any shape.
        rollout_logprobs: log-probs that the engine reported when it sampled them; same shape.
        cap: upper bound of the weights, > 0; None for none.

    Returns:
        Detached weights, same shape. Without a cap a ratio too large for the dtype has weight 0, as one that is not
        known.

    Raises:
        ValueError: shapes differ, or the cap is not positive and finite.
    """
    if cap is not None and not (cap > 0.0 and math.isfinite(cap)):
        raise ValueError(f"cap is {cap}, must be positive and finite, or None")
    difference, finite = log_ratio(
        proximal_logprobs, rollout_logprobs, "proximal_logprobs", "rollout_logprobs"
    )
    weights = torch.exp(difference if cap is None else difference.clamp(max=math.log(cap)))
    return torch.where(finite & torch.isfinite(weights), weights, 0.0)
