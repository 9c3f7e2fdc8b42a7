"""Trainers that ship with agentenv: SAO, GRPO and the objectives they are made of.

Invariant: this package knows trajectories and a controller (``TrajectorySource``), no environment.
"""

from agentenv_trainers.batch import TrajectoryBatch, collate
from agentenv_trainers.controller import TrajectorySource
from agentenv_trainers.critic import Critic, freeze_attention
from agentenv_trainers.grpo import GRPOConfig, GRPOTrainer
from agentenv_trainers.sao import SAOConfig, SAOTrainer
from agentenv_trainers.trajectory_trainer import TrajectoryTrainer

__all__ = [
    "Critic",
    "GRPOConfig",
    "GRPOTrainer",
    "SAOConfig",
    "SAOTrainer",
    "TrajectoryBatch",
    "TrajectorySource",
    "TrajectoryTrainer",
    "collate",
    "freeze_attention",
]
