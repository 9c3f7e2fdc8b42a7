"""Numbers of a run as JSON: the result of an evaluation, the versions of what computed it."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from agentenv.evaluation import by_family, success_rate
from agentenv.trajectory import Trajectory
from agentenv_trainers.recipe.arguments import Parsed

_DISTRIBUTIONS = ("agentenv-rl", "torch", "transformers", "trl", "accelerate", "gymnasium", "docker")


def evaluation_result(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Success over the episodes that infrastructure did not end.

    Returns:
        success (share), episodes counted, its 95 % interval, mean reward, mean tokens written, success by family,
        and failed episodes by reason: those say nothing about the policy and are in none of the other numbers.
    """
    rate = success_rate(trajectories)
    valid = [item for item in trajectories if not item.failed]
    number = max(1, len(valid))
    return {
        "success": rate.rate if valid else 0.0,
        "episodes": rate.episodes,
        "interval": [round(rate.low, 6), round(rate.high, 6)],
        "reward": sum(item.reward for item in valid) / number,
        "action_tokens": sum(item.num_action_tokens for item in valid) / number,
        "families": {name: family.rate for name, family in by_family(valid).items()},
        "failed": dict(Counter(item.end_reason or "unknown" for item in trajectories if item.failed)),
    }


def described(parsed: Parsed[Any, Any]) -> dict[str, Any]:
    """What run.json says of how a run was started, and what repeating it needs.

    Returns:
        program: as it was called, from the folder it was called in, or its name alone where it lies elsewhere;
        given: what the user set, without secrets; args: that and what the recipe set; settings: all; versions.
    """
    options = settings(parsed.arguments, parsed.config)
    told = {*parsed.chosen, *settings(parsed.arguments), "seed"}
    program, here = Path(sys.argv[0]).absolute(), Path.cwd()
    return {
        "program": str(program.relative_to(here)) if program.is_relative_to(here) else program.name,
        "given": {
            name: value
            for name, value in parsed.given.items()
            if name != "output_dir" and not name.endswith("_token")
        },
        "args": {name: value for name, value in options.items() if name in told},
        "settings": options,
        "versions": versions(),
    }


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
