"""The double-sided importance weights of SAO ("DIS" in the paper).

Invariants:

* The weights are detached: they scale the gradient of the log-prob and have none of their own.
* The mask is strict on both sides and does not look at the sign of the advantage.
* Ratios are compared as differences of log-probs; only accepted ones are exponentiated, so nothing overflows.
* A token whose log-prob is not finite on either side has weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentenv_trainers.objectives.ratio import log_bounds, log_ratio


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
    difference, _ = log_ratio(policy_logprobs, rollout_logprobs, "policy_logprobs", "rollout_logprobs")
    ratio = torch.exp(torch.where(regions.accepted, difference, 0.0))
    return torch.where(regions.accepted, ratio, 0.0)


def double_sided_regions(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, *, clip_low: float, clip_high: float
) -> DoubleSidedRegions:
    """The region of each token's ratio; arguments and errors as in :func:`double_sided_weights`."""
    difference, finite = log_ratio(policy_logprobs, rollout_logprobs, "policy_logprobs", "rollout_logprobs")
    lower, upper = log_bounds(clip_low, clip_high)
    low = finite & (difference <= lower)
    high = finite & (difference >= upper)
    return DoubleSidedRegions(accepted=finite & ~low & ~high, low=low, high=high, nonfinite=~finite)
