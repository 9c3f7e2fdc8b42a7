"""Settings of the SAO trainer.

Invariants:

* A field that the user gave wins over the preset; the preset wins over the default.
* A setting of ``trl.GRPOConfig`` that SAO does not use is refused when it is given, never silently ignored; so are
  those of ``transformers.TrainingArguments`` that one would expect to have an effect here.
* After construction every field has a usable value: the ``None`` of a field that a preset fills is gone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from trl.trainer.base_config import _BaseConfig
from trl.trainer.grpo_config import GRPOConfig

from agentenv.errors import UsageError
from agentenv_trainers.batch import Truncation
from agentenv_trainers.objectives import ValueGranularity
from agentenv_trainers.rollout_settings import RolloutSettings, setting

_UNSET: Any = None
"""Default of fields that a preset may fill; Any, so that readers see the type after construction."""

_DEFAULTS: dict[str, Any] = {"clip_low": 0.8, "clip_high": 3.0, "max_tokens_per_episode": 8192}
_PAPER: dict[str, Any] = {"max_tokens_per_episode": 131072}
_PAPER_BATCH = 128
PRESETS: dict[str, dict[str, Any]] = {
    "swe": {**_PAPER, "clip_low": 0.8, "clip_high": 3.0, "max_turns": 300},
    "math": {**_PAPER, "clip_low": 0.3, "clip_high": 5.0, "max_turns": 50},
}
"""The paper's settings for software engineering and for mathematics with Python; the batch is 128 in both."""

_USED_OF_GRPO = frozenset(
    (
        "model_init_kwargs",
        "trust_remote_code",
        "router_aux_loss_coef",
        "disable_dropout",
        "cast_lm_head_to_fp32",
        "beta",
    )
)
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
_INSTEAD = {
    "num_generations": "use group_size",
    "max_completion_length": "use max_tokens_per_turn and max_tokens_per_episode",
    "loss_type": "SAO has one loss; use trl.GRPOTrainer for others",
    "epsilon": "use clip_low and clip_high",
    "epsilon_high": "use clip_low and clip_high",
    "num_iterations": "each batch trains the policy once; critic_updates repeats the critic",
    "steps_per_generation": "it is gradient_accumulation_steps",
    "generation_batch_size": "it is per_device_train_batch_size * gradient_accumulation_steps * processes",
}

_NOT_OF_TRAINING_ARGUMENTS = {
    "num_train_epochs": "an environment has no epochs; use max_steps",
    "resume_from_checkpoint": "give it to SAOTrainer.train (a recipe: --resume)",
    "save_only_model": "a checkpoint without optimizers could not be resumed",
    "auto_find_batch_size": "a batch that shrinks after an error would lose the episodes of its step",
}
"""Settings of ``transformers.TrainingArguments`` that would do nothing, or harm."""


@dataclass
class SAOConfig(RolloutSettings, GRPOConfig):
    """Settings of :class:`~agentenv_trainers.sao.SAOTrainer`: those of SAO, of the rollouts, and TRL's.

    One training step takes ``per_device_train_batch_size * gradient_accumulation_steps * processes``
    trajectories; any split of that number gives the same gradient. ``max_steps`` sets the length of the run.
    Source of "the paper": SAO, arXiv 2607.07508.

    Raises:
        UsageError: a value is outside its range, or a setting of GRPO was given that SAO does not use; the
            message names the field. It is a ValueError.
    """

    preset: Literal["swe", "math"] | None = setting(
        None,
        "The paper's clip bounds, turns, context and batch (128) for that kind of task; fields you give win.",
    )
    clip_low: float = setting(
        _UNSET,
        "Ratios at or below 1 - clip_low are masked. Unset: 0.8. The paper: 0.8 (swe), 0.3 (math).",
    )
    clip_high: float = setting(
        _UNSET,
        "Ratios at or above 1 + clip_high are masked. Unset: 3.0. The paper: 3.0 (swe), 5.0 (math).",
    )
    lambda_alpha: float = setting(
        1.5,
        "alpha of the policy's length-adaptive lambda 1 - 1/(alpha * l), l = trained tokens. The paper: 1.5.",
    )
    critic_lambda: float = setting(1.0, "lambda of the critic's targets, in [0, 1]. The paper: 1.0.")
    gamma: float = setting(
        1.0, "Discount per action token, in [0, 1]. Not given in the paper; our choice: 1.0."
    )
    critic_updates: int = setting(2, "K, critic updates per batch, all on one set of targets. The paper: 2.")
    critic_learning_rate: float = setting(5e-6, "Learning rate of the critic. The paper: 5e-6.")
    critic_warmup_steps: int = setting(
        0, "Training steps over which the critic's learning rate rises linearly to its value; 0: none."
    )
    critic_only_steps: int = setting(
        0,
        "First steps in which only the critic trains. Our reading of the paper's 10-step warm-up: 10.",
    )
    freeze_critic_attention: bool = setting(True, "Freeze the critic's attention during RL. The paper: yes.")
    value_pretrain_episodes: int = setting(
        0,
        "Episodes of the starting policy on whose returns the critic is trained before RL; 0: none.",
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
    truncation: Truncation = field(
        default="bootstrap",
        metadata={
            "help": "Episodes cut off by a limit: the critic's value follows their end (bootstrap), nothing "
            "follows (zero), or they are not trained on (drop)."
        },
    )
    value_granularity: ValueGranularity = field(
        default="token",
        metadata={
            "help": "Unit of advantage estimation: token, or one action as a step, valued by the mean of its "
            "tokens' values (step_mean) or its last token's (step_last). The paper: token, others in appendix."
        },
    )
    negative_advantage_scale: float = setting(
        1.0,
        "Factor on negative advantages, > 0; 1.0 is the paper. Below 1 keeps a small policy's format alive.",
    )
    gradient_accumulation_steps: int = setting(
        _UNSET,
        "Forward and backward passes per optimizer step. Unset: 1; with a preset what makes a batch of 128.",
    )
    max_steps: int = setting(1000, "Training steps of the run (an environment has no epochs).")
    logging_steps: float = setting(1, "Training steps between two logs.")
    lr_scheduler_type: str = setting(
        "constant", "Schedule of the policy's learning rate. The paper names none."
    )

    def __post_init__(self) -> None:
        self._fill_from_preset()
        self._refuse_unused()
        self._check_ranges()
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        per_step = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes
        if per_step < 2:
            raise UsageError(
                "SAOConfig: per_device_train_batch_size * gradient_accumulation_steps is "
                f"{per_step}, must be at least 2"
            )
        # TRL insists on groups that fill its batch; SAO has no groups, so any divisor will do.
        self.num_generations = next(n for n in range(2, per_step + 1) if per_step % n == 0)
        checkpointing: bool | None = getattr(self, "activation_checkpointing", None)
        if checkpointing is None:
            # TRL's default goes by the old name, which transformers warns of.
            self.activation_checkpointing = self.gradient_checkpointing
        if getattr(self, "bf16", None) is None and not torch.accelerator.is_available():
            self.bf16: bool | None = (
                False  # TRL's default of True makes a CPU slower and its log-probs coarser
            )
        super().__post_init__()
        self.rollout_config()

    @property
    def num_training_steps(self) -> int | None:
        """Training steps of the run."""
        return self.max_steps if self.max_steps > 0 else None

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of one training step over all processes."""
        batch = self.generation_batch_size
        assert batch is not None  # set by GRPOConfig.__post_init__
        return batch

    def _fill_from_preset(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise UsageError(
                f"SAOConfig.preset is {self.preset!r}, must be one of {sorted(PRESETS)} or unset"
            )
        for name, value in {**_DEFAULTS, **PRESETS.get(self.preset or "", {})}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if cast("int | None", self.gradient_accumulation_steps) is None:
            self.gradient_accumulation_steps = 1
            if self.preset is not None:
                per_pass = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
                if _PAPER_BATCH % per_pass:
                    raise UsageError(
                        f"SAOConfig.preset {self.preset!r} means a batch of {_PAPER_BATCH}, no multiple of "
                        f"per_device_train_batch_size * processes = {per_pass}: give "
                        "gradient_accumulation_steps"
                    )
                self.gradient_accumulation_steps = _PAPER_BATCH // per_pass

    def _refuse_unused(self) -> None:
        for name, allowed in _SAMPLING.items():
            if getattr(self, name) != allowed:
                raise UsageError(
                    f"SAOConfig.{name} is {getattr(self, name)}, must be {allowed}: the importance ratio "
                    "compares the policy's own distribution with the one the tokens were sampled from"
                )
        refused = {**_INSTEAD, **_NOT_OF_TRAINING_ARGUMENTS}
        known = {*_BaseConfig.__dataclass_fields__, *_USED_OF_GRPO, *_SAMPLING} - set(refused)
        for name, definition in GRPOConfig.__dataclass_fields__.items():
            if name not in known and getattr(self, name) != definition.default:
                hint = refused.get(name, f"leave it at {definition.default!r}")
                raise UsageError(
                    f"SAOConfig.{name} is {getattr(self, name)!r}, but SAO does not use it: {hint}"
                )
        if str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no" or self.do_eval:
            raise UsageError(
                "SAOConfig.eval_strategy must be 'no': evaluate with the controller, e.g. from a callback"
            )
        if self.fp16:
            raise UsageError(
                "SAOConfig.fp16 is not supported (the critic has no loss scaler): use bf16 or float32"
            )
        if self.deepspeed or self.fsdp:
            raise UsageError(
                "SAOConfig.deepspeed and .fsdp are not supported: policy and critic train with DDP only"
            )

    def _check_ranges(self) -> None:
        checks = (
            ("clip_low", 0.0 <= self.clip_low <= 1.0, "in [0, 1]"),
            ("clip_high", self.clip_high > 0.0, "positive"),
            ("lambda_alpha", self.lambda_alpha > 0.0, "positive"),
            ("critic_lambda", 0.0 <= self.critic_lambda <= 1.0, "in [0, 1]"),
            ("gamma", 0.0 <= self.gamma <= 1.0, "in [0, 1]"),
            ("critic_updates", self.critic_updates >= 1, "at least 1"),
            ("critic_learning_rate", self.critic_learning_rate >= 0.0, "not negative"),
            ("critic_warmup_steps", self.critic_warmup_steps >= 0, "not negative"),
            ("critic_only_steps", self.critic_only_steps >= 0, "not negative"),
            ("value_pretrain_episodes", self.value_pretrain_episodes >= 0, "not negative"),
            ("value_pretrain_steps", self.value_pretrain_steps >= 1, "at least 1"),
            ("truncation", self.truncation in ("bootstrap", "zero", "drop"), "bootstrap, zero or drop"),
            (
                "value_granularity",
                self.value_granularity in ("token", "step_mean", "step_last"),
                "token, step_mean or step_last",
            ),
            ("negative_advantage_scale", self.negative_advantage_scale > 0.0, "positive"),
            ("beta", self.beta >= 0.0, "not negative"),
            ("max_steps", self.max_steps > 0, "positive"),
            ("per_device_train_batch_size", self.per_device_train_batch_size >= 1, "at least 1"),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps >= 1, "at least 1"),
        )
        for name, valid, allowed in checks:
            if not valid:
                raise UsageError(f"SAOConfig.{name} is {getattr(self, name)!r}, must be {allowed}")
