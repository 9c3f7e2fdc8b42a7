"""The importance ratio as a difference of log-probs, and the check of its bounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_ratio(above: Tensor, below: Tensor, name_above: str, name_below: str) -> tuple[Tensor, Tensor]:
    """above - below, detached, 0 where one of them is not finite; and where both are.

    Raises:
        ValueError: shapes differ; the message has the two names.
    """
    if above.shape != below.shape:
        raise ValueError(
            f"{name_above} has shape {tuple(above.shape)}, {name_below} {tuple(below.shape)}: they must be equal"
        )
    finite = torch.isfinite(above) & torch.isfinite(below)
    return torch.where(finite, above.detach() - below.detach(), 0.0), finite


def log_bounds(clip_low: float, clip_high: float) -> tuple[float, float]:
    """log(1 - clip_low), -inf at 1, and log(1 + clip_high).

    Raises:
        ValueError: clip_low is not in [0, 1], or clip_high not positive and finite.
    """
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}, must be in [0, 1]")
    if not (clip_high > 0.0 and math.isfinite(clip_high)):
        raise ValueError(f"clip_high is {clip_high}, must be positive and finite")
    return math.log1p(-clip_low) if clip_low < 1.0 else -math.inf, math.log1p(clip_high)
