"""How many redundant environments a batch needs so that it seldom waits for one that fails slow.

Of the episodes a share p takes far longer than the others, independently of each other. A group of n members with m
spare ones is whole without a slow one where at most m of its n + m are slow; a batch of g groups with r spare ones
where at most r of its g + r groups are not. Both are binomial.

Where slowness goes by group instead (one host, one hard task), spare groups help and spare members do not:
``agentenv simulate fig10`` has both. Source: ROLL Flash, arXiv 2510.11345, section 4.4 (redundant environments).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentenv.errors import UsageError

__all__ = ["Redundancy", "least_redundancy", "ready_share"]

_MOST = 4
"""Times the batch, the most redundancy that is looked at."""


@dataclass(frozen=True)
class Redundancy:
    """Episodes in flight beyond a batch."""

    groups: int
    """``redundant_groups``."""
    members: int
    """``redundant_members``."""
    ready_share: float
    """Share of the batches that are full without a slow episode."""
    cost: float
    """Episodes started over those that a batch takes; the surplus is cancelled when the batch is full."""


def ready_share(
    *, groups: int, size: int, slow_share: float, redundant_groups: int = 0, redundant_members: int = 0
) -> float:
    """Share of the batches that are full without a slow episode.

    Args:
        groups: of a batch.
        size: members that make a group whole.
        slow_share: of the episodes, in [0, 1].
        redundant_groups, redundant_members: beyond these.
    """
    whole = _at_most(redundant_members, size + redundant_members, slow_share)
    return _at_most(redundant_groups, groups + redundant_groups, 1.0 - whole)


def least_redundancy(*, batch: int, size: int, slow_share: float, wanted: float = 0.95) -> Redundancy:
    """The layout of fewest episodes in which at least ``wanted`` of the batches need no slow episode.

    Args:
        batch: episodes that a step takes.
        size: of a group; spare members are for groups of two or more.
        slow_share: of the episodes, in [0, 1).
        wanted: in (0, 1).

    Raises:
        UsageError: a value is out of range, or four times the batch would not do.
    """
    if not 1 <= size <= batch or batch % size:
        raise UsageError(f"--group-size is {size}, must divide --batch, which is {batch}")
    if not 0.0 <= slow_share < 1.0:
        raise UsageError(f"--slow-share is {slow_share}, must be at least 0 and below 1")
    groups = batch // size
    best: Redundancy | None = None
    for members in range(3 * size + 1 if size > 1 else 1):
        for spare in range(3 * groups + 1):
            started = (groups + spare) * (size + members)
            if started > min(_MOST * batch, math.inf if best is None else best.cost * batch - 1):
                break
            share = ready_share(
                groups=groups,
                size=size,
                slow_share=slow_share,
                redundant_groups=spare,
                redundant_members=members,
            )
            if share >= wanted:
                best = Redundancy(spare, members, share, started / batch)
                break
    if best is None:
        raise UsageError(
            f"--slow-share is {slow_share}: not even {_MOST} times the batch is full without a slow episode in "
            f"{wanted:.0%} of the steps; mend the environment, or lower its deadlines"
        )
    return best


def _at_most(most: int, number: int, share: float) -> float:
    """Probability that at most so many of a number of independent events happen."""
    if share <= 0.0:
        return 1.0
    if share >= 1.0:
        return float(most >= number)
    logs = (
        math.lgamma(number + 1)
        - math.lgamma(count + 1)
        - math.lgamma(number - count + 1)
        + count * math.log(share)
        + (number - count) * math.log1p(-share)
        for count in range(min(most, number) + 1)
    )
    return min(1.0, math.fsum(math.exp(value) for value in logs))
