"""The GRPO trainer: groups of episodes of one task, compared with each other (arXiv 2402.03300)."""

from __future__ import annotations

from typing import ClassVar

from agentenv_trainers.grpo.config import GRPOConfig
from agentenv_trainers.policy_trainer import PolicyTrainer


class GRPOTrainer(PolicyTrainer):
    """Trains a policy on groups of episodes, without a critic.

    Its loss is TRL's GRPO loss unless ``objective`` says otherwise; what differs from ``trl.GRPOTrainer`` is where
    episodes come from. See :class:`~agentenv_trainers.trajectory_trainer.TrajectoryTrainer` for arguments and errors.
    """

    _tag_names: ClassVar[list[str]] = ["agentenv", "grpo"]
    _name = "GRPO"

    args: GRPOConfig
