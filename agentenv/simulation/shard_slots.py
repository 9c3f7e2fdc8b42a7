"""Slots whose episodes live in shards, as the controller's loop sees them: what is left for it to do.

They stand in for no class of production but the slot, which is played by the same ``EpisodePlayer``.

Invariant: an episode takes the time that it would take in a shard, and its trajectory holds as many ids.
"""

from __future__ import annotations

import asyncio
import math

from agentenv.inference.protocol import GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.slot_context import SlotContext
from agentenv.simulation.engine import DecodeModel
from agentenv.simulation.environment import SimulatedTasks
from agentenv.simulation.workload import EpisodePlan
from agentenv.trajectory import Trajectory

__all__ = ["EpisodeSlots", "ShardSlots", "TurnSlots"]


class _Slot:
    """A slot of a shard, as the controller sees it. Implements :class:`agentenv.rollout.slot.EpisodeSlot`."""

    def __init__(
        self,
        name: str,
        proxy: LLMProxy | None,
        tasks: SimulatedTasks,
        sampling: SamplingParams,
        model: DecodeModel,
        tokens_per_id: int,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.workers_made = 1
        self.action_tokens = 0
        self._proxy, self._tasks, self._sampling = proxy, tasks, sampling
        self._model, self._tokens_per_id, self._timeout_s = model, tokens_per_id, timeout_s
        self._request_id: str | None = None

    async def run_episode(self, ticket: EpisodeTicket, sampling_seed: int) -> Trajectory:
        """Take the time of an episode."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        plan = self._tasks.next_member(ticket.task_seed)
        if self._proxy is None:
            await asyncio.sleep(plan.latency_s + sum(plan.tokens) * self._model.base_s)
        else:
            await self._ask(self._proxy, plan, ticket.episode_id)
        self._tasks.steps += len(plan.tokens)
        self.action_tokens = sum(math.ceil(tokens / self._tokens_per_id) for tokens in plan.tokens)
        ids = [1] * self.action_tokens
        return Trajectory(
            prompt_ids=[1],
            completion_ids=ids,
            rollout_logprobs=[0.0] * len(ids),
            action_mask=[True] * len(ids),
            policy_versions=[ticket.start_version] * len(ids),
            reward=plan.reward,
            terminated=True,
            end_reason="terminated",
            episode_id=ticket.episode_id,
            group_id=ticket.group_id,
            seed=ticket.task_seed,
            start_version=ticket.start_version,
            turns=len(plan.tokens),
            duration_s=loop.time() - began,
        )

    async def _ask(self, proxy: LLMProxy, plan: EpisodePlan, episode_id: str) -> None:
        for number, (tokens, step_s) in enumerate(zip(plan.tokens, plan.step_s, strict=True)):
            self._request_id = f"{episode_id}/{number}"
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            request = GenerationRequest(
                self._request_id, [tokens], self._sampling, episode_id=episode_id, deadline=deadline
            )
            await proxy.generate(request)
            self._request_id = None
            await asyncio.sleep(step_s)
        await proxy.release(episode_id)

    async def abort_turn(self) -> bool:
        """As the production's shards do."""
        if self._proxy is None or self._request_id is None:
            return False
        await self._proxy.abort(self._request_id)
        return True

    async def settle(self) -> None:
        """Nothing is left of a cancelled episode."""

    def end(self) -> None:
        """Nothing to close."""

    async def join(self, deadline: float) -> list[str]:
        """Nothing is left."""
        return []


class ShardSlots:
    """Makes the slots; implements :class:`agentenv.rollout.slot.SlotMaker`.

    Args:
        tasks: gives the episodes; one that is planned to fail does not.
        model: speed of the engines, for episodes that ask none.
        tokens_per_id: see :class:`~agentenv.simulation.engine.SimulatedEngine`.
    """

    asks_for_turns = False

    def __init__(self, tasks: SimulatedTasks, model: DecodeModel, tokens_per_id: int) -> None:
        self._tasks, self._model, self._tokens_per_id = tasks, model, tokens_per_id

    def make_slot(self, name: str, context: SlotContext) -> _Slot:
        """See :class:`agentenv.rollout.slot.SlotMaker`."""
        return _Slot(
            name,
            context.proxy if self.asks_for_turns else None,
            self._tasks,
            context.turn_sampling,
            self._model,
            self._tokens_per_id,
            context.config.generate_timeout_s,
        )


class TurnSlots(ShardSlots):
    """Slots of shards that ask the controller for each turn, as ``RolloutConfig.ray_shards`` makes them."""

    asks_for_turns = True


class EpisodeSlots(ShardSlots):
    """Slots of shards that ask the engines by themselves: the controller hands out tickets and takes trajectories."""
