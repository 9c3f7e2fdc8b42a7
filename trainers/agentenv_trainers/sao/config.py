"""Settings of the SAO trainer: those of the critic and of the advantages it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from agentenv_trainers.objectives import ValueGranularity
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.settings import UNSET, TrainerSettings

_WARMUP_STEPS = 10


@dataclass
class SAOConfig(TrainerSettings):
    """Settings of :class:`~agentenv_trainers.sao.SAOTrainer`: those of SAO, of the rollouts, and TRL's.

    Source: SAO, arXiv 2607.07508. Its ablations are one setting each: ``objective="ppo_clip"`` (no double-sided
    mask), ``critic_updates=1``, ``freeze_critic_attention=False``, ``advantage="running_mean_per_task"``,
    ``value_granularity="step_mean"``, ``skip_observations=False``. So that they can be, settings of the critic have no
    effect, and are no error, where ``advantage`` needs none.

    Raises:
        UsageError: as :class:`~agentenv_trainers.settings.TrainerSettings`.
    """

    lambda_alpha: float = setting(
        1.5,
        "alpha of the policy's length-adaptive lambda 1 - 1/(alpha * l), l = trained tokens. The paper: 1.5.",
    )
    critic_lambda: float = setting(1.0, "lambda of the critic's targets, in [0, 1]. The paper: 1.0.")
    gamma: float = setting(
        1.0, "Discount per action token, in [0, 1]. Not given in the paper; our choice: 1.0."
    )
    critic_model: str | None = setting(
        None,
        "Folder or hub name of the model that the critic starts from, such as one whose values were pretrained; "
        "unset: a copy of the policy. The paper: the policy.",
    )
    critic_updates: int = setting(2, "K, critic updates per batch, all on one set of targets. The paper: 2.")
    critic_learning_rate: float = setting(5e-6, "Learning rate of the critic. The paper: 5e-6.")
    critic_warmup_steps: int = setting(
        UNSET,
        "Batches over which the critic's learning rate rises linearly to its value. Unset: 0, with a preset 10. "
        "The paper: a warm-up of 10 steps, which may mean this or critic_only_steps.",
    )
    critic_only_steps: int = setting(
        UNSET,
        "First steps in which only the critic trains. Unset: 0, with a preset 10, our reading of the paper's 10-step "
        "warm-up.",
    )
    freeze_critic_attention: bool = setting(True, "Freeze the critic's attention during RL. The paper: yes.")
    value_pretrain_episodes: int = setting(
        0,
        "Episodes of the starting policy on whose returns the critic is trained before RL; 0: none. The paper "
        "pretrains, and does not say on how many.",
    )
    value_pretrain_steps: int = setting(
        50, "Critic updates of the value pretraining, each on one batch. Best public hint: about 50."
    )
    value_pretrain_learning_rate: float | None = setting(
        None, "Learning rate of the value pretraining; unset: critic_learning_rate."
    )
    value_pretrain_attention: bool = setting(
        True, "Train the critic's attention too while pretraining values (it is frozen during RL only)."
    )
    value_granularity: ValueGranularity = field(
        default="token",
        metadata={
            "help": "Unit of advantage estimation: token, or one action as a step, valued by the mean of its "
            "tokens' values (step_mean) or its last token's (step_last). The paper: token, others in appendix."
        },
    )
    skip_observations: bool = setting(
        True,
        "Run the critic's targets and GAE over action tokens only. The paper: yes; false is the ablation in which "
        "observation tokens count like actions.",
    )

    def _preset_values(self, preset: str) -> Mapping[str, Any]:
        warmup = {"critic_only_steps": _WARMUP_STEPS, "critic_warmup_steps": _WARMUP_STEPS}
        return {**super()._preset_values(preset), **(warmup if self.advantage == "gae" else {})}

    def _fill_from_preset(self) -> None:
        super()._fill_from_preset()
        for name in ("critic_only_steps", "critic_warmup_steps"):
            if getattr(self, name) is None:
                setattr(self, name, 0)
        if self.advantage != "gae":
            self.critic_only_steps = self.value_pretrain_episodes = 0

    def _check_choices(self) -> None:
        super()._check_choices()
        if self.value_granularity not in get_args(ValueGranularity):
            raise self._error(
                "value_granularity", self.value_granularity, f"one of {', '.join(get_args(ValueGranularity))}"
            )
        if not self.skip_observations and self.value_granularity != "token":
            raise self._error(
                "value_granularity", self.value_granularity, "token with skip_observations=False"
            )

    def _ranges(self) -> list[tuple[str, bool, str]]:
        return [
            *super()._ranges(),
            ("lambda_alpha", self.lambda_alpha > 0.0, "positive"),
            ("critic_lambda", 0.0 <= self.critic_lambda <= 1.0, "in [0, 1]"),
            ("gamma", 0.0 <= self.gamma <= 1.0, "in [0, 1]"),
            ("critic_updates", self.critic_updates >= 1, "at least 1"),
            ("critic_learning_rate", self.critic_learning_rate >= 0.0, "not negative"),
            ("critic_warmup_steps", self.critic_warmup_steps >= 0, "not negative"),
            ("critic_only_steps", self.critic_only_steps >= 0, "not negative"),
            (
                "value_pretrain_learning_rate",
                self.value_pretrain_learning_rate is None or self.value_pretrain_learning_rate >= 0.0,
                "not negative",
            ),
            (
                "value_pretrain_episodes",
                self.value_pretrain_episodes == 0 or self.value_pretrain_episodes >= 2,
                "0, or at least 2: one of them measures",
            ),
            ("value_pretrain_steps", self.value_pretrain_steps >= 1, "at least 1"),
        ]
