"""Settings of GRPO, and those whose effect depends on objective or advantage."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv_trainers import GRPOConfig, SAOConfig


def grpo(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": "x", "use_cpu": True, **changes})


def sao(**changes: Any) -> SAOConfig:
    return SAOConfig(**{"output_dir": "x", "use_cpu": True, **changes})


def test_defaults_are_groups_of_eight_under_the_clipped_objective() -> None:
    config = grpo()
    assert (config.objective, config.advantage, config.group_size) == ("ppo_clip", "group", 8)
    assert (config.clip_low, config.clip_high, config.loss_type) == (0.2, 0.2, "dapo")
    assert config.rollout_config().group_size == 8


@pytest.mark.parametrize(
    ("objective", "low", "high", "cap"),
    [
        ("dis", 0.8, 3.0, None),
        ("ppo_clip", 0.2, 0.2, None),
        ("cispo", 1.0, 4.0, None),
        ("tis", None, None, 5.0),
        ("topr", None, None, None),
    ],
)
def test_bounds_follow_the_objective(
    objective: str, low: float | None, high: float | None, cap: float | None
) -> None:
    config = grpo(objective=objective)
    assert (config.clip_low, config.clip_high, config.importance_cap) == (low, high, cap)


def test_a_preset_sets_the_papers_bounds_for_the_double_sided_mask_only() -> None:
    assert (
        grpo(preset="math", objective="dis").clip_low,
        grpo(preset="math", objective="dis").clip_high,
    ) == (
        0.3,
        5.0,
    )
    assert (grpo(preset="math").clip_low, grpo(preset="math").clip_high) == (0.2, 0.2)
    assert grpo(preset="math").max_turns == 50


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"group_size": 1}, "group_size is 1, must be at least 2"),
        ({"advantage": "gae"}, "advantage is 'gae', must be one of group"),
        ({"truncation": "bootstrap"}, "no critic to bootstrap with"),
        ({"objective": "tis", "clip_low": 0.2}, "clip_low is 0.2"),
        ({"objective": "topr", "clip_high": 0.2}, "clip_high is 0.2"),
        ({"objective": "dis", "loss_type": "grpo"}, "loss_type is 'grpo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level is 'word', must be one of token"),
        ({"scale_rewards": 1}, "scale_rewards is 1, must be one of group"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg is 0.0, must be positive"),
        ({"loss_type": "vespo"}, "loss_type is 'vespo', must be one of dapo"),
        ({"advantage": "running_mean", "scale_rewards": "none"}, "scale_rewards is 'none'"),
        ({"objective": "decoupled_ppo"}, "policy_updates of at least 2"),
        ({"objective": "decoupled_ppo", "policy_updates": 2, "max_steps": 5}, "max_steps is 5"),
        ({"policy_updates": 2, "save_steps": 5, "save_strategy": "steps"}, "save_steps is 5"),
        ({"per_device_train_batch_size": 12}, "group_size"),
    ],
)
def test_a_setting_that_cannot_work_is_one_clear_error(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as caught:
        grpo(**settings)
    assert named in str(caught.value)


def test_an_ablation_is_one_flag_over_a_config_that_sets_up_a_critic() -> None:
    config = sao(
        advantage="running_mean",
        critic_learning_rate=1e-3,
        critic_updates=3,
        critic_only_steps=5,
        value_pretrain_episodes=256,
    )
    assert (config.critic_only_steps, config.value_pretrain_episodes) == (0, 0)


def test_a_preset_works_without_a_critic_too() -> None:
    config = sao(preset="swe", advantage="running_mean")
    assert (config.critic_only_steps, config.baseline_window) == (0, 128)
    assert sao(preset="swe").critic_only_steps == 10


def test_the_papers_ablations_are_one_setting_each() -> None:
    for ablation in (
        {"objective": "ppo_clip"},
        {"critic_updates": 1},
        {"freeze_critic_attention": False},
        {"advantage": "running_mean_per_task"},
        {"value_granularity": "step_mean"},
        {"value_granularity": "step_last"},
        {"skip_observations": False},
    ):
        sao(**ablation)
