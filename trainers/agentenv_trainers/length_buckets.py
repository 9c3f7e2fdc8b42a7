"""Rows of unequal length in several forward passes, so that short ones don't pay for the longest.

Invariants:

* Buckets are neighbours in length; together they hold every row once.
* The padded tokens and the fixed cost of each pass are together as small as they can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PASS_COST = {"cpu": 128, "cuda": 512}
"""Fixed cost of a forward and backward pass, in tokens. On one CPU core it is about 170 for a model of 0.1 million
parameters and 80 for one of 0.5 million; on a GPU, where it was not measured, launches make it larger."""


def length_buckets(lengths: Tensor, pass_cost: int | None = None) -> list[Tensor]:
    """Rows of each pass.

    Args:
        lengths: [R] real tokens of each row, R at least 1.
        pass_cost: what one more pass costs, in padded tokens; by default that of the device of ``lengths``.

    Returns:
        Index tensors into the rows, longest first.
    """
    if pass_cost is None:
        pass_cost = _PASS_COST.get(lengths.device.type, _PASS_COST["cuda"])
    order = torch.argsort(lengths, descending=True, stable=True)
    widths = lengths[order].cpu().numpy().astype(np.int64)
    count = widths.size
    # best[i]: least cost of the first i rows; the bucket that ends before i starts at start[i].
    best, start = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    begins = np.arange(count)
    for end in range(1, count + 1):
        costs = best[:end] + (end - begins[:end]) * widths[:end] + pass_cost
        start[end] = costs.argmin()
        best[end] = costs[start[end]]
    buckets: list[Tensor] = []
    end = count
    while end > 0:
        buckets.append(order[start[end] : end])
        end = int(start[end])
    return buckets[::-1]


def join_buckets(buckets: Sequence[Tensor], parts: Sequence[Tensor], width: int) -> Tensor:
    """The parts of :func:`length_buckets`, each [b, w], as [R, width] in the order of the rows, 0 beyond each part."""
    wide = torch.cat([torch.nn.functional.pad(part, (0, width - part.size(1))) for part in parts])
    return wide[torch.argsort(torch.cat(list(buckets)))]
