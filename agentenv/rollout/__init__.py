"""Rollouts: environment slots, the sample buffer and the controller that the trainers talk to."""

from agentenv.rollout.buffer import GroupFilter, SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.controller import AsyncController
from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.ledger import Ledger, TaskLedger
from agentenv.rollout.rewards import RewardFn
from agentenv.rollout.slot import EpisodeSlot, SlotMaker
from agentenv.rollout.slot_context import SlotContext

__all__ = [
    "AsyncController",
    "EnvManager",
    "EpisodeSlot",
    "EpisodeTicket",
    "GroupFilter",
    "Ledger",
    "RewardFn",
    "RolloutConfig",
    "SampleBuffer",
    "SlotContext",
    "SlotMaker",
    "TaskLedger",
]
