"""Success over a list of trajectories, with its interval, as a whole and by family of task.

Invariant: an episode that infrastructure ended is neither a success nor a failure of the policy: it is left out of the
rate and counted beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from agentenv.trajectory import Trajectory

__all__ = ["SuccessRate", "by_family", "success_rate", "wilson_interval"]

_NO_FAMILY = "other"


@dataclass(frozen=True)
class SuccessRate:
    """Share of solved episodes."""

    successes: int
    episodes: int
    """Episodes that count: those that infrastructure ended are not among them."""
    failed: int
    """Episodes that infrastructure ended."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    confidence: float
    """Level of the interval."""

    @property
    def rate(self) -> float:
        """successes / episodes; NaN without episodes."""
        return self.successes / self.episodes if self.episodes else math.nan

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.rate:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.successes}/{self.episodes}{failed})"


def wilson_interval(successes: int, episodes: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a binomial share.

    Unlike the normal approximation it stays within [0, 1] and is usable for few episodes and shares near 0 or 1.
    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).

    Args:
        successes: between 0 and ``episodes``.
        episodes: 0 gives (0, 1): nothing is known.
        confidence: level, in (0, 1).

    Raises:
        ValueError: a value is outside its range.
    """
    if not 0 <= successes <= episodes:
        raise ValueError(f"successes is {successes}, must be between 0 and episodes = {episodes}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}, must be in (0, 1)")
    if episodes == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    share = successes / episodes
    scale = 1.0 + z * z / episodes
    centre = (share + z * z / (2 * episodes)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / episodes + z * z / (4 * episodes * episodes))
    # At the ends the formula gives 0 and 1 up to rounding.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == episodes else centre + half
    return low, high


def success_rate(trajectories: Iterable[Trajectory], *, confidence: float = 0.95) -> SuccessRate:
    """Success over all trajectories (``Trajectory.success``).

    Raises:
        ValueError: ``confidence`` is outside (0, 1).
    """
    successes = episodes = failed = 0
    for trajectory in trajectories:
        if trajectory.failed:
            failed += 1
        else:
            episodes += 1
            successes += trajectory.success
    low, high = wilson_interval(successes, episodes, confidence=confidence)
    return SuccessRate(successes, episodes, failed, low, high, confidence)


def by_family(trajectories: Iterable[Trajectory], *, confidence: float = 0.95) -> dict[str, SuccessRate]:
    """Success by ``info["family"]``, in alphabetical order; trajectories without one are under "other".

    Raises:
        ValueError: ``confidence`` is outside (0, 1).
    """
    families: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        families.setdefault(str(trajectory.info.get("family", _NO_FAMILY)), []).append(trajectory)
    return {name: success_rate(families[name], confidence=confidence) for name in sorted(families)}
