"""Settings of the GRPO trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from agentenv_trainers.batch import Truncation
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.settings import Advantage, Objective, TrainerSettings


@dataclass
class GRPOConfig(TrainerSettings):
    """Settings of :class:`~agentenv_trainers.grpo.GRPOTrainer`: groups of episodes instead of a critic.

    Source: GRPO, arXiv 2402.03300; ``objective="dis"`` is the SAO paper's strongest baseline, GRPO + DIS.

    Raises:
        UsageError: as :class:`~agentenv_trainers.settings.TrainerSettings`.
    """

    advantages_offered: ClassVar[tuple[str, ...]] = ("group", "running_mean", "running_mean_per_task")

    objective: Objective = field(
        default="ppo_clip",
        metadata={
            "help": "Policy objective: ppo_clip (GRPO's), dis (GRPO + DIS), decoupled_ppo, tis, cispo, topr."
        },
    )
    advantage: Advantage = field(
        default="group",
        metadata={
            "help": "Where advantages come from: group (reward against mean and std of the task's group), "
            "running_mean (of the last rewards of all tasks), running_mean_per_task."
        },
    )
    group_size: int = setting(
        8, "Episodes per task. Our choice: 8; the SAO paper's baselines do not name theirs."
    )
    truncation: Truncation = field(
        default="zero",
        metadata={
            "help": "Episodes cut off by a limit: trained with the reward they got (zero; bootstrap needs a "
            "critic), or not trained on (drop)."
        },
    )

    def _check_choices(self) -> None:
        if self.truncation == "bootstrap":
            raise self._error(
                "truncation", self.truncation, "zero or drop: there is no critic to bootstrap with"
            )
        super()._check_choices()
