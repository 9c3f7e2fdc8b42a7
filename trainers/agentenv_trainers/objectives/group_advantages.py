"""Advantages of GRPO: each reward against the other members of its group.

Invariants:

* A member that is absent (its episode failed for reasons of the infrastructure) is no reward of 0: it enters neither
  mean nor standard deviation, and gets advantage 0.
* A group with fewer than two members present trains nothing, for there is nothing to compare with.
* In full groups the result is that of TRL's GRPOTrainer.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from agentenv_trainers.objectives.gae import exact_dtype

AdvantageScale = Literal["group", "batch", "none"]
"""What a deviation from the group's mean is divided by: the group's own standard deviation, that of the whole batch, or
nothing."""

EPSILON = 1e-4
"""Added to the standard deviation, in units of reward; TRL's value."""


class _Groups(NamedTuple):
    """Rewards by group, in the accurate dtype."""

    rewards: Tensor
    """[B], 0 where absent."""
    places: Tensor
    """[B] number of each member's group, 0 to G - 1."""
    counts: Tensor
    """[G] members present."""
    trained: Tensor
    """[B] bool: present, with another of the group."""


def group_advantages(
    rewards: Tensor, group_ids: Tensor, present: Tensor, *, scale: AdvantageScale = "group"
) -> Tensor:
    """Group-relative advantages (R - mean) / (std + 1e-4), one per episode.

    Mean and standard deviation are over the present members of a group; the standard deviation has Bessel's correction,
    n - 1. Rewards [1, 0, 0, 1] of one group have mean 0.5 and standard deviation sqrt(1 / 3): advantages of about
    plus and minus 0.866. Members that are all equal have exactly 0.
    Source: GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision); "none" is Dr. GRPO, arXiv 2503.20783; "batch"
    is arXiv 2508.08221. TRL's ``scale_rewards`` has the same three.

    Args:
        rewards: [B] floating point, reward of each episode; read only where present.
        group_ids: [B] integers, equal for the episodes of one group, in any order.
        present: [B] bool, false where the episode failed and has no reward.
        scale: "group" divides by the standard deviation of the group, "batch" by that over all members that train,
            "none" does not divide.

    Returns:
        [B] in the dtype of rewards; 0 for absent members and where fewer than two of a group are present.

    Raises:
        ValueError: unknown scale, shapes or kinds of tensors that do not fit, or the reward of a present member is
            not finite.
    """
    if scale not in get_args(AdvantageScale):
        raise ValueError(f"scale is {scale!r}, must be one of 'group', 'batch', 'none'")
    groups = _by_group(rewards, group_ids, present)
    deviations = _deviations(groups)
    if scale == "group":
        squares = torch.zeros_like(groups.counts).scatter_add(0, groups.places, deviations.square())
        advantages = deviations / (
            (squares / (groups.counts - 1.0).clamp(min=1.0)).sqrt()[groups.places] + EPSILON
        )
    elif scale == "batch":
        members = groups.rewards[groups.trained]
        std = members.std(correction=1) if members.numel() else members.new_zeros(())
        advantages = deviations / (std + EPSILON)
    else:
        advantages = deviations
    return advantages.to(rewards.dtype)


def zero_variance_share(rewards: Tensor, group_ids: Tensor, present: Tensor) -> float:
    """Share, in [0, 1], of the groups with two or more members present in which all rewards are equal.

    Such groups train nothing: every advantage is 0. Arguments and errors are those of :func:`group_advantages`.

    Returns:
        NaN where no group has two members present.
    """
    groups = _by_group(rewards, group_ids, present)
    compared = groups.counts >= 2
    if not bool(compared.any()):
        return math.nan
    return float(_all_equal(groups)[compared].double().mean())


def _by_group(rewards: Tensor, group_ids: Tensor, present: Tensor) -> _Groups:
    if not rewards.shape == group_ids.shape == present.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)} and present {tuple(present.shape)} "
            "must have one shape [B]"
        )
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are {rewards.dtype}, must be floating point")
    if group_ids.is_floating_point() or group_ids.is_complex():
        raise ValueError(f"group_ids are {group_ids.dtype}, must be integers")
    if present.dtype != torch.bool:
        raise ValueError(f"present is {present.dtype}, must be bool")
    broken = (present & ~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"rewards of present members must be finite, are {rewards[broken].tolist()} in rows {broken}"
        )
    exact = exact_dtype(rewards.device)
    known = torch.where(present, rewards.detach().to(exact), 0.0)
    ids, index = torch.unique(group_ids, return_inverse=True)
    counts = torch.zeros(ids.numel(), dtype=exact, device=rewards.device).scatter_add(
        0, index, present.to(exact)
    )
    return _Groups(known, index, counts, present & (counts[index] >= 2))


def _deviations(groups: _Groups) -> Tensor:
    """[B] rewards minus the mean of their group, 0 where nothing is trained."""
    sums = torch.zeros_like(groups.counts).scatter_add(0, groups.places, groups.rewards)
    means = (sums / groups.counts.clamp(min=1.0))[groups.places]
    # The mean of equal numbers may differ from them in the last bit; that is no signal.
    signal = groups.trained & ~_all_equal(groups)[groups.places]
    return torch.where(signal, groups.rewards - means, 0.0)


def _all_equal(groups: _Groups) -> Tensor:
    """[G] bool: no two members that train differ; true of groups without any."""
    index, rewards = groups.places[groups.trained], groups.rewards[groups.trained]
    empty = torch.zeros_like(groups.counts)
    largest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return largest == empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
