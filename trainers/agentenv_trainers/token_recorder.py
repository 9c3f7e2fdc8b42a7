"""Training's own numbers for each token of some episodes of a step, handed to whoever keeps them.

    trainer.token_recorder = TokenRecorder(run_directory_log, tokenizer, tokens_per_step=16_384)

Invariants:
- Recording changes nothing that is trained; the trainers compute nothing for it, and without a recorder do nothing.
- A step's episodes are whole, and the first of its batch, whatever the number of processes: as trajectories.jsonl
  keeps the first, too. What is not trained (failed or dropped) is left out.
- Each process reads its share; the main one gathers them and alone hands them on, as it alone has the run directory.
- The numbers are those of a batch's first update: what later updates on it (``policy_updates``) see is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from agentenv.report.token_records import EpisodeTokens, SegmentTokens
from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import TrajectoryBatch, Truncation, reason_to_drop
from agentenv_trainers.processes import Processes, from_main
from agentenv_trainers.token_texts import TokenTexts


@dataclass
class _Step:
    """The batch being recorded: this process's episodes and, flat as in the batch, what was computed so far."""

    number: int
    batch: TrajectoryBatch
    chosen: list[tuple[int, int, str]]
    """Place among the episodes of all processes, place in the batch, and id."""
    flat: dict[str, Tensor] = field(default_factory=dict)


class TokenRecorder:
    """Gathers the numbers of a step and hands them on when it ends.

    Args:
        keep: called on the main process with the episodes of a step; returns whether it wants more.
        tokenizer: decodes the tokens.
        tokens_per_step: most tokens of a step, prompts included; one episode is kept even if it has more.
        episodes_per_step: most episodes of a step; None: no limit.
    """

    def __init__(
        self,
        keep: Callable[[Sequence[EpisodeTokens]], bool],
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokens_per_step: int,
        episodes_per_step: int | None = None,
    ) -> None:
        self._keep, self._texts = keep, TokenTexts(tokenizer)
        self._tokens_per_step, self._episodes_per_step = tokens_per_step, episodes_per_step
        self._wanted = tokens_per_step > 0 and episodes_per_step != 0
        self._step: _Step | None = None

    def begin(
        self,
        step: int,
        batch: TrajectoryBatch,
        everything: Sequence[Trajectory],
        share: Sequence[int],
        truncation: Truncation,
    ) -> None:
        """A batch has come.

        Args:
            step: training step that is about to use it, from 1.
            batch: this process's episodes.
            everything: the trajectories of all processes.
            share: which of them this process has.
            truncation: what becomes of episodes that were cut off.
        """
        if not self._wanted:
            return
        first = self._first(everything, truncation)
        chosen = [
            (share[source], index, everything[share[source]].episode_id)
            for index, source in enumerate(batch.sources.tolist())
            if share[source] in first
        ]
        self._step = _Step(step, batch, chosen)

    def set_values(self, values: Tensor) -> None:
        """The critic's values that advantages are computed from, [M] as in the batch."""
        if self._step is not None:
            self._step.flat["values"] = values

    def add(self, token_index: Tensor, **numbers: Tensor) -> None:
        """What a forward pass computed.

        Args:
            token_index: [n] places of its trained tokens in the flat order of the batch.
            numbers: [n] each, by their names in ``SegmentTokens``.
        """
        if self._step is None:
            return
        for name, values in numbers.items():
            flat = self._step.flat.get(name)
            if flat is None:
                flat = values.new_full((self._step.batch.num_tokens,), torch.nan, dtype=torch.float32)
                self._step.flat[name] = flat
            flat[token_index] = values.float()

    def finish(self, processes: Processes) -> None:
        """The step has ended; called on all processes."""
        step, self._step = self._step, None
        if step is None:
            return
        episodes = _Reader(step, self._texts).episodes()
        if processes.num_processes > 1:
            episodes = gather_object(episodes)
        in_order = [episode for _, episode in sorted(episodes, key=lambda item: item[0])]
        self._wanted = from_main(processes, lambda: self._keep(in_order))

    def _first(self, everything: Sequence[Trajectory], truncation: Truncation) -> set[int]:
        """Places of the episodes to record."""
        first: set[int] = set()
        room = self._tokens_per_step
        for place, trajectory in enumerate(everything[: self._episodes_per_step]):
            if reason_to_drop(trajectory, truncation) is not None:
                continue
            room -= sum(len(part.prompt_ids) + len(part.completion_ids) for part in trajectory.split())
            if room < 0 and first:
                break
            first.add(place)
        return first


class _Reader:
    """The flat numbers of a step as lists over the tokens of each episode."""

    def __init__(self, step: _Step, texts: TokenTexts) -> None:
        batch = step.batch
        self._step, self._texts = step, texts
        self._actions = batch.action_mask.cpu().numpy()
        self._valued = batch.value_mask.cpu().numpy()
        self._lengths, self._last_rows = batch.lengths.tolist(), batch.last_rows.tolist()
        # Rows of a batch are in the order of the flat numbers.
        self._token_starts = _starts(self._actions)
        self._value_starts = _starts(self._valued)
        flat = {
            "rollout_logprobs": batch.rollout_logprobs,
            "policy_versions": batch.policy_versions,
            **step.flat,
        }
        self._flat = {name: values.detach().cpu().numpy() for name, values in flat.items()}

    def episodes(self) -> list[tuple[int, EpisodeTokens]]:
        """Each with its place among the episodes of all processes."""
        found = []
        for place, index, episode_id in self._step.chosen:
            first = self._last_rows[index - 1] + 1 if index else 0
            segments = [self._segment(row) for row in range(first, self._last_rows[index] + 1)]
            found.append((place, EpisodeTokens(episode_id, self._step.number, segments)))
        return found

    def _segment(self, row: int) -> SegmentTokens:
        length = self._lengths[row]
        ids = self._step.batch.input_ids[row, :length].tolist()
        versions = self._column("policy_versions", row, length)
        return SegmentTokens(
            token_ids=ids,
            texts=self._texts(ids),
            action_mask=self._actions[row, :length].tolist(),
            policy_versions=[-1 if version is None else int(version) for version in versions],
            rollout_logprobs=self._column("rollout_logprobs", row, length),
            policy_logprobs=self._column("policy_logprobs", row, length),
            values=self._column("values", row, length),
            advantages=self._column("advantages", row, length),
            kept=[None if kept is None else bool(kept) for kept in self._column("kept", row, length)],
        )

    def _column(self, name: str, row: int, length: int) -> list[float | None]:
        """One number for each token of a row, None where there is none or it is not finite."""
        mask, starts = (
            (self._valued, self._value_starts) if name == "values" else (self._actions, self._token_starts)
        )
        column = np.full(length, np.nan)
        if name in self._flat:
            here = mask[row, :length]
            column[here] = self._flat[name][starts[row] : starts[row] + int(here.sum())]
        return [
            value if finite else None
            for value, finite in zip(column.tolist(), np.isfinite(column), strict=True)
        ]


def _starts(mask: np.ndarray[Any, Any]) -> list[int]:
    """Where the true entries of each row begin, read row by row."""
    counts = mask.sum(axis=1)
    starts: list[int] = (counts.cumsum() - counts).tolist()
    return starts
