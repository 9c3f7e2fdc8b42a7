"""GRPO: group-relative policy optimisation on multi-turn episodes."""

from agentenv_trainers.grpo.config import GRPOConfig
from agentenv_trainers.grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
