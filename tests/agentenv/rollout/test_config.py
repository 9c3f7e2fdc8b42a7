"""Settings of the rollouts: ranges and what follows from them."""

from typing import Any

import pytest

from agentenv.rollout import RolloutConfig

_TIMES = [name for name in RolloutConfig.field_names() if name.endswith("_s")]
_COUNTS = [
    "batch_size",
    "group_size",
    "num_envs",
    "num_steps",
    "max_turns",
    "max_tokens_per_turn",
    "max_tokens_per_episode",
    "failure_window",
    "num_reward_workers",
]
_NOT_NEGATIVE = ["max_retries", "reset_retries", "redundant_groups", "redundant_members"]
_CHOICES = {
    "mode": ("async", "sync", "batch"),
    "worker": ("auto", "inline", "thread", "process", "ray"),
    "history": ("append", "fork"),
    "on_stale": ("wait", "abort"),
    "on_sync": ("continue", "restart"),
}


def test_every_deadline_is_among_those_that_are_checked() -> None:
    stages = ("reset", "step", "generate", "reward", "episode", "batch", "sync", "shutdown")
    assert {f"{stage}_timeout_s" for stage in stages} | {"reset_backoff_s", "heartbeat_s"} == set(_TIMES)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", _TIMES)
def test_a_time_that_is_not_positive_and_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"RolloutConfig.{name} is {value}, must be positive and finite"):
        RolloutConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", _COUNTS)
def test_a_count_below_one_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"RolloutConfig.{name} is {value}, must be positive"):
        RolloutConfig(**{name: value})


@pytest.mark.parametrize("name", _NOT_NEGATIVE)
def test_a_count_below_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"RolloutConfig.{name} is -1, must be >= 0"):
        RolloutConfig(**{name: -1})
    RolloutConfig(**{name: 0})


@pytest.mark.parametrize(("name", "allowed"), _CHOICES.items())
def test_a_word_that_is_no_choice_is_refused_and_the_choices_are_named(
    name: str, allowed: tuple[str, ...]
) -> None:
    for word in ("lockstep", "", None):
        with pytest.raises(ValueError, match=rf"RolloutConfig.{name} is {word!r}, must be one of") as caught:
            RolloutConfig(**{name: word})
        assert str(allowed) in str(caught.value)
    for word in allowed:
        assert getattr(RolloutConfig(**{name: word}), name) == word


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"asynchrony": -0.1}, "asynchrony is -0.1, must be a finite number >= 0"),
        ({"asynchrony": float("nan")}, "asynchrony is nan, must be a finite number >= 0"),
        ({"asynchrony": float("inf")}, "asynchrony is inf, must be a finite number >= 0"),
        ({"max_failure_rate": 0.0}, r"max_failure_rate is 0.0, must be in \(0, 1\]"),
        ({"max_failure_rate": 1.01}, r"max_failure_rate is 1.01, must be in \(0, 1\]"),
        ({"max_failure_rate": float("nan")}, r"max_failure_rate is nan, must be in \(0, 1\]"),
        ({"batch_size": 10, "group_size": 4}, "batch_size is 10, must be a multiple of group_size 4"),
        ({"batch_size": 4, "group_size": 8}, "batch_size is 4, must be a multiple of group_size 8"),
        ({"temperature": -1.0}, "temperature is -1.0, must be >= 0"),
        ({"temperature": float("nan")}, "temperature is nan, must be >= 0"),
        ({"top_p": 0.0}, r"top_p is 0.0, must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k is -1, must be >= 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be > 0"),
    ],
)
def test_a_value_outside_its_range_is_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RolloutConfig(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        # A group of 8 and 2 with 9 slots: the tenth could start only when one has ended.
        (
            {"batch_size": 16, "group_size": 8, "redundant_members": 2, "num_envs": 9},
            r"redundant_members is 2: .*launches 10 episodes, but num_envs is 9.*must be at most 1",
        ),
        (
            {"batch_size": 16, "group_size": 8, "redundant_members": 1, "num_envs": 4},
            "redundant_members is 1: .*num_envs is 4.*must be at most 0",
        ),
        (
            {"filter_zero_variance": True},
            "filter_zero_variance is true with group_size 1.*must be false, or group_size at least 2",
        ),
        (
            {"filter_zero_variance": True, "group_size": 2, "partial_groups": True},
            "filter_zero_variance is true with partial_groups.*one of the two must be false",
        ),
        ({"mode": "batch", "on_sync": "restart"}, "on_sync is 'restart' in mode 'batch'.*must be 'continue'"),
        ({"deterministic": True}, "deterministic is true in mode 'async'.*or mode 'sync'"),
        ({"deterministic": True, "mode": "batch"}, "deterministic is true in mode 'batch'.*or mode 'sync'"),
        (
            {"deterministic": True, "mode": "sync", "redundant_groups": 1},
            "deterministic is true with redundant_groups.*one of the two must be off",
        ),
        (
            {"deterministic": True, "mode": "sync", "partial_groups": True},
            "deterministic is true with partial_groups",
        ),
    ],
)
def test_settings_that_cannot_work_together_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=rf"RolloutConfig\.{match}"):
        RolloutConfig(**options)


def test_redundant_members_up_to_the_slots_are_allowed() -> None:
    config = RolloutConfig(batch_size=16, group_size=8, redundant_members=1, num_envs=9, asynchrony=0.5)
    assert (config.launched_per_group, config.groups_per_batch, config.max_groups) == (9, 2, 3)
    assert config.max_outstanding == 27 and config.is_redundant
    assert RolloutConfig(batch_size=16, group_size=8, redundant_groups=2, asynchrony=0.0).max_groups == 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        # As many hung environments as redundant groups would take every slot.
        ({"batch_size": 4, "redundant_groups": 4, "num_envs": 4}, "redundant_groups is 4.*num_envs"),
        # Lock-step: all wait for the slowest, so that what is redundant saves nothing.
        ({"mode": "batch", "redundant_groups": 1}, "redundant_groups is 1 in mode 'batch'"),
        ({"mode": "batch", "redundant_members": 1}, "redundant_members is 1 in mode 'batch'"),
        ({"batch_size": 4.0}, "batch_size is 4.0"),
        ({"num_envs": 1.5}, "num_envs is 1.5"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"step_timeout_s": "60"}, "step_timeout_s is '60'"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"max_retries": 0.5}, "max_retries is 0.5"),
    ],
)
def test_what_can_not_work_either_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RolloutConfig(**options)


@pytest.mark.parametrize(
    ("alpha", "group", "outstanding"), [(0.0, 1, 8), (0.5, 1, 12), (1.0, 4, 16), (0.3, 4, 8), (2.0, 8, 24)]
)
def test_outstanding_is_bounded_by_one_plus_alpha_batches_in_whole_groups(
    alpha: float, group: int, outstanding: int
) -> None:
    assert RolloutConfig(batch_size=8, group_size=group, asynchrony=alpha).max_outstanding == outstanding


def test_sync_mode_has_no_asynchrony() -> None:
    config = RolloutConfig(mode="sync", asynchrony=3.0)
    assert config.alpha == 0.0


def test_greedy_sampling_is_temperature_zero() -> None:
    config = RolloutConfig(temperature=0.7, max_tokens_per_turn=9)
    assert config.sampling().temperature == 0.7
    greedy = config.sampling(greedy=True)
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 9)
