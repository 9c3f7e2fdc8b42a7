"""Settings that the trainers share: preset, objective, advantages, and the checks of what TRL offers.

Invariants:

* A field that the user gave wins over the preset; the preset wins over the default.
* A setting that has no effect is refused when it is given, never silently ignored: one of ``trl.GRPOConfig`` or of
  ``transformers.TrainingArguments`` that is not used here, or one of ours that belongs to another objective.
* After construction every field that the objective uses has a usable value: its ``None`` is gone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from trl.trainer.base_config import _BaseConfig
from trl.trainer.grpo_config import GRPOConfig as TRLConfig

from agentenv.errors import UsageError
from agentenv_trainers.batch import Truncation
from agentenv_trainers.rollout_settings import RolloutSettings, setting
from agentenv_trainers.value_types import misfit

Objective = Literal["dis", "ppo_clip", "decoupled_ppo", "tis", "cispo", "topr"]
Advantage = Literal["gae", "group", "running_mean", "running_mean_per_task"]

UNSET: Any = None
"""Default of fields that preset or objective may fill; Any, so that readers see the type after construction."""

_OBJECTIVE_DEFAULTS: dict[str, dict[str, float]] = {
    "dis": {"clip_low": 0.8, "clip_high": 3.0},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "tis": {"importance_cap": 5.0},
    "topr": {},
}
_PAPER_BATCH = 128
_DDP_PATIENCE_S = 600
_PAPER: dict[str, Any] = {"max_tokens_per_episode": 131072}
PRESETS: dict[str, dict[str, Any]] = {
    "swe": {**_PAPER, "max_turns": 300},
    "math": {**_PAPER, "max_turns": 50},
}
"""The SAO paper's settings for software engineering and for mathematics with Python; the batch is 128 in both."""

_DIS_BOUNDS = {"swe": {"clip_low": 0.8, "clip_high": 3.0}, "math": {"clip_low": 0.3, "clip_high": 5.0}}
_TRL_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "sapo")
_MAY_BE_INFINITE = ("lambda_alpha", "max_grad_norm")
"""A lambda of 1 whatever the length, and no clipping of gradients."""
_BASELINE_WINDOWS = {"running_mean": 128, "running_mean_per_task": 8}

_USED_OF_TRL = frozenset(
    (
        "model_init_kwargs",
        "trust_remote_code",
        "router_aux_loss_coef",
        "disable_dropout",
        "cast_lm_head_to_fp32",
        "beta",
    )
)
_OF_PPO_CLIP = (
    "loss_type",
    "importance_sampling_level",
    "delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
)
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
_INSTEAD = {
    "num_generations": "use group_size",
    "max_completion_length": "use max_tokens_per_turn and max_tokens_per_episode",
    "loss_type": "it belongs to objective='ppo_clip'",
    "scale_rewards": "it belongs to advantage='group'",
    "epsilon": "use clip_low and clip_high",
    "epsilon_high": "use clip_low and clip_high",
    "num_iterations": "use policy_updates",
    "steps_per_generation": "it is gradient_accumulation_steps",
    "generation_batch_size": "it is per_device_train_batch_size * gradient_accumulation_steps * processes",
    "use_bias_correction_kl": "it is off, the KL term is not multiplied by the importance ratio",
    "vllm_importance_sampling_correction": "use mismatch_cap",
    "vllm_importance_sampling_mode": "use mismatch_cap",
    "vllm_importance_sampling_cap": "use mismatch_cap",
}
_NOT_OF_TRAINING_ARGUMENTS = {
    "num_train_epochs": "an environment has no epochs; use max_steps",
    "resume_from_checkpoint": "give it to the trainer's train() (a recipe: --resume)",
    "save_only_model": "a checkpoint without optimizers could not be resumed",
    "auto_find_batch_size": "a batch that shrinks after an error would lose the episodes of its step",
}
"""Settings of ``transformers.TrainingArguments`` that would do nothing, or harm."""


@dataclass
class TrainerSettings(RolloutSettings, TRLConfig):
    """Base of the trainers' configs: their common fields, those of the rollouts, and TRL's.

    One batch has ``per_device_train_batch_size * gradient_accumulation_steps * processes`` trajectories; any split
    of that number gives the same gradient. Source of "the paper": SAO, arXiv 2607.07508.

    Raises:
        UsageError: a value is outside its range, or a setting was given that has no effect; the message names the
            field. It is a ValueError.
    """

    advantages_offered: ClassVar[tuple[str, ...]] = get_args(Advantage)

    preset: Literal["swe", "math"] | None = setting(
        None,
        "The paper's clip bounds, turns, context and batch (128) for that kind of task; fields you give win.",
    )
    objective: Objective = field(
        default="dis",
        metadata={
            "help": "Policy objective: dis (double-sided mask, the paper's), ppo_clip, decoupled_ppo, tis, cispo, topr."
        },
    )
    advantage: Advantage = field(
        default="gae",
        metadata={
            "help": "Where advantages come from: gae (a critic, SAO only), group (mean of the task's group), "
            "running_mean (of the last rewards of all tasks), running_mean_per_task. The paper: gae."
        },
    )
    clip_low: float = setting(
        UNSET,
        "Lower bound of the importance ratio is 1 - clip_low. dis masks at or below it; unset: 0.8 (the paper: 0.8 "
        "swe, 0.3 math). ppo_clip, decoupled_ppo: 0.2. cispo: 1.0, no bound.",
    )
    clip_high: float = setting(
        UNSET,
        "Upper bound of the importance ratio is 1 + clip_high. dis masks at or above it; unset: 3.0 (the paper: 3.0 "
        "swe, 5.0 math). ppo_clip, decoupled_ppo: 0.2. cispo: 4.0.",
    )
    importance_cap: float = setting(UNSET, "C of objective tis: weights min(ratio, C). Unset: 5.0.")
    mismatch_cap: float | None = setting(
        None,
        "Split the importance ratio at the policy before the batch's first update, and cap the part against the "
        "engine's log-probs at this value; unset: no split (decoupled_ppo: no cap).",
    )
    policy_updates: int = setting(
        1, "Optimizer steps of the policy per batch; max_steps counts optimizer steps. The paper: 1."
    )
    baseline_window: int = setting(
        UNSET,
        "Rewards in the mean of the running_mean advantages. Unset: 128, per task 8 (the paper: 128 online, 8 per "
        "prompt).",
    )
    truncation: Truncation = field(
        default="bootstrap",
        metadata={
            "help": "Episodes cut off by a limit: the critic's value follows their end (bootstrap), nothing "
            "follows (zero), or they are not trained on (drop). Without a critic nothing can follow."
        },
    )
    negative_advantage_scale: float = setting(
        1.0,
        "Factor on negative advantages, > 0; 1.0 is the paper. Below 1 keeps a small policy's format alive.",
    )
    gradient_accumulation_steps: int = setting(
        UNSET,
        "Forward and backward passes per optimizer step. Unset: 1; with a preset what makes a batch of 128.",
    )
    max_steps: int = setting(1000, "Training steps of the run (an environment has no epochs).")
    logging_steps: float = setting(1, "Training steps between two logs.")
    lr_scheduler_type: str = setting(
        "constant", "Schedule of the policy's learning rate. The paper names none."
    )

    def __post_init__(self) -> None:
        self._check_types()
        self._fill_from_preset()
        self._refuse_unused()
        self._check_choices()
        self._fill_from_objective()
        self._check_ranges()
        per_step = self._trajectories_per_pass() * self.gradient_accumulation_steps
        if per_step < 2:
            raise self._error(
                "per_device_train_batch_size * gradient_accumulation_steps", per_step, "at least 2"
            )
        # TRL insists on groups that fill its batch; groups are the rollouts' here, so any divisor will do.
        self.num_generations = next(n for n in range(2, per_step + 1) if per_step % n == 0)
        # One KL term under all objectives: TRL would multiply it by the ratio, in its own losses alone.
        self.use_bias_correction_kl = False
        checkpointing: bool | None = getattr(self, "activation_checkpointing", None)
        if checkpointing is None:
            # TRL's default goes by the old name, which transformers warns of.
            self.activation_checkpointing = self.gradient_checkpointing
        if getattr(self, "bf16", None) is None and not torch.accelerator.is_available():
            # TRL's default of True makes a CPU slower and its log-probs coarser.
            self.bf16: bool | None = False
        if _num_processes() > 1:
            # The others wait for the main process's batch in a broadcast.
            given: int = cast(Any, self).ddp_timeout
            self.ddp_timeout = max(given, math.ceil(self.batch_timeout_s) + _DDP_PATIENCE_S)
        super().__post_init__()
        self._check_report_to()
        self.rollout_config()

    @property
    def device(self) -> torch.device:
        """The device of this process; without an index where it is a CPU, which torch.load would refuse on resume."""
        device: torch.device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def num_training_steps(self) -> int | None:
        """Training steps of the run, in batches."""
        return self.max_steps // self.policy_updates if self.max_steps > 0 else None

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of one batch over all processes."""
        batch = self.generation_batch_size
        assert batch is not None  # set by TRL
        return batch

    @property
    def splits_ratio(self) -> bool:
        """Whether the importance ratio is taken in two parts, before and since the batch's first update."""
        return self.objective == "decoupled_ppo" or self.mismatch_cap is not None

    def _error(self, name: str, value: object, allowed: str) -> UsageError:
        return UsageError(f"{type(self).__name__}.{name} is {value!r}, must be {allowed}")

    def _trajectories_per_pass(self) -> int:
        return self.per_device_train_batch_size * _num_processes()

    def _preset_values(self, preset: str) -> Mapping[str, Any]:
        """What the preset sets besides the batch."""
        bounds = _DIS_BOUNDS[preset] if self.objective == "dis" else {}
        return {**PRESETS[preset], **bounds}

    def _check_types(self) -> None:
        wrong = misfit(self, _MAY_BE_INFINITE)
        if wrong is not None:
            raise self._error(*wrong)
        ids: Any = self.stop_token_ids
        if ids is not None and not (isinstance(ids, list | tuple) and all(type(i) is int for i in ids)):
            raise self._error("stop_token_ids", ids, "a list of token ids")

    def _check_report_to(self) -> None:
        try:
            get_reporting_integration_callbacks(self.report_to)
        except ValueError as error:
            raise UsageError(f"{type(self).__name__}.report_to: {error}") from None

    def _fill_from_preset(self) -> None:
        if self.preset is not None and self.preset not in list(PRESETS):
            raise self._error("preset", self.preset, f"one of {sorted(PRESETS)} or unset")
        values = self._preset_values(self.preset) if self.preset is not None else {}
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if cast("int | None", self.gradient_accumulation_steps) is None:
            self.gradient_accumulation_steps = 1
            if self.preset is not None:
                per_pass = self._trajectories_per_pass()
                if per_pass < 1 or _PAPER_BATCH % per_pass:
                    raise UsageError(
                        f"{type(self).__name__}.preset {self.preset!r} means a batch of {_PAPER_BATCH}, no multiple "
                        f"of per_device_train_batch_size * processes = {per_pass}: give "
                        "gradient_accumulation_steps"
                    )
                self.gradient_accumulation_steps = _PAPER_BATCH // per_pass

    def _check_choices(self) -> None:
        choices = (
            ("objective", get_args(Objective)),
            ("advantage", self.advantages_offered),
            ("truncation", get_args(Truncation)),
            ("loss_type", _TRL_LOSSES),
            ("importance_sampling_level", ("token", "sequence")),
            ("scale_rewards", ("group", "batch", "none")),
        )
        for name, allowed in choices:
            value = getattr(self, name)
            if name == "scale_rewards" and isinstance(value, bool):
                value = "group" if value else "none"
            if value not in allowed:
                raise self._error(name, value, f"one of {', '.join(allowed)}")
        if self.objective == "topr" and self.advantage == "gae":
            raise UsageError(
                f"{type(self).__name__}.objective 'topr' asks whether a trajectory's return is high or low, which "
                "advantage 'gae' does not say: give advantage='group' or a running mean"
            )
        if self.objective == "decoupled_ppo" and self.policy_updates == 1:
            raise UsageError(
                f"{type(self).__name__}.objective 'decoupled_ppo' clips against the policy before the batch's first "
                "update, and with policy_updates=1 there is no other: give policy_updates of at least 2, or another "
                "objective"
            )
        if self.advantage == "group" and self.group_size < 2:
            raise self._error("group_size", self.group_size, "at least 2 with advantage='group'")

    def _fill_from_objective(self) -> None:
        mine = _OBJECTIVE_DEFAULTS[self.objective]
        for name in ("clip_low", "clip_high", "importance_cap"):
            given = cast("float | None", getattr(self, name))
            if given is None:
                setattr(self, name, mine.get(name))
            elif name not in mine:
                users = [objective for objective, names in _OBJECTIVE_DEFAULTS.items() if name in names]
                raise self._unused(name, f"it belongs to the objectives {', '.join(users)}")
        if cast("int | None", self.baseline_window) is None:
            self.baseline_window = _BASELINE_WINDOWS.get(self.advantage, UNSET)
        elif self.advantage not in _BASELINE_WINDOWS:
            raise self._unused("baseline_window", "it belongs to the running_mean advantages")

    def _unused(self, name: str, hint: str) -> UsageError:
        kind = f"objective {self.objective!r} with advantage {self.advantage!r}"
        return UsageError(
            f"{type(self).__name__}.{name} is {getattr(self, name)!r}, but {kind} does not use it: {hint}"
        )

    def _refuse_unused(self) -> None:
        for name, allowed in _SAMPLING.items():
            if getattr(self, name) != allowed:
                raise UsageError(
                    f"{type(self).__name__}.{name} is {getattr(self, name)}, must be {allowed}: the importance ratio "
                    "compares the policy's own distribution with the one the tokens were sampled from"
                )
        refused = {**_INSTEAD, **_NOT_OF_TRAINING_ARGUMENTS}
        known = {*_BaseConfig.__dataclass_fields__, *_USED_OF_TRL, *_SAMPLING} - set(refused)
        if self.objective == "ppo_clip":
            known |= set(_OF_PPO_CLIP)
        if self.advantage == "group":
            known |= {"scale_rewards"}
        for name, definition in TRLConfig.__dataclass_fields__.items():
            if name not in known and getattr(self, name) != definition.default:
                raise self._unused(name, refused.get(name, f"leave it at {definition.default!r}"))
        if str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no" or self.do_eval:
            raise self._error(
                "eval_strategy",
                self.eval_strategy,
                "'no': evaluate with the controller, e.g. from a callback",
            )
        if self.fp16:
            raise UsageError(
                f"{type(self).__name__}.fp16 is not supported (the critic has no loss scaler): use bf16 or float32"
            )
        if self.deepspeed:
            raise UsageError(
                f"{type(self).__name__}.deepspeed is not supported (one engine cannot drive policy and critic): use "
                "FSDP2 or DDP"
            )

    def _check_ranges(self) -> None:
        for name, valid, allowed in self._ranges():
            if not valid:
                raise self._error(name, getattr(self, name), allowed)

    def _ranges(self) -> list[tuple[str, bool, str]]:
        """Field, whether its value is allowed, and what is."""
        steps = self.policy_updates
        saves = str(getattr(self.save_strategy, "value", self.save_strategy)) == "steps"
        return [
            ("clip_low", self.clip_low is None or 0.0 <= self.clip_low <= 1.0, "in [0, 1]"),
            ("clip_high", self.clip_high is None or self.clip_high > 0.0, "positive"),
            ("importance_cap", self.importance_cap is None or self.importance_cap > 0.0, "positive"),
            ("mismatch_cap", self.mismatch_cap is None or self.mismatch_cap > 0.0, "positive"),
            ("baseline_window", self.baseline_window is None or self.baseline_window >= 1, "at least 1"),
            ("negative_advantage_scale", self.negative_advantage_scale > 0.0, "positive"),
            ("beta", self.beta >= 0.0, "not negative"),
            ("delta", self.delta is None or self.delta > 0.0, "positive"),
            ("sapo_temperature_pos", self.sapo_temperature_pos > 0.0, "positive"),
            ("sapo_temperature_neg", self.sapo_temperature_neg > 0.0, "positive"),
            ("learning_rate", self.learning_rate >= 0.0, "not negative"),
            ("weight_decay", self.weight_decay >= 0.0, "not negative"),
            ("adam_beta1", 0.0 <= self.adam_beta1 < 1.0, "in [0, 1)"),
            ("adam_beta2", 0.0 <= self.adam_beta2 < 1.0, "in [0, 1)"),
            ("adam_epsilon", self.adam_epsilon >= 0.0, "not negative"),
            ("policy_updates", steps >= 1, "at least 1"),
            ("max_steps", self.max_steps > 0, "positive"),
            (
                "max_steps",
                steps < 1 or self.max_steps % steps == 0,
                f"a multiple of policy_updates ({steps})",
            ),
            (
                "save_steps",
                steps <= 1 or not saves or (self.save_steps >= 1 and self.save_steps % steps == 0),
                f"a multiple of policy_updates ({steps})",
            ),
            ("seed", 0 <= self.seed < 2**32, "in [0, 2**32)"),
            ("per_device_train_batch_size", self.per_device_train_batch_size >= 1, "at least 1"),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps >= 1, "at least 1"),
        ]


def _num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
