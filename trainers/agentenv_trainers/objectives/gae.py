"""Generalised advantage estimation over the tokens that the policy wrote, without a Python loop over tokens.

Invariants:

* Observation tokens do not exist for the recursion: the result equals plain GAE on the sequence with them cut
  out.
* Everything is computed in float64 (float32 where a device has none): at lambda 1 the advantage is a sum over
  the whole trajectory, and 32k tokens of float32 rounding would show.
* Cost: about 3 passes over the tokens plus one small matrix product per 32 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 32
"""Tokens per block of the scan. Within a block the recursion is one product with a triangular matrix."""


def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages over the tokens that the policy wrote.

    A(t) = delta(t) + gamma * lambda * A(t'), delta(t) = r(t) + gamma * V(t') - V(t), where t' is the next
    *action* token: the last token of one action is followed by the first token of the next.
    Source: SAO, arXiv 2607.07508, eqs. 4 and 5.

    Args:
        rewards: [B, T] reward after each token; read only where action_mask is true. The reward of an episode
            that ends in observation tokens belongs on its last action token.
        values: [B, T] critic estimates in units of reward; value of the state in which token t was chosen.
            Detached.
        action_mask: [B, T] bool, true where the policy sampled the token.
        gamma: discount per action token.
        gae_lambda: scalar or [B]; the length-adaptive form has one per trajectory.
        bootstrap_values: [B] value of the state after the last token, for trajectories that were cut off;
            None or 0: nothing follows.

    Returns:
        advantages, returns: [B, T] each, zero outside action_mask, in the dtype of values.

    Raises:
        ValueError: shapes differ, or a row has no action token.
    """
    if not rewards.shape == values.shape == action_mask.shape or values.dim() != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and action_mask "
            f"{tuple(action_mask.shape)} must have one shape [B, T]"
        )
    batch = values.size(0)
    mask = action_mask.bool()
    counts = mask.sum(dim=1)
    if batch == 0 or bool((counts == 0).any()):
        empty = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(f"action_mask has no action token in rows {empty} of {batch}")
    exact = exact_dtype(values.device)
    length = int(counts.max())
    # Position of every action token among the action tokens of its row; others go to one column that is cut
    # off.
    position = torch.where(mask, mask.cumsum(dim=1) - 1, length)

    def compact(tensor: Tensor) -> Tensor:
        wide = torch.zeros(batch, length + 1, dtype=exact, device=values.device)
        return wide.scatter_(1, position, tensor.detach().to(exact))[:, :length]

    dense_rewards, dense_values = compact(rewards), compact(values)
    last = (counts - 1).unsqueeze(1)
    next_values = torch.zeros_like(dense_values)
    next_values[:, :-1] = dense_values[:, 1:]
    if bootstrap_values is not None:
        if bootstrap_values.shape != (batch,):
            raise ValueError(
                f"bootstrap_values has shape {tuple(bootstrap_values.shape)}, must be ({batch},)"
            )
        next_values.scatter_(1, last, bootstrap_values.detach().to(exact).unsqueeze(1))
    real = torch.arange(length, device=values.device) <= last
    deltas = torch.where(real, dense_rewards + gamma * next_values - dense_values, 0.0)
    decay = gamma * torch.as_tensor(gae_lambda, dtype=exact, device=values.device)
    if decay.dim() > 1 or (decay.dim() == 1 and decay.size(0) != batch):
        raise ValueError(f"gae_lambda has shape {tuple(decay.shape)}, must be a scalar or ({batch},)")
    dense_advantages = discounted_suffix_sums(deltas, decay.expand(batch))
    sources = position.clamp(max=length - 1)
    advantages = torch.where(mask, dense_advantages.gather(1, sources), 0.0)
    returns = torch.where(mask, (dense_advantages + dense_values).gather(1, sources), 0.0)
    return advantages.to(values.dtype), returns.to(values.dtype)


def discounted_suffix_sums(terms: Tensor, decay: Tensor) -> Tensor:
    """y[t] = terms[t] + decay * y[t + 1] along the last dimension, as a blockwise scan.

    Blocks of 32 are solved by one triangular product each; the sums that enter them from the right are the
    same recursion over the blocks, with decay ** 32.

    Args:
        terms: [B, N] floating point.
        decay: [B] in [0, 1], one factor per row.

    Returns:
        [B, N].
    """
    batch, length = terms.shape
    blocks = -(-length // _BLOCK)
    padded = torch.nn.functional.pad(terms, (0, blocks * _BLOCK - length)).view(batch, blocks, _BLOCK)
    steps = torch.arange(_BLOCK, device=terms.device)
    # [i, j]: how far term i lies ahead of result j. Negative ones do not contribute.
    ahead = steps.unsqueeze(1) - steps.unsqueeze(0)
    factors = torch.where(ahead >= 0, decay.view(-1, 1, 1) ** ahead.clamp(min=0), 0.0)
    sums = torch.bmm(padded, factors)
    if blocks > 1:
        heads = discounted_suffix_sums(sums[:, :, 0], decay**_BLOCK)
        entering = torch.nn.functional.pad(heads[:, 1:], (0, 1)).unsqueeze(-1)
        sums = sums + entering * (decay.view(-1, 1) ** (_BLOCK - steps)).unsqueeze(1)
    return sums.view(batch, blocks * _BLOCK)[:, :length]


def length_adaptive_lambda(num_action_tokens: Tensor, *, alpha: float) -> Tensor:
    """lambda_policy = 1 - 1 / (alpha * l), clamped to [0, 1].

    Source: VAPO, arXiv 2504.05118, "length-adaptive GAE"; SAO uses alpha 1.5. The clamp is ours: l = 1 and an
    alpha below 1 would give a negative lambda.

    Args:
        num_action_tokens: [B] l, the trained tokens (or steps) of each trajectory.
        alpha: > 0. With 1.5 a reward at the end reaches the first token with weight exp(-1 / 1.5) = 0.51 at
            any length.

    Returns:
        [B] in [0, 1].

    Raises:
        ValueError: alpha is not positive.
    """
    if not alpha > 0.0:
        raise ValueError(f"alpha is {alpha}, must be positive")
    lengths = num_action_tokens.to(exact_dtype(num_action_tokens.device)).clamp(min=1.0)
    return (1.0 - 1.0 / (alpha * lengths)).clamp(0.0, 1.0)


def exact_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none: what sums over a whole trajectory or batch are computed in."""
    return torch.float32 if device.type == "mps" else torch.float64
