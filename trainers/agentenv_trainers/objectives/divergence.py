"""Divergence of the policy from a reference policy."""

from __future__ import annotations

import torch
from torch import Tensor


def k3_divergence(policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The k3 estimate of KL(policy, reference) at each sampled token: exp(d) - d - 1, d = reference - policy.

    Source: Schulman, "Approximating KL divergence"; GRPO, arXiv 2402.03300, eq. 4. SAO has no such term: here it
    is an option, off by default.

    Args:
        policy_logprobs: log-probs of the sampled tokens in nats, with gradient; any shape.
        reference_logprobs: of the same tokens under the reference; detached.
        mask: bool, true where the token counts.

    Returns:
        Same shape, not negative, 0 outside the mask whatever is there.
    """
    difference = torch.where(mask, reference_logprobs - policy_logprobs, 0.0)
    return torch.exp(difference) - difference - 1.0
