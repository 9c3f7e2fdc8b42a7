"""The double-sided importance weights of SAO ("DIS" in the paper).

Invariants:

* The weights are detached: they scale the gradient of the log-prob and have none of their own.
* The mask is strict on both sides and does not look at the sign of the advantage.
* Ratios are compared as differences of log-probs; only accepted ones are exponentiated, so nothing overflows.
* A token whose log-prob is not finite on either side has weight 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class DoubleSidedRegions(NamedTuple):
    """Where each token's ratio fell: four disjoint masks of the input's shape that cover every token."""

    accepted: Tensor
    """1 - clip_low < ratio < 1 + clip_high."""
    low: Tensor
    """ratio <= 1 - clip_low."""
    high: Tensor
    """ratio >= 1 + clip_high."""
    nonfinite: Tensor
    """One of the two log-probs is NaN or infinite."""


def double_sided_weights(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Importance weights f(r) of the SAO policy objective.

    f(r) = r where 1 - clip_low < r < 1 + clip_high, else 0, with r = exp(policy_logprobs - rollout_logprobs).
    With clip_low 0.3 and clip_high 5.0 the ratios [0.70, 0.80, 2.0, 6.0] give [0, 0.80, 2.0, 0].
    Source: SAO, arXiv 2607.07508, "direct double-sided importance sampling".

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
    regions = double_sided_regions(policy_logprobs, rollout_logprobs, clip_low=clip_low, clip_high=clip_high)
    log_ratio = policy_logprobs.detach() - rollout_logprobs.detach()
    ratio = torch.exp(torch.where(regions.accepted, log_ratio, torch.zeros_like(log_ratio)))
    return torch.where(regions.accepted, ratio, torch.zeros_like(ratio))


def double_sided_regions(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, *, clip_low: float, clip_high: float
) -> DoubleSidedRegions:
    """The region of each token's ratio; arguments and errors as in :func:`double_sided_weights`."""
    if policy_logprobs.shape != rollout_logprobs.shape:
        raise ValueError(
            f"policy_logprobs has shape {tuple(policy_logprobs.shape)}, rollout_logprobs "
            f"{tuple(rollout_logprobs.shape)}: they must be equal"
        )
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}, must be in [0, 1]")
    if not (clip_high > 0.0 and math.isfinite(clip_high)):
        raise ValueError(f"clip_high is {clip_high}, must be positive and finite")
    policy, rollout = policy_logprobs.detach(), rollout_logprobs.detach()
    log_ratio = policy - rollout
    finite = torch.isfinite(policy) & torch.isfinite(rollout)
    lower = math.log1p(-clip_low) if clip_low < 1.0 else -math.inf
    low = finite & (log_ratio <= lower)
    high = finite & (log_ratio >= math.log1p(clip_high))
    return DoubleSidedRegions(accepted=finite & ~low & ~high, low=low, high=high, nonfinite=~finite)
