"""Actors over the nodes of a cluster, and what is placed in them: environments, or slots that play whole episodes.

Invariants:

* A new guest goes to the live actor with the fewest; one whose actor has clearly more than another is told so between
  two episodes (:meth:`HostPool.should_move`). A node that joins gets an actor, and so is used.
* An actor that is lost takes its running episodes with it, as errors, and nothing else; another one takes its place as
  soon as some node has room.
* Actors end when no guest is left, or with the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from typing import Any
from weakref import WeakKeyDictionary

from agentenv.cluster.channel import ActorChannel, ActorLostError
from agentenv.cluster.connection import NodeFacts, check_facts, resource_text
from agentenv.cluster.env_host import EnvHost, surroundings
from agentenv.cluster.mailbox import Handler
from agentenv.cluster.placement import NODE_LOST, Placement
from agentenv.errors import AgentEnvError, EnvError, UsageError

__all__ = ["Host", "HostPool", "end_all", "hosts", "pools"]

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 15.0
"""How long the first guests wait for all actors, so as to be spread over them."""
_REPLACE_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_IMBALANCE = 2
LOOK_S = 10.0
"""How often nodes that joined are looked for."""


class Host:
    """An actor and the rollout's connection to it."""

    def __init__(self, actor: Any, channel: ActorChannel, facts: NodeFacts) -> None:
        self.actor = actor
        self.channel = channel
        self.facts = facts
        self.num_guests = 0
        self.lost: ActorLostError | None = None

    def start(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call the actor."""
        return self.channel.mailbox.start(method, *arguments)

    def death(self) -> EnvError:
        """What the loss of the actor means to an episode."""
        error = EnvError(
            f"the actor on node {self.facts.host} ({self.facts.node_id[:8]}) was lost: {self.lost}"
        )
        error.origin = NODE_LOST
        return error


class HostPool:
    """Actors of one class, for one event loop.

    Args:
        placement: how many, and what each takes of its node.
        actor_class: with coroutine methods ``facts`` and ``exchange``.
        arguments: of its making.
        handler: answers calls of the actors; None: they make none.
        num_actors: how many; None: what the placement asks for.
    """

    def __init__(
        self,
        placement: Placement,
        actor_class: type,
        arguments: tuple[Any, ...],
        handler: Handler | None = None,
        *,
        num_actors: int | None = None,
    ) -> None:
        self.placement = placement
        self.actor_class = actor_class
        self._arguments, self._handler = arguments, handler
        self.num_lost = 0
        """Actors that were lost."""
        self._loop = asyncio.get_running_loop()
        self._live: list[Host] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: AgentEnvError | None = None
        self._users = 0
        self._num_actors = num_actors or 0
        self._losses_in_a_row = 0
        self._spread_until = 0.0
        self._told_of_wait = False
        self._looking: asyncio.Task[None] | None = None
        _of_loops.setdefault(self._loop, []).append(self)

    @property
    def live(self) -> list[Host]:
        """Actors that answer."""
        return list(self._live)

    async def place(self, deadline: float) -> Host:
        """An actor for one more guest; to be given back by :meth:`leave`.

        Raises:
            UsageError: a node does not fit this machine.
            EnvError: there is no actor by the deadline.
        """
        self._users += 1
        try:
            return await self._place(deadline)
        except BaseException:
            self._give_up_use()
            raise

    async def _place(self, deadline: float) -> Host:
        if self._failure is None and not self._live and not self._starting:
            self._num_actors = self._num_actors or await asyncio.to_thread(self.placement.check)
            if not self._live and not self._starting:  # nobody else meanwhile
                self._spread_until = self._loop.time() + _FIRST_WAIT_S
                for _ in range(self._num_actors):
                    self._start_host(0.0)
                self._looking = self._looking or asyncio.create_task(self._look_for_nodes())
        while self._failure is None:
            now = self._loop.time()
            enough = self._spread_until if self._starting else 0.0
            if self._live and now >= enough:
                host = min(self._live, key=lambda item: item.num_guests)
                host.num_guests += 1
                return host
            if now >= deadline:
                error = EnvError(
                    f"no node of the Ray cluster has had room for an actor with "
                    f"{resource_text(dict(self.placement.resources))} so far"
                )
                error.origin = "NoNode"
                raise error
            until = min(deadline, enough) if self._live else deadline
            changed = self._changed
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                pass
        raise self._failure

    def should_move(self, host: Host) -> bool:
        """Another actor has clearly fewer guests."""
        return host.num_guests >= _IMBALANCE + min((item.num_guests for item in self._live), default=math.inf)

    def leave(self, host: Host) -> None:
        """A guest of the actor is gone."""
        host.num_guests -= 1
        self._give_up_use()

    def _give_up_use(self) -> None:
        self._users -= 1
        if not self._users:
            # A slot that replaces its environment asks for the next one at once.
            self._loop.call_later(_REPLACE_PAUSE_S, self._end_if_unused)

    def _end_if_unused(self) -> None:
        if not self._users:
            self.end()

    def end(self) -> None:
        """End the actors, whatever is in them."""
        for task in [*self._starting, *([self._looking] if self._looking is not None else [])]:
            task.cancel()
        self._looking = None
        ended, self._live = self._live, []
        for host in ended:
            host.channel.close()
            _kill(host.actor)

    async def _look_for_nodes(self) -> None:
        """Start an actor on each node that has none: one that joined."""
        import ray

        while True:
            await asyncio.sleep(LOOK_S)
            self._tell_of_wait()
            if self._starting or len(self._live) >= self.placement.num_envs:
                continue  # those that wait for room go there
            nodes = await asyncio.to_thread(ray.nodes)
            used = {host.facts.node_id for host in self._live}
            for node in self.placement.able(nodes):
                if node["NodeID"] not in used and len(self._starting) < self.placement.num_envs:
                    self._start_host(0.0, node["NodeID"])

    def _tell_of_wait(self) -> None:
        """Say once that nothing can begin, since other programs may hold the resources for as long as they like."""
        waits = bool(self._starting and not self._live)
        if waits and not self._told_of_wait:
            logger.warning(
                "no node of the Ray cluster has room so far for an actor with %s: other actors and services have "
                "taken it, or a node is being waited for (`ray status` shows what is free)",
                resource_text(dict(self.placement.resources)),
            )
        self._told_of_wait = waits

    def _start_host(self, pause_s: float, node_id: str | None = None) -> None:
        task = asyncio.create_task(self._bring_up(pause_s, node_id))
        self._starting.add(task)
        task.add_done_callback(self._brought_up)

    async def _bring_up(self, pause_s: float, node_id: str | None) -> None:
        """Start an actor, on a node or anywhere; pends until a node has room."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        await asyncio.sleep(pause_s)
        resources = dict(self.placement.resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0.0),
            "num_gpus": resources.pop("GPU", 0.0),
            "resources": resources,
            "scheduling_strategy": "SPREAD"
            if node_id is None
            else NodeAffinitySchedulingStrategy(node_id, soft=True),
            "max_concurrency": 1000,
            "max_restarts": 0,
        }
        actor = ray.remote(self.actor_class).options(**options).remote(*self._arguments)
        try:
            asked_s = time.time()
            facts = await asyncio.wrap_future(actor.facts.remote().future())
            check_facts(facts, asked_s=asked_s, answered_s=time.time())
        except BaseException as error:
            _kill(actor)
            if (missing := _what_is_missing(error)) is not None:
                raise missing from error
            raise
        host: Host | None = None

        def on_lost(error: ActorLostError) -> None:
            if host is not None:
                self._on_lost(host, error)

        host = Host(actor, ActorChannel(actor, on_lost, self._handler), facts)
        host.channel.open()
        self._live.append(host)
        self._announce()

    def _brought_up(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, UsageError):
                self._failure = error
            else:
                logger.warning("an actor could not be started: %s", error)
                self._replace()
        self._announce()

    def _on_lost(self, host: Host, error: ActorLostError) -> None:
        host.lost = error
        if host not in self._live:
            return
        self._live.remove(host)
        self.num_lost += 1
        logger.warning("%s with %d environments", host.death(), host.num_guests)
        _kill(host.actor)
        self._replace()
        self._announce()

    def _replace(self) -> None:
        self._spread_until = 0.0  # those that live have room now
        if self._users and not self._loop.is_closed():
            self._losses_in_a_row = 0 if self._live else self._losses_in_a_row + 1
            self._start_host(min(_REPLACE_PAUSE_S * 2.0**self._losses_in_a_row, _LONGEST_PAUSE_S))

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _what_is_missing(error: BaseException) -> UsageError | None:
    """The module that a node could not import, and how it gets it; None where that is not what happened."""
    # Ray has no type for it: an actor whose class can't be loaded dies like any other.
    text = str(error)
    if "failed to import on the worker" not in text:
        return None
    missing = re.findall(r"^(?:ModuleNotFound|Import)Error: (.*)$", text, re.MULTILINE)
    node = re.search(r"\bip=([^,)\s]+)", text)
    return UsageError(
        f"node {node[1] if node else '(unknown)'} of the Ray cluster can't import what an actor needs: "
        f"{missing[-1] if missing else text.strip().splitlines()[-1]}; "
        "there, in the environment that `ray start` ran in: pip install 'agentenv-rl[ray]', in this machine's version"
    )


def _kill(actor: Any) -> None:
    import ray

    try:
        ray.kill(actor)
    except Exception as error:
        logger.debug("an actor could not be ended: %s", error)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, list[HostPool]] = WeakKeyDictionary()


def hosts(placement: Placement) -> HostPool:
    """The running loop's actors that hold environments by a placement."""
    known = [pool for pool in pools() if pool.actor_class is EnvHost and pool.placement == placement]
    return known[0] if known else HostPool(placement, EnvHost, (surroundings(),))


def pools() -> list[HostPool]:
    """Of the running loop."""
    return list(_of_loops.get(asyncio.get_running_loop(), []))


def end_all() -> None:
    """End all actors of the running loop, for its run is over."""
    for pool in _of_loops.pop(asyncio.get_running_loop(), []):
        pool.end()
