"""What plays episodes for a run: an environment's slot, or anything else that yields trajectories.

:class:`~agentenv.rollout.env_manager.EnvManager` is the slot of an environment. Something else, such as agent programs
with a loop of their own (:class:`agentenv.agents.AgentRunner`), stands in the environment function's place with a
method ``make_slot``.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.slot_context import SlotContext
from agentenv.rollout.workers import EnvFn
from agentenv.trajectory import Trajectory

__all__ = ["EpisodeSlot", "EpisodeSource", "SlotMaker", "make_slot"]


class EpisodeSlot(Protocol):
    """Plays one episode after another. All methods are called in the event loop of the engines."""

    name: str
    workers_made: int
    """How often it began anew, the first time included."""

    @property
    def action_tokens(self) -> int:
        """Tokens that the policy sampled in the present or last episode, those of an aborted turn included."""
        ...

    async def run_episode(self, ticket: EpisodeTicket, sampling_seed: int) -> Trajectory:
        """Play one episode; see :meth:`EnvManager.run_episode`, whose errors are all that it may raise."""
        ...

    async def abort_turn(self) -> bool:
        """Have the turn that is being sampled return its partial tokens; its episode then fails.

        Returns:
            whether a turn was being sampled.
        """
        ...

    async def settle(self) -> None:
        """After a cancelled episode: wait until the slot can play again, or make it so."""
        ...

    def end(self) -> None:
        """Close what it holds as soon as it can be; does not wait."""
        ...

    async def join(self, deadline: float) -> list[str]:
        """Wait for the end after :meth:`end`; returns the names of what has not ended by the deadline."""
        ...


@runtime_checkable
class SlotMaker(Protocol):
    """Makes slots in an environment function's place."""

    def make_slot(self, name: str, context: SlotContext) -> EpisodeSlot:
        """A slot of this name, for logs.

        Raises:
            UsageError: it cannot play under these settings.
        """
        ...


EpisodeSource = EnvFn | SlotMaker
"""What a run plays: a function that makes environments, or a maker of slots."""


def make_slot(source: EpisodeSource, name: str, context: SlotContext) -> EpisodeSlot:
    """A slot that plays what the source says, in this event loop or in a shard.

    Raises:
        UsageError: the source cannot be played under these settings.
    """
    if isinstance(source, SlotMaker):
        return source.make_slot(name, context)
    if context.config.ray_shards:
        from agentenv.cluster.shards import ShardSlot, shards_of

        return ShardSlot(name, source, shards_of(context), sampling=context.sampling)
    return EnvManager(name, source, context)
