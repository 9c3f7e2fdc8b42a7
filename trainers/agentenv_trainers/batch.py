"""Trajectories as tensors.

Invariants:

* A row is one unbroken token sequence, prompt and completion without a gap, padded on the right only: under a
  causal mask no token sees the padding, and no position is wasted between prompt and completion.
* Rows lie in the order of their episodes and the segments of an episode in the order of time, so the action
  tokens of an episode, read row by row, are in the order in which the policy wrote them. ``pad_episodes``
  relies on it.
* The reward of an episode belongs to its last action token, also where observation tokens follow.
* The critic is read and trained at the M value tokens. They are the action tokens; only for the ablation without
  skip-observation GAE they are all tokens from the first action to the last.
* What is not trained (failed, dropped or without action tokens) is not in the batch at all; it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from agentenv.trajectory import Trajectory

Truncation = Literal["bootstrap", "zero", "drop"]
"""Episodes that were cut off: the critic's value follows their end; nothing follows; they are not trained."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, trimmed to the longest of them."""

    rows: Tensor
    """[b] indices into the batch."""
    input_ids: Tensor
    """[b, t]."""
    attention_mask: Tensor
    """[b, t] bool, true on real tokens."""
    action_mask: Tensor
    """[b, t] bool, true on trained tokens; column 0 is never one."""
    is_filler: bool
    """True for a part that no row was left for: it holds a stub without trained tokens."""
    token_index: Tensor
    """[n] where the trained tokens, read row by row, lie in the flat order of the batch."""
    value_mask: Tensor
    """[b, t] bool, true where the critic is read and trained; column 0 is never one."""
    value_index: Tensor
    """[m] where the value tokens, read row by row, lie in the flat order of the batch."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """R rows of E episodes with N trained tokens and M value tokens in all (M = N but for an ablation)."""

    input_ids: Tensor
    """[R, T] right-padded."""
    lengths: Tensor
    """[R] real tokens of each row."""
    action_mask: Tensor
    """[R, T] bool, true where the policy sampled the token."""
    rollout_logprobs: Tensor
    """[N] float32 log-probs the engine reported, flat."""
    policy_versions: Tensor
    """[N] version of the weights that sampled each token, flat."""
    token_counts: Tensor
    """[E] trained tokens of each episode, all at least 1."""
    last_rows: Tensor
    """[E] row that holds the end of each episode."""
    rewards: Tensor
    """[E] float32."""
    truncated: Tensor
    """[E] bool: cut off, and its end is to be bootstrapped."""
    value_mask: Tensor
    """[R, T] bool, true where the critic is read and trained."""
    value_counts: Tensor
    """[E] value tokens of each episode."""
    value_is_action: Tensor
    """[M] bool, flat: which value tokens are trained tokens of the policy."""
    step_ids: Tensor
    """[M] number of the action within its episode that each value token belongs to, flat."""
    sources: Tensor
    """[E] place of each episode in the list that the batch was made from."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Trajectories left out, by reason."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.input_ids.size(0)

    @property
    def num_tokens(self) -> int:
        """N, the trained tokens."""
        return self.rollout_logprobs.numel()

    @property
    def num_values(self) -> int:
        """M, the value tokens."""
        return self.step_ids.numel()

    def micro_batches(self, count: int) -> list[MicroBatch]:
        """The rows in ``count`` parts of near-equal size, longest rows first, so that little of a part is
        padding.

        With fewer rows than parts the last parts are empty of trained tokens: they hold one short row, so
        that every part can go through a forward and a backward pass.
        """
        order = torch.argsort(self.lengths, descending=True, stable=True)
        parts = []
        for rows in torch.tensor_split(order, count):
            is_empty = rows.numel() == 0
            if is_empty:
                rows = order[-1:]
            width = 2 if is_empty else int(self.lengths[rows].max())
            columns = torch.arange(width, device=self.input_ids.device)
            mask, index = _part_of(self.action_mask, rows, width, is_empty)
            value_mask, value_index = _part_of(self.value_mask, rows, width, is_empty)
            parts.append(
                MicroBatch(
                    rows=rows,
                    is_filler=is_empty,
                    input_ids=self.input_ids[rows, :width],
                    attention_mask=columns < self.lengths[rows].unsqueeze(1),
                    action_mask=mask,
                    token_index=index,
                    value_mask=value_mask,
                    value_index=value_index,
                )
            )
        return parts

    def pad_episodes(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """[M] numbers of the value tokens as [E, L] per episode, and the [E, L] mask of the real ones."""
        width = int(self.value_counts.max()) if self.value_counts.numel() else 0
        mask = torch.arange(width, device=flat.device) < self.value_counts.unsqueeze(1)
        return flat.new_zeros(mask.shape).masked_scatter(mask, flat), mask

    def spread(self, flat: Tensor) -> Tensor:
        """[N] values of the trained tokens as [R, T], zero elsewhere."""
        return flat.new_zeros(self.action_mask.shape).masked_scatter(self.action_mask, flat)


def collate(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    truncation: Truncation,
    skip_observations: bool = True,
    device: torch.device | str = "cpu",
) -> TrajectoryBatch:
    """Build a batch.

    Args:
        trajectories: finished episodes; one that forked contributes one row per segment and counts as one
            episode.
        pad_token_id: filler of the right padding.
        truncation: what becomes of episodes that were cut off.
        skip_observations: whether the value tokens are the action tokens alone.
        device: where the tensors live.

    Raises:
        ValueError: lists of a trajectory differ in length, its prompt is empty, the reward of one that is trained is
            not finite, or none was given.
    """
    if not trajectories:
        raise ValueError("no trajectories to build a batch from")
    dropped: dict[str, int] = {}
    episodes: list[list[Trajectory]] = []
    sources: list[int] = []
    for place, trajectory in enumerate(trajectories):
        _check_lengths(trajectory)
        reason = reason_to_drop(trajectory, truncation)
        if reason is None:
            if not math.isfinite(trajectory.reward):
                raise ValueError(
                    f"trajectory {trajectory.episode_id!r}: reward is {trajectory.reward}, must be finite"
                )
            episodes.append(trajectory.split())
            sources.append(place)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    rows = [segment for segments in episodes for segment in segments]
    if not rows:
        rows = [_stub(trajectories[0], pad_token_id)]
    width = max(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
    ids = [row.prompt_ids + row.completion_ids for row in rows]
    masks = [[False] * len(row.prompt_ids) + list(row.action_mask) for row in rows]
    padded_masks = [x + [False] * (width - len(x)) for x in masks]
    action_mask = torch.tensor(padded_masks, dtype=torch.bool, device=device)
    value_mask = action_mask if skip_observations else _first_to_last(action_mask)
    counts = [len(segments) for segments in episodes]

    def per_episode(mask: Tensor) -> Tensor:
        parts = mask.sum(dim=1)[: sum(counts)].split(counts)
        return torch.tensor([int(part.sum()) for part in parts], dtype=torch.long, device=device)

    def flat(name: str, dtype: torch.dtype) -> Tensor:
        values = [
            v
            for row in rows
            for v, is_action in zip(getattr(row, name), row.action_mask, strict=True)
            if is_action
        ]
        return torch.tensor(values, dtype=dtype, device=device)

    return TrajectoryBatch(
        input_ids=torch.tensor([x + [pad_token_id] * (width - len(x)) for x in ids], device=device),
        lengths=torch.tensor([len(x) for x in ids], device=device),
        action_mask=action_mask,
        rollout_logprobs=flat("rollout_logprobs", torch.float32),
        policy_versions=flat("policy_versions", torch.long),
        token_counts=per_episode(action_mask),
        last_rows=torch.tensor(counts, dtype=torch.long, device=device).cumsum(0) - 1,
        rewards=torch.tensor([s[-1].reward for s in episodes], dtype=torch.float32, device=device),
        truncated=torch.tensor(
            [truncation == "bootstrap" and _is_cut_off(s[-1]) for s in episodes],
            dtype=torch.bool,
            device=device,
        ),
        value_mask=value_mask,
        value_counts=per_episode(value_mask),
        value_is_action=action_mask[value_mask],
        step_ids=_step_ids(action_mask, value_mask, counts),
        sources=torch.tensor(sources, dtype=torch.long, device=device),
        dropped=dropped,
    )


def _check_lengths(trajectory: Trajectory) -> None:
    """As ``Trajectory.validate``, but a log-prob may be anything: the objective masks and counts what is not finite."""
    for segment in trajectory.split():
        lengths = {
            name: len(getattr(segment, name))
            for name in ("completion_ids", "rollout_logprobs", "action_mask", "policy_versions")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"trajectory {trajectory.episode_id!r}: lengths differ: {lengths}")
        if not segment.prompt_ids:
            raise ValueError(
                f"trajectory {trajectory.episode_id!r} has an empty prompt: its first token has no context"
            )


def _is_cut_off(trajectory: Trajectory) -> bool:
    return trajectory.truncated and not trajectory.terminated


def reason_to_drop(trajectory: Trajectory, truncation: Truncation) -> str | None:
    """Why a trajectory is not trained on, or None."""
    if trajectory.failed:
        return "failed"
    if not trajectory.num_action_tokens:
        return "no_action_tokens"
    if truncation == "drop" and _is_cut_off(trajectory):
        return "truncated"
    return None


def _stub(trajectory: Trajectory, pad_token_id: int) -> Trajectory:
    """A row without trained tokens, for the batch of which nothing is trained."""
    return Trajectory(
        prompt_ids=trajectory.prompt_ids[:1],
        completion_ids=[pad_token_id],
        rollout_logprobs=[0.0],
        action_mask=[False],
        policy_versions=[-1],
    )


def _part_of(mask: Tensor, rows: Tensor, width: int, is_empty: bool) -> tuple[Tensor, Tensor]:
    """[b, width] of a batch's mask for some rows, and the places of its true entries in the batch's flat order."""
    offsets = mask.sum(dim=1).cumsum(0) - mask.sum(dim=1)
    part = mask[rows, :width]
    if is_empty:
        part = torch.zeros_like(part)
    places = offsets[rows].unsqueeze(1) + part.cumsum(dim=1) - 1
    return part, places[part]


def _first_to_last(mask: Tensor) -> Tensor:
    """[R, T] true from the first true entry of each row to its last."""
    return (mask.cumsum(dim=1) > 0) & (mask.flip(1).cumsum(dim=1).flip(1) > 0)


def _step_ids(action_mask: Tensor, value_mask: Tensor, rows_per_episode: Sequence[int]) -> Tensor:
    """[M] number of the action that each value token belongs to or, as an observation, follows.

    Observation tokens and segments part actions.
    """
    starts = action_mask & ~torch.nn.functional.pad(action_mask, (1, 0))[:, :-1]
    numbers = []
    for segments in starts[: sum(rows_per_episode)].split(list(rows_per_episode)):
        counted = segments.sum(dim=1)
        numbers.append(segments.cumsum(dim=1) + (counted.cumsum(0) - counted).unsqueeze(1) - 1)
    if not numbers:
        return torch.zeros(0, dtype=torch.long, device=action_mask.device)
    return torch.cat(numbers)[value_mask]
