"""Settings of the rollouts: ranges and what follows from them."""

from typing import Any

import pytest

from agentenv.rollout import RolloutConfig


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"asynchrony": -0.1}, "asynchrony is -0.1"),
        ({"asynchrony": float("nan")}, "asynchrony is nan"),
        ({"max_failure_rate": 0.0}, "max_failure_rate is 0.0"),
        ({"batch_size": 10, "group_size": 4}, "multiple of group_size 4"),
        ({"mode": "lockstep"}, "mode is 'lockstep'"),
        ({"on_stale": "keep"}, "on_stale is 'keep'"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s is inf"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"max_retries": -1}, "max_retries is -1"),
    ],
)
def test_a_value_outside_its_range_is_named(options: dict[str, Any], match: str) -> None:
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
