"""Generalised advantage estimation over the tokens that the policy wrote, without a Python loop over tokens.

Invariants:

* Observation tokens do not exist for the recursion: the result equals plain GAE on the sequence with them cut
  out.
* Everything is computed in float64 (float32 where a device has none): at lambda 1 the advantage is a sum over
  the whole trajectory, and 32k tokens of float32 rounding would show.
* Cost: about ten passes over the tokens and one more for each doubling of the longest row. A CPU takes one row at a
  time: what lies between the passes stays in the cache, and is too small for torch to share it out among threads, which
  on a busy machine wait for each other longer than they work. Other devices take all rows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


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
    counts = mask.count_nonzero(dim=1)
    if batch == 0 or bool((counts == 0).any()):
        empty = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(f"action_mask has no action token in rows {empty} of {batch}")
    if bootstrap_values is not None and bootstrap_values.shape != (batch,):
        raise ValueError(f"bootstrap_values has shape {tuple(bootstrap_values.shape)}, must be ({batch},)")
    exact = exact_dtype(values.device)
    decay = gamma * torch.as_tensor(gae_lambda, dtype=exact, device=values.device).detach()
    if decay.dim() > 1 or (decay.dim() == 1 and decay.size(0) != batch):
        raise ValueError(f"gae_lambda has shape {tuple(decay.shape)}, must be a scalar or ({batch},)")
    decay = decay.expand(batch)
    advantages = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    returns = torch.zeros_like(advantages)
    flat_rewards, flat_values = rewards.detach().reshape(-1), values.detach().reshape(-1)
    lengths = counts.tolist()
    # Where the action tokens stand. Cut out by these they lie side by side, and observations are gone.
    places = mask.reshape(-1).nonzero().squeeze(1).split(lengths)
    step = 1 if values.device.type == "cpu" else batch
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        chunk_places = torch.cat(places[rows])
        chunk_values = flat_values.index_select(0, chunk_places).to(exact)
        next_values = chunk_values.roll(-1)
        next_values[counts[rows].cumsum(0) - 1] = (
            0.0 if bootstrap_values is None else bootstrap_values[rows].detach().to(exact)
        )
        deltas = flat_rewards.index_select(0, chunk_places).to(exact)
        deltas.add_(next_values, alpha=gamma).sub_(chunk_values)
        sums = discounted_suffix_sums(
            pad_sequence(deltas.split(lengths[rows]), batch_first=True), decay[rows]
        )
        chunk = torch.cat([row[:length] for row, length in zip(sums, lengths[rows], strict=True)])
        advantages.view(-1).scatter_(0, chunk_places, chunk.to(values.dtype))
        returns.view(-1).scatter_(0, chunk_places, chunk.add_(chunk_values).to(values.dtype))
    return advantages, returns


def discounted_suffix_sums(terms: Tensor, decay: Tensor) -> Tensor:
    """y[t] = terms[t] + decay * y[t + 1] along the last dimension, by doubling.

    After step k each result is the sum of 2 ** k terms; the next step adds the result 2 ** k places further, times
    decay ** (2 ** k). Sums are in pairs, so rounding grows with log N only.

    Args:
        terms: [B, N] floating point.
        decay: [B] in [0, 1], one factor per row.

    Returns:
        [B, N].
    """
    length = terms.size(1)
    sums, factor, distance = terms.clone(), decay.unsqueeze(1), 1
    while distance < length:
        sums[:, :-distance] += factor * sums[:, distance:]
        factor, distance = factor * factor, 2 * distance
    return sums


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
