"""Slots that live in actors, as the controller sees them: an episode goes there, its trajectory comes back.

The controller keeps all that must be one: the buffer and its account, freshness, weights, engines. It pays for an
episode two messages and for a turn two more, or four where the shard sends the prompt to a server; what a slot does in
between is the shard's.

Invariants:

* As of every slot: an episode ends as a trajectory, as EpisodeFailedError or by cancellation.
* The shard watches an episode's deadlines; where its loop hangs, the controller gives the episode up a little later.
* A shard that is lost with its node costs the episodes that it plays, under ``episode_NodeLost``; its slots go on in
  others.
* A turn's tokens are counted here when they are handed on, so what is lost with an episode is known.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentenv.cluster.channel import ActorLostError
from agentenv.cluster.env_host import surroundings
from agentenv.cluster.host_pool import Host, HostPool
from agentenv.cluster.mailbox import Mailbox
from agentenv.cluster.shard_host import ShardHost
from agentenv.conversation import Tokenizer
from agentenv.errors import EnvError, EpisodeTimeoutError, UsageError
from agentenv.inference.protocol import DistantPrompt, Generation, GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.slot_context import SlotContext
from agentenv.rollout.workers import env_payload, worker_kind
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from agentenv.rollout.workers import EnvFn

__all__ = ["ShardSlot", "Shards", "shards_of"]


class Shards:
    """The actors of one controller, and what they ask of it.

    Args:
        proxy: the engines.
        tokenizer: pickled for the actors.
        config: of the run; ``ray_shards`` of it says how many.

    Raises:
        UsageError: no cluster or node, or a setting that needs all slots in one loop.
    """

    def __init__(self, proxy: LLMProxy, tokenizer: Tokenizer, config: RolloutConfig) -> None:
        if config.mode == "batch" or config.deterministic:
            what = "mode is 'batch'" if config.mode == "batch" else "deterministic is true"
            raise UsageError(
                f"RolloutConfig.{what} with ray_shards {config.ray_shards}: all slots must be in the controller's "
                "event loop; ray_shards must be 0"
            )
        self.proxy, self.config = proxy, config
        self._tokenizer = tokenizer
        self._placement = replace(
            config.placement(), envs_per_actor=math.ceil(config.num_envs / config.ray_shards)
        )
        self._placement.check_once()
        self._pool: HostPool | None = None
        self._playing: dict[str, ShardSlot] = {}

    @property
    def pool(self) -> HostPool:
        """The actors, in the running loop."""
        if self._pool is None:
            arguments = (surroundings(), self._tokenizer, self.config, self.proxy.servers)
            self._pool = HostPool(
                self._placement, ShardHost, arguments, self._answer, num_actors=self.config.ray_shards
            )
        return self._pool

    def plays(self, episode_id: str, slot: ShardSlot) -> None:
        """The slot's turns are those of the episode from now on."""
        self._playing[episode_id] = slot

    def ended(self, episode_id: str) -> None:
        """It is over."""
        self._playing.pop(episode_id, None)

    async def _answer(self, method: str, *arguments: Any) -> Any:
        if method == "generate":
            return await self._generate(*arguments)
        return await self.proxy.release(*arguments)

    async def _generate(
        self, request: GenerationRequest, prompt_length: int, left_s: float | None
    ) -> Generation:
        slot = self._playing.get(request.episode_id)
        if slot is None:
            raise EnvError(f"episode {request.episode_id!r} is over")
        if not request.prompt_ids:
            ask = partial(slot.mailbox.call, "complete", request.request_id)
            request = replace(request, prompt_ids=DistantPrompt(prompt_length, ask))
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        slot.request_id = request.request_id
        try:
            generation = await self.proxy.generate(replace(request, deadline=deadline))
        finally:
            slot.request_id = None
        slot.action_tokens += len(generation.token_ids)
        return generation


_numbers = itertools.count()


class ShardSlot:
    """One slot of a shard; implements :class:`agentenv.rollout.slot.EpisodeSlot`.

    Args:
        name: for logs.
        env_fn: makes its environments, in the shard; pickled.
        shards: where it may live.
        sampling: of every turn; None: the config's.

    Raises:
        UsageError: ``env_fn`` can't be pickled.
    """

    def __init__(
        self, name: str, env_fn: EnvFn, shards: Shards, *, sampling: SamplingParams | None = None
    ) -> None:
        self.name = name
        self.action_tokens = 0
        """Tokens that the policy sampled in the present or last episode."""
        self.request_id: str | None = None
        """Of the turn that is being sampled."""
        self._kind, self._payload = worker_kind(env_fn), env_payload.pack(env_fn)
        self._shards, self._sampling = shards, sampling
        self._number = -1
        self.workers_made = 1
        """How often it began anew, the first time included."""
        self._made_before = 0
        """Where it was placed before."""
        self._host: Host | None = None
        self._closing: dict[asyncio.Future[list[str]], Host] = {}

    @property
    def mailbox(self) -> Mailbox:
        """To the shard that it is in."""
        assert self._host is not None
        return self._host.channel.mailbox

    async def run_episode(self, ticket: EpisodeTicket, sampling_seed: int) -> Trajectory:
        """See :meth:`agentenv.rollout.env_manager.EnvManager.run_episode`."""
        self.action_tokens = 0
        host = await self._place()
        self._shards.plays(ticket.episode_id, self)
        config = self._shards.config
        limit_s = config.episode_timeout_s + config.step_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                trajectory, stage, cause, workers = await host.channel.mailbox.call(
                    "play",
                    self._number,
                    self.name,
                    self._kind,
                    self._payload,
                    self._sampling,
                    ticket,
                    sampling_seed,
                )
        except TimeoutError as error:
            self._leave()
            late = EpisodeTimeoutError("episode", f"{self.name}: its shard did not answer for {limit_s:g} s")
            raise EpisodeFailedError("episode", late) from error
        except ActorLostError as error:
            raise EpisodeFailedError("episode", host.death()) from error
        finally:
            self._shards.ended(ticket.episode_id)
        self.workers_made = self._made_before + workers
        if trajectory is None:
            raise EpisodeFailedError(stage, cause)
        return trajectory  # type: ignore[no-any-return]

    async def abort_turn(self) -> bool:
        """See :meth:`agentenv.rollout.env_manager.EnvManager.abort_turn`."""
        if self.request_id is None:
            return False
        await self._shards.proxy.abort(self.request_id)
        return True

    async def settle(self) -> None:
        """After a cancelled episode: wait until its environment's call is over, or it was given up."""
        host = self._host
        if host is not None and host.lost is None:
            try:
                await host.channel.mailbox.call("settle", self._number)
            except ActorLostError:
                return

    def end(self) -> None:
        """Have the slot's environment closed; does not wait."""
        self._leave()

    async def join(self, deadline: float) -> list[str]:
        """Wait for the end after :meth:`end`; returns the names of what has not ended by the deadline."""
        if not self._closing:
            return []
        remaining = deadline - asyncio.get_running_loop().time()
        done, late = await asyncio.wait(set(self._closing), timeout=max(remaining, 0.0))
        left = [name for future in done if future.exception() is None for name in future.result()]
        return [*left, *([self.name] if late else [])]

    async def _place(self) -> Host:
        host, pool = self._host, self._shards.pool
        if host is not None and (host.lost is not None or pool.should_move(host)):
            self._leave()
        if self._host is None:
            limit_s = self._shards.config.reset_timeout_s
            try:
                self._host = await pool.place(asyncio.get_running_loop().time() + limit_s)
            except EnvError as error:
                raise EpisodeFailedError("reset", error) from error
            self._made_before = self.workers_made if self._number >= 0 else 0
            self._number = next(_numbers)
        return self._host

    def _leave(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        pool = self._shards.pool
        if host.lost is not None:
            pool.leave(host)
            return
        closed = host.start("close", self._number, self._shards.config.shutdown_timeout_s)
        self._closing[closed] = host

        def left(future: asyncio.Future[list[str]]) -> None:
            del self._closing[future]
            pool.leave(host)

        closed.add_done_callback(left)


_of_proxies: WeakKeyDictionary[LLMProxy, Shards] = WeakKeyDictionary()


def shards_of(context: SlotContext) -> Shards:
    """The shards that ask these engines: one set for training and evaluation."""
    shards = _of_proxies.get(context.proxy)
    if shards is None:
        shards = _of_proxies[context.proxy] = Shards(context.proxy, context.tokenizer, context.config)
    return shards
