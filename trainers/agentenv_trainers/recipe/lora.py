"""LoRA from a recipe's options, under the names of ``trl.ModelConfig``."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel, Trainer
from trl import ModelConfig, get_peft_config

from agentenv.errors import MissingExtraError, UsageError
from agentenv_trainers.adapters import without_peft
from agentenv_trainers.policy_weights import policy_weights
from agentenv_trainers.rollout_settings import setting

_ALL = "all-linear"
"""PEFT's name for all linear layers but the head."""


@dataclass
class LoraArguments:
    """Options of the adapters, the same for policy and critic."""

    use_peft: bool = setting(False, "Train LoRA adapters of the policy instead of its weights.")
    critic_use_peft: bool = setting(
        False, "Train LoRA adapters of the critic instead of its weights; its value head is trained whole."
    )
    lora_r: int = setting(16, "Rank of the adapters.")
    lora_alpha: int = setting(32, "Scale of the adapters: they are multiplied by lora_alpha / lora_r.")
    lora_dropout: float = setting(
        0.0,
        "Dropout in the policy's adapters. Above 0 the trainer's log-probs differ from the engine's at random, and "
        "with them the importance ratio.",
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the layers that get adapters, or all-linear. Unset: for the policy PEFT's choice for "
            "its architecture, for the critic all-linear (its attention is frozen unless "
            "freeze_critic_attention=false)."
        },
    )

    def check_lora(self, *, has_critic: bool) -> None:
        """Whether the options go together.

        Args:
            has_critic: whether the run has a critic.

        Raises:
            UsageError: they contradict, a value is outside its range, or peft is not installed.
        """
        for name, valid, allowed in (
            ("lora_r", self.lora_r >= 1, "at least 1"),
            ("lora_alpha", self.lora_alpha >= 1, "at least 1"),
            ("lora_dropout", 0.0 <= self.lora_dropout < 1.0, "in [0, 1)"),
            ("lora_target_modules", self.lora_target_modules != [], "one name or more"),
        ):
            if not valid:
                raise UsageError(f"--{name} is {getattr(self, name)!r}, must be {allowed}")
        if self.critic_use_peft and not has_critic:
            raise UsageError("--critic_use_peft: this run has no critic, its advantages come from elsewhere")
        if self.use_peft or self.critic_use_peft:
            if importlib.util.find_spec("peft") is None:
                raise MissingExtraError("peft", "peft")
            return
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            if getattr(self, name) != LoraArguments.__dataclass_fields__[name].default:
                raise UsageError(f"--{name} needs --use_peft true or --critic_use_peft true")

    def check_layers(self, model: PreTrainedModel) -> None:
        """Whether the model has the layers that are to get adapters.

        Raises:
            UsageError: it has none of a name, or none is known for its architecture.
        """
        if not (self.use_peft or self.critic_use_peft):
            return
        linear = sorted(
            {
                name.rpartition(".")[2]
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()
            }
        )
        if self.lora_target_modules is None:
            from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

            if self.use_peft and model.config.model_type not in KNOWN:
                raise UsageError(
                    f"--use_peft: PEFT knows no layers for models of type {model.config.model_type!r}: give "
                    f"--lora_target_modules, of {', '.join(linear)}, or all-linear"
                )
            return
        names = {name for name, _ in model.named_modules()}
        for wanted in self.lora_target_modules:
            if self.lora_target_modules == [_ALL]:
                continue
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
                raise UsageError(
                    f"--lora_target_modules: the model has no layer {wanted!r}; its linear layers are "
                    f"{', '.join(linear)}"
                )

    @property
    def peft_config(self) -> Any:
        """A ``peft.LoraConfig`` for the policy; None: it is trained whole."""
        return self._lora(self.lora_target_modules, self.lora_dropout) if self.use_peft else None

    @property
    def critic_peft_config(self) -> Any:
        """A ``peft.LoraConfig`` for the critic; None: it is trained whole."""
        return self._lora(self.lora_target_modules or [_ALL], 0.0) if self.critic_use_peft else None

    def _lora(self, target_modules: list[str] | None, dropout: float) -> Any:
        options = ModelConfig(
            use_peft=True, lora_r=self.lora_r, lora_alpha=self.lora_alpha, lora_dropout=dropout
        )
        # Given to it, a single name would become a pattern for whole paths, which no layer's path matches.
        options.lora_target_modules = _ALL if target_modules == [_ALL] else target_modules
        return get_peft_config(options)


def has_adapters(trainer: Trainer) -> bool:
    """Whether the trainer's policy is a ``peft.PeftModel``."""
    return hasattr(type(trainer.accelerator.unwrap_model(trainer.model)), "get_base_model")


def save_merged(trainer: Trainer, folder: Path) -> None:
    """Write the policy with its adapters merged, as transformers and engines load it; called on all processes."""
    weights = policy_weights(trainer.accelerator, trainer.model)
    if weights is not None:
        model = cast(PreTrainedModel, without_peft(trainer.accelerator.unwrap_model(trainer.model)))
        model.save_pretrained(folder, state_dict=weights)
        cast(Any, trainer.processing_class).save_pretrained(folder)
    trainer.accelerator.wait_for_everyone()
