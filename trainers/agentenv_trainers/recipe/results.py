"""Numbers of a run as JSON: the result of an evaluation, the versions of what computed it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from math import sqrt
from typing import Any

from agentenv.trajectory import Trajectory

_DISTRIBUTIONS = ("agentenv-rl", "torch", "transformers", "trl", "accelerate", "gymnasium", "docker")


def evaluation_result(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Success over the episodes that infrastructure did not end.

    Returns:
        success (share), its 95 % Wilson interval, mean reward and length, episodes counted, and the number of
        failed ones per reason: those say nothing about the policy and are in none of the other numbers.
    """
    valid = [item for item in trajectories if not item.failed]
    failed = Counter(item.end_reason or "unknown" for item in trajectories if item.failed)
    number = len(valid)
    solved = sum(item.success for item in valid)
    return {
        "success": solved / number if number else 0.0,
        "episodes": number,
        "interval": list(wilson_interval(solved, number)),
        "reward": sum(item.reward for item in valid) / number if number else 0.0,
        "action_tokens": sum(item.num_action_tokens for item in valid) / number if number else 0.0,
        "failed": dict(failed),
    }


def wilson_interval(successes: int, trials: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) without a trial.

    Args:
        successes: how many succeeded.
        trials: of how many.
        z: normal quantile; the default gives 95 %.
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def versions() -> dict[str, str]:
    """Versions of Python and of the distributions that a result depends on, as far as they are installed."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def settings(*sources: Any) -> dict[str, Any]:
    """Fields of dataclass instances as JSON-able values, without secrets."""
    result: dict[str, Any] = {}
    for source in sources:
        for item in fields(source):
            value = getattr(source, item.name)
            if not item.name.endswith("_token"):
                result[item.name] = value if _is_plain(value) else str(value)
    return result


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
