"""Servers on the nodes of a Ray cluster: started there, kept running, found by their kind.

A server is what its documented command starts, such as ``agentenv sandbox serve`` or vLLM's. Ray only decides where it
runs, and remembers its address.

Invariants:

* Each server has a detached actor of its own, named KIND-NUMBER in the namespace ``agentenv``: it lives on when whoever
  started it has gone, until :func:`stop`.
* A server that dies is started again on its port; one whose node is lost, on another node, with another address.
* A server ends with its actor, however that ends.
* A command that ends before it ever listened is bad input: nothing that the call started is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.cluster.connection import (
    NAMESPACE,
    NodeFacts,
    check_facts,
    check_resources,
    connect,
    node_facts,
    resource_text,
)
from agentenv.errors import UsageError

__all__ = ["KINDS", "ServiceHost", "ServiceState", "find", "names_cluster", "resolve_urls", "serve", "stop"]

logger = logging.getLogger(__name__)

KINDS = ("engine", "sandbox")
_GUARD = Path(__file__).parent.parent / "inference/vllm/guard.py"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Before a server that died is started again; doubles with each death in a row."""
_STEADY_S = 60.0
"""One that has run for so long has not died in a row."""
_ANSWER_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 30.0
_PRESENCE_TIMEOUT_S = 3.0
"""For an actor that is to end to show that it is anywhere."""
_POLL_S = 0.25
_PLACE_PATIENCE_S = 15.0
"""Until it is said that a server waits for room."""


@dataclass(frozen=True)
class ServiceState:
    """A server, as its actor sees it."""

    name: str
    """KIND-NUMBER."""
    url: str
    """Empty: it has no node, and so no address."""
    host: str
    """Name of its node."""
    starts: int
    """How often it was started."""
    listens: bool
    """Something accepts connections at its address."""
    problem: str
    """How it ended last, with the last line of its log; empty: it never did."""


class ServiceHost:
    """The actor of one server; starts it when made.

    Args:
        name: its own, KIND-NUMBER.
        command: with {host} and {port} where the address belongs.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        import ray

        self._name = name
        self._address = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((self._address, 0))
            self._port = free.getsockname()[1]
        values = {"{host}": self._address, "{port}": str(self._port)}
        self._command = [_filled(part, values) for part in command]
        handle, log = tempfile.mkstemp(prefix=f"agentenv-{name}-", suffix=".log")
        os.close(handle)
        self._log = Path(log)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._problem = 0, ""
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=name, daemon=True)
        self._keeper.start()

    def facts(self) -> NodeFacts:
        """Of the node."""
        return node_facts()

    def state(self) -> ServiceState:
        """Now."""
        listens = False
        with contextlib.suppress(OSError):
            socket.create_connection((self._address, self._port), timeout=1.0).close()
            listens = True
        url = f"http://{self._address}:{self._port}"
        return ServiceState(self._name, url, socket.gethostname(), self._starts, listens, self._problem)

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL ten seconds later."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        self._keeper.join(_STOP_TIMEOUT_S)
        self._log.unlink(missing_ok=True)

    def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            code = self._run()
            self._problem = f"ended with {code}: {_last_line(self._log)}"
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else pause_s
            self._stopping.wait(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    def _run(self) -> int | str:
        """Exit code of the server, or why there is none."""
        self._starts += 1
        guarded = [sys.executable, "-I", str(_GUARD), str(os.getpid()), "", *self._command]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if self._stopping.is_set():  # since it was looked at
            self._process.terminate()
        return self._process.wait()


def serve(
    kind: str,
    command: Sequence[str],
    *,
    number: int,
    resources: Mapping[str, float],
    address: str = "auto",
    start_timeout_s: float = 900.0,
    say: Callable[[str], None] = lambda line: None,
) -> list[ServiceState]:
    """Start servers beside those of the kind that there are, and wait until they listen.

    Args:
        kind: one of ``KINDS``.
        command: with {port}, and {host} where it takes an address, in the place of which come those of the node.
        number: how many.
        resources: of each, by Ray's names, "CPU" and "GPU" included; they decide where it can go.
        address: of the cluster; see :func:`agentenv.cluster.connection.connect`.
        start_timeout_s: until all listen.
        say: told of each that does.

    Raises:
        UsageError: bad arguments, no cluster, no node with such resources, one with another version, a command that
            ends at once or does not listen in time; none of those started is left.
        MissingExtraError: Ray is not installed.
    """
    if kind not in KINDS:
        raise UsageError(f"--kind {kind!r}: one of {', '.join(KINDS)} is needed")
    if number < 1:
        raise UsageError(f"--number {number}: at least 1 is needed")
    if not any("{port}" in part for part in command):
        raise UsageError("the command needs {port}, in the place of which comes a free port of the node")
    ray = connect(address)
    check_resources(ray.nodes(), resources, what=f"a server of the kind {kind}")
    taken = {int(name.rpartition("-")[2]) for name in _names(ray, kind)}
    free = [place for place in range(len(taken) + number) if place not in taken][:number]
    actors: dict[str, Any] = {}
    try:
        for place in free:
            name = f"{kind}-{place}"
            actors[name] = _start(ray, name, command, resources)
        return _wait(ray, actors, resources, start_timeout_s, say)
    except BaseException:
        for actor in actors.values():
            _end(ray, actor)
        raise


def find(kind: str | None = None, *, address: str = "auto") -> list[ServiceState]:
    """The servers, in the order of their numbers; of one whose actor does not answer, the name.

    Raises:
        UsageError: no cluster.
        MissingExtraError: Ray is not installed.
    """
    ray = connect(address)
    asked = {_actor(ray, name).state.remote(): name for name in _names(ray, kind)}
    ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER_TIMEOUT_S) if asked else ([], [])
    states = {name: ServiceState(name, "", "", 0, False, "") for name in asked.values()}
    for answer in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # its node was lost: it will have another address
            states[asked[answer]] = ray.get(answer)
    return list(states.values())


def stop(kind: str | None = None, *, address: str = "auto") -> int:
    """End the servers of a kind, or all; returns how many there were.

    Raises:
        UsageError: no cluster.
        MissingExtraError: Ray is not installed.
    """
    ray = connect(address)
    actors = [_actor(ray, name) for name in _names(ray, kind)]
    for actor in actors:
        _end(ray, actor)
    return len(actors)


def names_cluster(text: str) -> bool:
    """What a user gave in the place of URLs is :func:`resolve_urls`'s word for a cluster, whose servers may change."""
    return text == "ray" or text.startswith("ray://")


def resolve_urls(text: str, kind: str) -> str:
    """URLs with commas between from what a user gave: those, or ``ray``, or ``ray://HOST:PORT`` of a client server.

    Args:
        text: of an option.
        kind: one of ``KINDS``, of the servers that are looked for.

    Raises:
        UsageError: no cluster, or no such server listens there.
        MissingExtraError: Ray is not installed.
    """
    if not names_cluster(text):
        return text
    states = find(kind, address="auto" if text == "ray" else text)
    urls = [state.url for state in states if state.listens]
    if not urls:
        silent = f" ({', '.join(state.name for state in states)} do not listen)" if states else ""
        raise UsageError(
            f"{text}: no server of the kind {kind} on the Ray cluster{silent}; start some by "
            f"`agentenv cluster serve --kind {kind} -- COMMAND...`"
        )
    return ",".join(urls)


def _start(ray: Any, name: str, command: Sequence[str], resources: Mapping[str, float]) -> Any:
    more = dict(resources)
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": more.pop("CPU", 0.0),
        "num_gpus": more.pop("GPU", 0.0),
        "resources": more,
        "scheduling_strategy": "SPREAD",
        "max_concurrency": 4,
        "max_restarts": -1,
    }
    return ray.remote(ServiceHost).options(**options).remote(name, list(command))


def _wait(
    ray: Any,
    actors: Mapping[str, Any],
    resources: Mapping[str, float],
    patience_s: float,
    say: Callable[[str], None],
) -> list[ServiceState]:
    deadline, told = time.monotonic() + patience_s, False
    states: dict[str, ServiceState] = {}
    for name, actor in actors.items():
        placed, state = False, None
        while state is None or not state.listens:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                why = (state.problem or "it does not listen") if state else "no node has room for it"
                raise UsageError(f"{name}: not within {patience_s:g} s: {why}")
            try:
                if not placed:
                    asked_s = time.time()
                    until_told_s = left_s if told else min(left_s, _PLACE_PATIENCE_S)
                    facts = ray.get(actor.facts.remote(), timeout=until_told_s)
                    check_facts(facts, asked_s=asked_s, answered_s=time.time())
                    placed = True
                state = ray.get(actor.state.remote(), timeout=min(left_s, _ANSWER_TIMEOUT_S))
            except ray.exceptions.GetTimeoutError:
                if not placed and not told:
                    told = True
                    logger.warning(
                        "%s: no node of the Ray cluster has room so far for %s: other servers have taken it "
                        "(`agentenv cluster list`), or other actors; waiting %.0f s more",
                        name,
                        resource_text(resources),
                        max(deadline - time.monotonic(), 0.0),
                    )
                continue
            except ray.exceptions.RayError as error:
                raise UsageError(
                    f"{name}: its actor cannot start: {str(error).strip().splitlines()[-1]}"
                ) from error
            if state.problem:
                raise UsageError(f"{name}: the command on {state.host} {state.problem}")
            if not state.listens:
                time.sleep(_POLL_S)
        states[name] = state
        say(f"{name}: {state.url} on {state.host}")
    return list(states.values())


def _names(ray: Any, kind: str | None) -> list[str]:
    """Of the servers' actors: other actors in the namespace have no names."""
    kinds = KINDS if kind is None else (kind,)
    found = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and _order(actor["name"])[0] in kinds
    ]
    return sorted(found, key=_order)


def _order(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition("-")
    return (kind, int(number)) if number.isdecimal() else ("", 0)


def _actor(ray: Any, name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def _end(ray: Any, actor: Any) -> None:
    answers, _ = ray.wait([actor.facts.remote()], timeout=_PRESENCE_TIMEOUT_S)
    if answers:  # else its node is lost, or it is not placed: nothing runs
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.stop.remote(), timeout=_STOP_TIMEOUT_S + _ANSWER_TIMEOUT_S)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor, no_restart=True)


def _filled(part: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        part = part.replace(name, value)
    return part


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was logged"
