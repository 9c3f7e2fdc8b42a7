"""Numbers that say how well the critic predicts."""

from __future__ import annotations

import math

from torch import Tensor


def explained_variance(predictions: Tensor, targets: Tensor) -> float:
    """1 - Var(targets - predictions) / Var(targets): 1 is perfect, 0 no better than a constant, below 0
    worse.

    Args:
        predictions: [N] values.
        targets: [N] returns.

    Returns:
        NaN where the targets do not vary (all episodes of a batch had one result): the number has no meaning
        then.
    """
    variance = float(targets.double().var(correction=0)) if targets.numel() else 0.0
    if variance <= 1e-12:
        return math.nan
    return 1.0 - float((targets.double() - predictions.double()).var(correction=0)) / variance
