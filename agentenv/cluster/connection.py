"""A Ray cluster, and whether its nodes can do what a run wants of them.

Invariants:

* What cannot work (no cluster there, a resource that no node has, another Python or agentenv on a node) is one
  UsageError that names place, value and what is there.
* A connection that the program made itself (``ray.init``) is used as it is, and stays.
* Deadlines go to other machines as seconds that are left, never as times: clocks that differ do no harm but to logs and
  traces, so they are only warned of.
"""

from __future__ import annotations

import logging
import platform
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

__all__ = [
    "NAMESPACE",
    "NodeFacts",
    "able_nodes",
    "check_facts",
    "check_resources",
    "connect",
    "node_facts",
    "resource_text",
]

logger = logging.getLogger(__name__)

NAMESPACE = "agentenv"
"""Of the named actors."""
LARGEST_SKEW_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
_DEFAULT_PORT = 6379

_lock = threading.Lock()


@dataclass(frozen=True)
class NodeFacts:
    """What an actor finds on its node."""

    node_id: str
    host: str
    python: str
    agentenv: str
    time_s: float
    """Of its clock, since the epoch."""


def connect(address: str) -> Any:
    """Connect this process to a cluster, once; returns the module ``ray``.

    Args:
        address: "auto" (the one that this machine is a node of), HOST:PORT of its head, ``ray://HOST:PORT`` of a client
            server, or "local": a cluster of this machine alone, started now and gone with this process.

    Raises:
        UsageError: nothing there is a Ray cluster, or it refuses.
        MissingExtraError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    with _lock:
        if ray.is_initialized():
            return ray
        options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "logging_level": logging.WARNING,
            # It would go to stdout, among a command's results; Ray keeps it in its session's folder.
            "log_to_driver": False,
        }
        if address == "local":
            options["include_dashboard"] = False
        else:
            _check_address(address)
            options["address"] = address
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise UsageError(f"Ray's address {address!r}: {_first_line(error)}; {_ADVICE}{_TOKEN}") from error
    return ray


_ADVICE = (
    'it must be HOST:PORT of a cluster that `ray start --head` began, "auto" on one of its nodes, or "local" for one '
    "of this machine alone"
)
_TOKEN = "; where the cluster asks for a token, RAY_AUTH_MODE=token is needed here"
"""Ray uses the token of its own accord only where it finds the cluster by itself."""


def _check_address(address: str) -> None:
    """Ray itself tries for most of a minute before it says that nobody answers."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").partition(":")
    if not host or (port and not port.isdecimal()):
        raise UsageError(f"Ray's address {address!r}: {_ADVICE}")
    try:
        socket.create_connection((host, int(port or _DEFAULT_PORT)), timeout=_ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"Ray's address {address!r}: nothing answers there ({error}); {_ADVICE}") from error


def able_nodes(nodes: list[Mapping[str, Any]], wanted: Mapping[str, float]) -> list[Mapping[str, Any]]:
    """Those that live and have all of the resources, whatever else runs there; of ``ray.nodes()``."""
    return [
        node
        for node in nodes
        if node.get("Alive")
        and all(node["Resources"].get(name, 0.0) >= number for name, number in wanted.items())
    ]


def check_resources(nodes: list[Mapping[str, Any]], wanted: Mapping[str, float], *, what: str) -> int:
    """Whether some node has all of them.

    Args:
        nodes: of ``ray.nodes()``.
        wanted: by Ray's names, "CPU" and "GPU" included.
        what: needs them, for the message.

    Returns:
        the number of such nodes.

    Raises:
        UsageError: none has them, whatever else runs there.
    """
    able = able_nodes(nodes, wanted)
    if able:
        return len(able)
    there = "; ".join(
        f"{node['NodeManagerAddress']} has "
        + ", ".join(
            f"{name}={number:g}"
            for name, number in sorted(node["Resources"].items())
            if ":" not in name and "memory" not in name
        )
        for node in nodes
        if node.get("Alive")
    )
    raise UsageError(
        f"{what} needs {resource_text(wanted)} on one node, which no node of the Ray cluster has: {there}"
    )


def resource_text(resources: Mapping[str, float]) -> str:
    """As a user gives them: ``docker=1, GPU=0.5``."""
    return ", ".join(f"{name}={number:g}" for name, number in resources.items())


def node_facts() -> NodeFacts:
    """Of the node that this process runs on."""
    import ray

    return NodeFacts(
        node_id=ray.get_runtime_context().get_node_id(),
        host=socket.gethostname(),
        python=platform.python_version(),
        agentenv=_version(),
        time_s=time.time(),
    )


def check_facts(theirs: NodeFacts, *, asked_s: float, answered_s: float) -> None:
    """Whether a node fits the rollout's machine.

    Args:
        theirs: of the node.
        asked_s: time of this machine's clock before it was asked.
        answered_s: and after it answered.

    Raises:
        UsageError: another Python (by its minor version) or agentenv.
    """
    ours = (_minor(platform.python_version()), _version())
    if (_minor(theirs.python), theirs.agentenv) != ours:
        raise UsageError(
            f"node {theirs.host} of the Ray cluster has Python {theirs.python} and agentenv {theirs.agentenv}, this "
            f"machine Python {platform.python_version()} and agentenv {ours[1]}: they must be the same"
        )
    skew_s = max(asked_s - theirs.time_s, theirs.time_s - answered_s, 0.0)
    if skew_s > LARGEST_SKEW_S:
        logger.warning(
            "the clock of node %s differs from this machine's by at least %.1f s: deadlines hold all the same, but "
            "times in its logs are off by as much",
            theirs.host,
            skew_s,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version() -> str:
    return metadata.version("agentenv-rl")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
