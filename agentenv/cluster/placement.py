"""Where on a Ray cluster a run's environments go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.cluster.connection import able_nodes, check_resources, connect
from agentenv.errors import UsageError

__all__ = ["NODE_LOST", "Placement", "parse_resources"]

NODE_LOST = "NodeLost"
"""Origin of the errors of episodes that were lost with their node."""


@dataclass(frozen=True)
class Placement:
    """How environments are spread over actors, and what an actor takes of its node."""

    address: str
    """Of the cluster; see :func:`agentenv.cluster.connection.connect`."""
    num_envs: int
    """Environments of the run."""
    envs_per_actor: int
    """Most of them in one actor while all actors live."""
    resources: tuple[tuple[str, float], ...]
    """Of each actor, by Ray's names, "CPU" and "GPU" included."""

    def check(self) -> int:
        """Connect, and see whether the cluster has such nodes.

        Returns:
            the number of actors to start: enough for all environments, and one for each such node.

        Raises:
            UsageError: no cluster, or no node has the resources.
            MissingExtraError: Ray is not installed.
        """
        ray = connect(self.address)
        able = check_resources(
            ray.nodes(), dict(self.resources), what=f"an actor of {self.envs_per_actor} environments"
        )
        _checked.add(self)
        return min(max(math.ceil(self.num_envs / self.envs_per_actor), able), self.num_envs)

    def able(self, nodes: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Nodes of the cluster that can have such an actor."""
        return able_nodes(nodes, dict(self.resources))

    def check_once(self) -> None:
        """The same, unless it went well before: a node may be lost, and come back, while a run goes on."""
        if self not in _checked:
            self.check()


_checked: set[Placement] = set()


def parse_resources(text: str) -> dict[str, float]:
    """Resources from text such as ``docker=1,GPU=0.5``.

    Raises:
        UsageError: it is none.
    """
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.partition("=")
        try:
            resources[name.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals or not name.strip() or not resources[name.strip()] > 0:
            raise UsageError(f"Ray's resources {text!r}: {part!r} must be like docker=1, a number above 0")
    return resources
