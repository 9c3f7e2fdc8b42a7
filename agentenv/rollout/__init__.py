"""Rollouts: environment slots, the sample buffer and the controller that the trainers talk to."""

from agentenv.rollout.config import RolloutConfig

__all__ = ["RolloutConfig"]
