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
    if not targets.numel():
        return math.nan
    targets = targets.double()
    return explained_share((targets - predictions).var(correction=0).item(), targets.var(correction=0).item())


def explained_share(unexplained: float, total: float) -> float:
    """:func:`explained_variance` from the variances of what is left and of the targets."""
    return math.nan if total <= 1e-12 else 1.0 - unexplained / total
