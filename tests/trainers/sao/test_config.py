"""Settings: presets, what is refused, the command line and YAML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, TrlParser

from agentenv.errors import UsageError
from agentenv.rollout.config import RolloutConfig
from agentenv_trainers import SAOConfig
from agentenv_trainers.rollout_settings import RolloutSettings

MakeConfig = Callable[..., SAOConfig]


def test_defaults_are_the_papers_numbers_for_swe(make_config: MakeConfig) -> None:
    config = SAOConfig(output_dir="x", use_cpu=True)
    assert (config.clip_low, config.clip_high) == (0.8, 3.0)
    assert (config.learning_rate, config.critic_learning_rate) == (1e-6, 5e-6)
    assert (config.lambda_alpha, config.critic_lambda, config.gamma, config.critic_updates) == (
        1.5,
        1.0,
        1.0,
        2,
    )
    assert config.freeze_critic_attention
    assert config.beta == 0.0


@pytest.mark.parametrize(
    ("preset", "clip_low", "clip_high", "turns"), [("swe", 0.8, 3.0, 300), ("math", 0.3, 5.0, 50)]
)
def test_a_preset_fills_in_the_papers_values(
    make_config: MakeConfig, preset: str, clip_low: float, clip_high: float, turns: int
) -> None:
    config = make_config(preset=preset, learning_rate=1e-6)
    assert (config.clip_low, config.clip_high, config.max_turns) == (clip_low, clip_high, turns)
    assert config.trajectories_per_step == 128
    assert config.max_tokens_per_episode == 131072


def test_a_value_that_is_given_wins_over_the_preset_even_if_it_is_the_default(
    make_config: MakeConfig,
) -> None:
    config = make_config(preset="math", clip_low=0.8, max_turns=7, gradient_accumulation_steps=2)
    assert (config.clip_low, config.clip_high, config.max_turns) == (0.8, 5.0, 7)
    assert config.trajectories_per_step == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 20),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("clip_low", 1.5),
        ("clip_high", -1.0),
        ("lambda_alpha", 0.0),
        ("critic_lambda", 1.5),
        ("gamma", -0.1),
        ("critic_updates", 0),
        ("critic_only_steps", -1),
        ("truncation", "ignore"),
        ("value_granularity", "word"),
        ("negative_advantage_scale", 0.0),
        ("max_steps", 0),
        ("preset", "chess"),
        ("loss_type", "grpo"),
        ("scale_rewards", "none"),
        ("importance_cap", 2.0),
        ("mismatch_cap", 0.0),
        ("baseline_window", 8),
        ("policy_updates", 0),
        ("objective", "reinforce"),
        ("objective", "decoupled_ppo"),
        ("objective", "topr"),
        ("advantage", "best"),
        ("deepspeed", "zero2.json"),
        ("num_generations", 4),
        ("max_completion_length", 100),
        ("num_iterations", 2),
        ("use_vllm", True),
        ("steps_per_generation", 2),
        ("num_train_epochs", 5.0),
        ("resume_from_checkpoint", "runs/x"),
        ("auto_find_batch_size", True),
        ("eval_strategy", "steps"),
        ("fp16", True),
        ("report_to", "paper"),
    ],
)
def test_a_setting_that_is_wrong_or_unused_is_refused_by_name(
    make_config: MakeConfig, name: str, value: Any
) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        make_config(**{name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("clip_high", math.inf, "a finite number"),
        ("mismatch_cap", math.inf, "a finite number"),
        ("negative_advantage_scale", math.inf, "a finite number"),
        ("learning_rate", math.inf, "a finite number"),
        ("critic_learning_rate", math.nan, "a finite number"),
        ("gamma", math.nan, "a finite number"),
        ("max_grad_norm", math.nan, "a finite number"),
        ("clip_low", "0.3", "a finite number"),
        ("beta", None, "a finite number"),
        ("learning_rate", True, "a finite number"),
        ("max_steps", "10", "a whole number"),
        ("critic_updates", 1.5, "a whole number"),
        ("gradient_accumulation_steps", 2.0, "a whole number"),
        ("skip_observations", "false", "true or false"),
        ("freeze_critic_attention", 0, "true or false"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", 12, "a list of token ids"),
        ("preset", ["swe"], "one of"),
        ("learning_rate", -1e-6, "not negative"),
        ("value_pretrain_learning_rate", -1e-6, "not negative"),
        ("value_pretrain_episodes", 1, "0, or at least 2"),
        ("adam_beta1", 1.0, r"in \[0, 1\)"),
        ("seed", -1, "in"),
    ],
)
def test_a_value_of_another_kind_or_that_is_not_finite_is_refused_by_name(
    make_config: MakeConfig, name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(UsageError, match=rf"SAOConfig\.{name} is .*, must be {allowed}"):
        make_config(**{name: value})


def test_infinity_is_allowed_where_it_has_a_meaning(make_config: MakeConfig) -> None:
    config = make_config(lambda_alpha=math.inf, max_grad_norm=math.inf)
    assert (config.lambda_alpha, config.max_grad_norm) == (math.inf, math.inf)


def test_a_batch_of_one_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        make_config(per_device_train_batch_size=1)


def test_a_preset_that_does_not_fit_the_passes_says_what_to_give(make_config: MakeConfig) -> None:
    with pytest.raises(UsageError, match="gradient_accumulation_steps"):
        make_config(preset="swe", per_device_train_batch_size=7)


def test_odd_batches_are_allowed(make_config: MakeConfig) -> None:
    assert make_config(per_device_train_batch_size=7).trajectories_per_step == 7


def test_every_rollout_setting_is_reachable_under_its_name_and_with_its_default() -> None:
    ours = {f.name: f for f in dataclasses.fields(SAOConfig)}
    differing = {
        "batch_size",
        "num_steps",
        "max_tokens_per_episode",
        "stop_token_ids",
    }  # derived, by preset, list for tuple
    for definition in dataclasses.fields(RolloutConfig):
        if definition.name not in differing:
            assert definition.name in ours, definition.name
            assert ours[definition.name].default == definition.default, definition.name
    assert {f.name for f in dataclasses.fields(RolloutSettings)} <= set(RolloutConfig.field_names())


def test_the_rollout_config_follows(make_config: MakeConfig) -> None:
    config = make_config(
        num_envs=5, asynchrony=0.5, max_turns=9, stop_token_ids=[7], gradient_accumulation_steps=2
    )
    rollout = config.rollout_config()
    assert rollout.batch_size == 16
    assert (rollout.num_envs, rollout.asynchrony, rollout.max_turns, rollout.stop_token_ids) == (
        5,
        0.5,
        9,
        (7,),
    )
    assert rollout.temperature == 1.0


def test_a_rollout_setting_outside_its_range_is_refused_at_once(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="asynchrony"):
        make_config(asynchrony=-1.0)


def test_trls_parser_reads_command_line_and_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: math\nclip_high: 4.0\ncritic_updates: 3\noutput_dir: out\nuse_cpu: true\n")
    (config,) = TrlParser(SAOConfig).parse_args_and_config(
        [
            "--config",
            str(path),
            "--critic_updates",
            "5",
            "--value_granularity",
            "step_mean",
            "--stop_token_ids",
            "3",
            "4",
        ]
    )
    assert (config.clip_low, config.clip_high, config.critic_updates) == (0.3, 4.0, 5)
    assert config.value_granularity == "step_mean"
    assert config.stop_token_ids == [3, 4]


def test_help_explains_every_field_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        TrlParser(SAOConfig).parse_args_and_config(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    inherited = {f.name for f in dataclasses.fields(GRPOConfig)}
    for definition in dataclasses.fields(SAOConfig):
        if definition.name not in inherited:
            assert f"--{definition.name}" in shown
            assert definition.metadata["help"]
