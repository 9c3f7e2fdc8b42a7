"""LoRA from a recipe's options: what they mean, and what they refuse."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from agentenv.errors import MissingExtraError, UsageError
from agentenv_trainers.recipe import RecipeArguments, parse
from agentenv_trainers.sao import SAOConfig

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def parsed(*argv: str) -> Any:
    return parse(
        RecipeArguments, SAOConfig, list(argv), defaults=lambda given: {"output_dir": "out"}, description=""
    ).arguments


def test_without_the_option_nothing_gets_adapters() -> None:
    arguments = parsed()
    assert (arguments.peft_config, arguments.critic_peft_config) == (None, None)


@needs_peft
def test_the_options_are_those_of_trl_and_serve_policy_and_critic() -> None:
    arguments = parsed(
        *("--use_peft", "true", "--critic_use_peft", "true", "--lora_r", "4", "--lora_alpha", "8"),
        *("--lora_dropout", "0.1", "--lora_target_modules", "q_proj", "up_proj"),
    )
    policy, critic = arguments.peft_config, arguments.critic_peft_config
    for config in (policy, critic):
        assert (config.r, config.lora_alpha, config.target_modules) == (4, 8, {"q_proj", "up_proj"})
    # The critic's values are compared with themselves: they are always computed without dropout.
    assert (policy.lora_dropout, critic.lora_dropout) == (0.1, 0.0)


@needs_peft
def test_unset_layers_are_pefts_choice_for_the_policy_and_all_linear_ones_for_the_critic() -> None:
    arguments = parsed("--use_peft", "true", "--critic_use_peft", "true")
    assert arguments.peft_config.target_modules is None
    assert arguments.critic_peft_config.target_modules == "all-linear"
    assert arguments.peft_config.lora_dropout == 0.0  # TRL's 0.05 would make the importance ratio noisy


@needs_peft
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--lora_r", "4"), "--lora_r needs --use_peft true or --critic_use_peft true"),
        (("--lora_target_modules", "q_proj"), "--lora_target_modules needs --use_peft true"),
        (("--use_peft", "true", "--lora_r", "0"), "--lora_r is 0, must be at least 1"),
        (("--use_peft", "true", "--lora_dropout", "1"), r"--lora_dropout is 1.0, must be in \[0, 1\)"),
        (
            ("--critic_use_peft", "true", "--advantage", "running_mean"),
            "--critic_use_peft: this run has no critic",
        ),
    ],
)
def test_options_that_contradict_are_refused(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parsed(*argv)


@needs_peft
def test_a_single_layer_is_a_name_and_no_pattern() -> None:
    arguments = parsed("--use_peft", "true", "--lora_target_modules", "q_proj")
    assert arguments.peft_config.target_modules == {"q_proj"}


@needs_peft
def test_layers_that_the_model_has_not_are_named_with_those_it_has(make_policy: Any) -> None:
    policy = make_policy()
    parsed("--use_peft", "true").check_layers(policy)
    parsed("--use_peft", "true", "--lora_target_modules", "all-linear").check_layers(policy)
    parsed("--use_peft", "true", "--lora_target_modules", "mlp.up_proj").check_layers(policy)
    arguments = parsed("--use_peft", "true", "--lora_target_modules", "q_proj", "query")
    with pytest.raises(
        UsageError, match=r"no layer 'query'; its linear layers are down_proj, gate_proj, k_proj,"
    ):
        arguments.check_layers(policy)
    policy.config.model_type = "new"
    with pytest.raises(UsageError, match="PEFT knows no layers for models of type 'new'"):
        parsed("--use_peft", "true").check_layers(policy)


def test_without_peft_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "peft" else real(name, *more)
    )
    with pytest.raises(MissingExtraError, match=r"agentenv-rl\[peft\]"):
        parsed("--use_peft", "true")
