"""SAO: single-rollout asynchronous optimization (arXiv 2607.07508)."""

from agentenv_trainers.sao.config import SAOConfig
from agentenv_trainers.sao.trainer import SAOTrainer

__all__ = ["SAOConfig", "SAOTrainer"]
