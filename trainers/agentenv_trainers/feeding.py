"""What TRL's training loop is fed with in place of a dataset, a reward function and its own split of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from agentenv_trainers.batch import MicroBatch


def pass_counter(passes: int, rows: int) -> DataLoader[int]:
    """One element per forward pass of a run, each ``rows`` empty examples: the data come from the controller."""
    # A generator of its own: iterating must not draw from the global one, or resuming would shift it.
    return DataLoader(
        _Counter(passes), batch_size=1, collate_fn=lambda _: [{}] * rows, generator=torch.Generator()
    )


def unused_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL demands a reward function; ours come with the trajectories and this one is never called."""
    raise NotImplementedError("rewards come with the trajectories")


def select_rows(whole: Mapping[str, Any], part: MicroBatch) -> dict[str, Any]:
    """Rows of a batch under TRL's names, trimmed to the part's width, and the part's ``token_index``."""
    width = part.input_ids.size(1) - 1
    selected: dict[str, Any] = {"token_index": part.token_index}
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            selected[name] = value[part.rows] if value.size(1) == 1 else value[part.rows, :width]
        else:
            selected[name] = value
    if not part.token_index.numel():
        selected["tool_mask"] = torch.zeros_like(selected["tool_mask"])
    return selected


class _Counter(Dataset[int]):
    """0, 1, 2, ...: as long as the run, and empty of data."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index
