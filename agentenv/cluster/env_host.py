"""The actor that holds environments on a node.

An actor for each environment would cost an interpreter each. One actor holds as many as fit its share of the node, each
in a worker of the kind that its class asks for: in the actor's event loop, in a thread, or in a process of its own that
can be killed.

Invariants:

* A worker answers by the seconds that its call has left, and is ended when it misses them.
* All environments end with the actor, and the actor with the rollout's process or the node.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.cluster.channel import ActorEnd
from agentenv.cluster.connection import NodeFacts, node_facts
from agentenv.cluster.mailbox import Message
from agentenv.errors import EnvError
from agentenv.rollout.workers.base import EnvWorker, WorkerKind, make_worker
from agentenv.rollout.workers.contract import ResetResult, StepResult
from agentenv.rollout.workers.env_payload import EnvPayload
from agentenv.rollout.workers.wire import json_able

__all__ = ["EnvHost", "adopt_surroundings", "surroundings"]

_CLOSE_TIMEOUT_S = 30.0
_VARIABLES = ("AGENTENV_", "VLLM_API_KEY")


class EnvHost:
    """Environments of one actor, by number.

    Args:
        given: the rollout's :func:`surroundings`.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        adopt_surroundings(given)
        self._end = ActorEnd(self._answer)
        self._workers: dict[int, EnvWorker] = {}
        self._in_processes: set[int] = set()
        """Workers whose results are plain data already."""

    async def facts(self) -> NodeFacts:
        """Of the node."""
        return node_facts()

    async def exchange(self, number: int, messages: list[Message]) -> list[Message]:
        """See :meth:`ActorEnd.exchange`."""
        return await self._end.exchange(number, messages)

    async def _answer(self, method: str, *arguments: Any) -> Any:
        if method == "step":
            return await self._step(*arguments)
        if method == "reset":
            return await self._reset(*arguments)
        return await self._close(*arguments)

    async def _reset(
        self, number: int, name: str, kind: WorkerKind, payload: EnvPayload, seed: int, left_s: float
    ) -> tuple[ResetResult, int | None]:
        worker = self._workers.get(number)
        if worker is None:
            worker = self._workers[number] = make_worker(kind, payload, name)
            if kind == "process":
                self._in_processes.add(number)
        observation, info = await worker.reset(seed, asyncio.get_running_loop().time() + left_s)
        return (observation, self._plain(number, info)), worker.max_turns

    async def _step(self, number: int, action: str, left_s: float) -> StepResult:
        worker = self._workers.get(number)
        if worker is None:
            raise EnvError("step before reset")
        observation, reward, terminated, truncated, info = await worker.step(
            action, asyncio.get_running_loop().time() + left_s
        )
        return observation, reward, terminated, truncated, self._plain(number, info)

    async def _close(self, number: int) -> bool:
        worker = self._workers.pop(number, None)
        self._in_processes.discard(number)
        if worker is None:
            return True
        worker.end()
        return await worker.join(asyncio.get_running_loop().time() + _CLOSE_TIMEOUT_S)

    def _plain(self, number: int, info: dict[str, Any]) -> dict[str, Any]:
        return info if not info or number in self._in_processes else json_able(info)


def surroundings() -> dict[str, Any]:
    """What an actor takes over from the rollout's process: import path, folder, agentenv's variables, servers' keys."""
    return {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "folder": os.getcwd(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    }


def adopt_surroundings(given: Mapping[str, Any]) -> None:
    """As far as they exist on this node: a folder that all machines share, or one machine."""
    known = set(sys.path)
    sys.path += [entry for entry in given["path"] if entry not in known and Path(entry).exists()]
    if Path(given["folder"]).is_dir():
        os.chdir(given["folder"])
    os.environ.update(given["variables"])
    # An environment shares the machine with many others.
    os.environ["OMP_NUM_THREADS"] = "1"
