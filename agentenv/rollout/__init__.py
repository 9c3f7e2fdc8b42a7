"""Rollouts: environment slots, the sample buffer and the controller that the trainers talk to."""

from agentenv.rollout.buffer import EpisodeTicket, SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.controller import AsyncController
from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.ledger import Ledger, TaskLedger

__all__ = [
    "AsyncController",
    "EnvManager",
    "EpisodeTicket",
    "Ledger",
    "RolloutConfig",
    "SampleBuffer",
    "TaskLedger",
]
