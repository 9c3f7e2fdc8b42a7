"""The actor that plays whole episodes: a shard of a run's slots with an event loop of its own.

Its slots are the production's (:class:`agentenv.rollout.env_manager.EnvManager`) with environments beside them, in the
actor's loop, threads or processes. Turns are asked of the controller, which has the engines; all else of an episode
(templates, tokens, deadlines, environment) costs the controller nothing. Where the engines are servers, the shard sends
them the prompts: the controller decides which and when, and sees a prompt's length and the sampled tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentenv.cluster.channel import ActorEnd
from agentenv.cluster.connection import NodeFacts, node_facts
from agentenv.cluster.env_host import adopt_surroundings
from agentenv.cluster.mailbox import Mailbox, Message, portable
from agentenv.conversation import Tokenizer
from agentenv.errors import EnvError
from agentenv.inference.passive_engine import PassiveEngine
from agentenv.inference.protocol import Generation, GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.inference.vllm.backend import Completion
from agentenv.inference.vllm.json_http import ConnectionLostError, JsonHttp
from agentenv.inference.vllm.server import ServerBackend
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.slot_context import SlotContext
from agentenv.rollout.workers import WorkerKind
from agentenv.rollout.workers.env_payload import EnvPayload

if TYPE_CHECKING:
    pass

__all__ = ["ShardHost"]

logger = logging.getLogger(__name__)

_REACH_TIMEOUT_S = 10.0


class ShardHost:
    """Slots of one actor, by number.

    Args:
        given: the controller's :func:`~agentenv.cluster.env_host.surroundings`.
        tokenizer: with a chat template.
        config: of the run.
        servers: addresses of the engines, where prompts can be sent from here.
    """

    def __init__(
        self, given: Mapping[str, Any], tokenizer: Tokenizer, config: RolloutConfig, servers: Sequence[str]
    ) -> None:
        adopt_surroundings(given)
        self._servers = list(servers)
        self._tokenizer = tokenizer
        self._config = replace(config, worker="auto", ray_shards=0)
        self._end = ActorEnd(self._answer)
        self._engine = ControllerEngine(self._end.mailbox)
        self._proxy = LLMProxy([self._engine])
        self._slots: dict[int, EnvManager] = {}
        self._playing: dict[int, asyncio.Task[Any] | None] = {}

    async def facts(self) -> NodeFacts:
        """Of the node; finds out whether it reaches the servers."""
        self._engine.sends_prompts = bool(self._servers) and await reach_all(self._servers)
        return node_facts()

    async def exchange(self, number: int, messages: list[Message]) -> list[Message]:
        """See :meth:`ActorEnd.exchange`."""
        return await self._end.exchange(number, messages)

    async def _answer(self, method: str, *arguments: Any) -> Any:
        if method == "play":
            return await self._play(*arguments)
        if method == "complete":
            return await self._engine.complete(*arguments)
        if method == "settle":
            return await self._settle(*arguments)
        return await self._close(*arguments)

    async def _play(
        self,
        number: int,
        name: str,
        kind: WorkerKind,
        payload: EnvPayload,
        sampling: SamplingParams | None,
        ticket: EpisodeTicket,
        sampling_seed: int,
    ) -> tuple[Any, ...]:
        """An episode's trajectory, or the stage that it failed in and why; and the slot's workers so far."""
        slot = self._slots.get(number)
        if slot is None:
            context = SlotContext(self._proxy, self._tokenizer, replace(self._config, worker=kind), sampling)
            slot = self._slots[number] = EnvManager(name, payload, context)
        self._playing[number] = asyncio.current_task()
        try:
            trajectory = await slot.run_episode(ticket, sampling_seed)
        except EpisodeFailedError as failure:
            return None, failure.stage, portable(failure.cause), slot.workers_made
        finally:
            del self._playing[number]
        return trajectory, "", None, slot.workers_made

    async def _settle(self, number: int) -> None:
        if (playing := self._playing.get(number)) is not None:  # cancelled, and not yet at its end
            await asyncio.wait({playing})
        if (slot := self._slots.get(number)) is not None:
            await slot.settle()

    async def _close(self, number: int, left_s: float) -> list[str]:
        slot = self._slots.pop(number, None)
        if slot is None:
            return []
        slot.end()
        return await slot.join(asyncio.get_running_loop().time() + left_s)


class ControllerEngine(PassiveEngine):
    """The controller's engines, as one; each token comes with its version.

    Args:
        mailbox: to the controller.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.sends_prompts = False
        """To the servers, from here."""
        self._prompts: dict[str, Sequence[int]] = {}
        self._backends: dict[tuple[str, str], ServerBackend] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn; the controller gives it up with its caller, or by its deadline."""
        left_s = None
        if request.deadline is not None:
            left_s = request.deadline - asyncio.get_running_loop().time()
        sent = replace(request, deadline=None, prompt_ids=[] if self.sends_prompts else request.prompt_ids)
        self._prompts[request.request_id] = request.prompt_ids
        try:
            generation: Generation = await self._mailbox.call(
                "generate", sent, len(request.prompt_ids), left_s
            )
        finally:
            del self._prompts[request.request_id]
        return generation

    async def complete(
        self,
        turn_id: str,
        server: str,
        more_ids: Sequence[int],
        model: str,
        request_id: str,
        sampling: SamplingParams,
        seed: int | None,
    ) -> Completion:
        """Send a server the prompt of a turn that is being sampled, and more ids.

        Raises:
            ConnectionLostError, UsageError, ModelError: as the server's backend raises.
        """
        backend = self._backends.get((server, model))
        if backend is None:
            http = JsonHttp(server, api_key=os.environ.get("VLLM_API_KEY"))
            backend = self._backends[server, model] = ServerBackend(http, model=model, max_length=0)
        return await backend.complete(request_id, [*self._prompts[turn_id], *more_ids], sampling, seed)

    async def abort(self, request_id: str) -> None:
        """The controller aborts what it has."""
        raise EnvError(f"request {request_id!r} is aborted by the controller, not by the shard")

    async def release(self, episode_id: str) -> None:
        """The episode is over."""
        await self._mailbox.call("release", episode_id)


async def reach_all(servers: Sequence[str]) -> bool:
    """Whether something answers at each address, seen from this node."""
    for server in servers:
        http = JsonHttp(server)
        try:
            await http.get("/health", timeout_s=_REACH_TIMEOUT_S)
        except (ConnectionLostError, TimeoutError) as error:
            logger.warning(
                "%s is not reached from %s: the shard's prompts go to the controller, which sends them (%s)",
                server,
                socket.gethostname(),
                error,
            )
            return False
        finally:
            await http.close()
    return True
