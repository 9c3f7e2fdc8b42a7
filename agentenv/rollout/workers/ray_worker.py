"""A synchronous or asynchronous environment on some node of a Ray cluster.

It lives in an actor with others (:mod:`agentenv.cluster.env_host`), there in a worker of the kind that its class asks
for; this is the rollout's end of it.

Invariants:

* As of every worker: calls never overlap, and each ends by its deadline, by the rollout's own clock.
* The loss of the actor or its node ends the call in flight, with an EnvError of the origin "NodeLost".
* A new environment is made only at a reset: after a loss, or where another actor has fewer of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from agentenv.cluster.channel import ActorLostError
from agentenv.cluster.host_pool import Host, HostPool, hosts
from agentenv.cluster.placement import Placement
from agentenv.errors import EnvError, EpisodeTimeoutError
from agentenv.rollout.workers import env_payload
from agentenv.rollout.workers.base import worker_kind
from agentenv.rollout.workers.contract import ResetResult, StepResult, TextEnv

__all__ = ["RayWorker"]

_numbers = itertools.count()


class RayWorker:
    """One environment, made at the first reset.

    Args:
        env_fn: makes the environment, on the other node; pickled.
        name: for logs.
        placement: where it goes.

    Raises:
        UsageError: ``env_fn`` can't be pickled, there is no such cluster, or no node has the resources.
    """

    def __init__(self, env_fn: Callable[[], TextEnv], name: str, placement: Placement) -> None:
        self.name = name
        self._kind, self._payload = worker_kind(env_fn), env_payload.pack(env_fn)
        placement.check_once()
        self._placement = placement
        self._number = -1
        self._pool: HostPool | None = None
        self._host: Host | None = None
        self._call: asyncio.Future[Any] | None = None
        self._stage, self._deadline = "", 0.0
        self._missed: str | None = None
        self._max_turns: int | None = None
        self._closing: set[asyncio.Future[Any]] = set()
        self._ended = False

    @property
    def is_running(self) -> bool:
        """An environment of it is still being closed, or there is one."""
        return self._host is not None or bool(self._closing)

    @property
    def max_turns(self) -> int | None:
        """The environment's advice; None before the first reset, and without advice."""
        return self._max_turns

    async def reset(self, seed: int, deadline: float) -> ResetResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""
        await self._check_usable()
        if self._host is not None and (
            self._host.lost is not None or cast("HostPool", self._pool).should_move(self._host)
        ):
            self._leave()
        if self._host is None:
            self._pool = hosts(self._placement)
            self._host = await self._pool.place(deadline)
            self._number = next(_numbers)
        name = f"{self.name}-on-{self._host.facts.host}"
        answer = await self._ask("reset", deadline, self._number, name, self._kind, self._payload, seed)
        result, self._max_turns = answer
        return cast("ResetResult", result)

    async def step(self, action: str, deadline: float) -> StepResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""
        await self._check_usable()
        if self._host is None:
            raise EnvError("step before reset")
        return cast("StepResult", await self._ask("step", deadline, self._number, action))

    async def settle(self) -> None:
        """Wait for a call whose caller was cancelled, under that call's own deadline.

        Raises:
            EpisodeTimeoutError: it missed that deadline.
        """
        if self._call is not None:
            await self._wait_for_call()
        if self._missed is not None:
            raise self._timeout()

    def end(self) -> None:
        """Have the environment closed; does not wait; idempotent."""
        self._ended = True
        self._leave()

    async def join(self, deadline: float) -> bool:
        """Wait for the end after :meth:`end`; False: the deadline passed first."""
        if self._closing:
            remaining = deadline - asyncio.get_running_loop().time()
            await asyncio.wait(set(self._closing), timeout=max(remaining, 0.0))
        return not self._closing

    async def _check_usable(self) -> None:
        await self.settle()
        if self._ended:
            raise EnvError(f"{self.name} has ended")

    async def _ask(self, stage: str, deadline: float, *arguments: Any) -> Any:
        host = self._host
        assert host is not None
        if host.lost is not None:
            raise host.death()
        left_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
        call = self._call = host.start(stage, *arguments, left_s)
        self._stage, self._deadline = stage, deadline
        await self._wait_for_call()
        if self._missed is not None:
            raise self._timeout()
        try:
            return call.result()
        except ActorLostError as error:
            raise host.death() from error

    async def _wait_for_call(self) -> None:
        """Until the call is over, or its deadline."""
        call = self._call
        assert call is not None
        left_s = self._deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({call}, timeout=max(left_s, 0.0))
        if self._call is call:
            self._call = None
            if not done:
                self._missed = self._stage
                self.end()

    def _timeout(self) -> EpisodeTimeoutError:
        stage = self._missed or self._stage
        return EpisodeTimeoutError(stage, f"{stage} of {self.name} did not return before its deadline")

    def _leave(self) -> None:
        """Have the environment closed where it is."""
        host, self._host = self._host, None
        pool = self._pool
        if host is None or pool is None:
            return
        if host.lost is not None:
            pool.leave(host)
            return
        if not self._loop_runs():  # the actor ends with the process
            return
        closed = host.start("close", self._number)
        self._closing.add(closed)

        def left(future: asyncio.Future[Any]) -> None:
            self._closing.discard(future)
            pool.leave(host)

        closed.add_done_callback(left)

    @staticmethod
    def _loop_runs() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True
