"""Success rates: worked numbers, ends of the range, and what infrastructure ended."""

import math

import pytest

from agentenv.evaluation import by_family, success_rate, wilson_interval
from agentenv.trajectory import Trajectory


def _trajectory(success: bool, **info: object) -> Trajectory:
    return Trajectory([], [], [], [], [], info={"success": success, **info})


def test_the_interval_of_eight_in_ten_is_wilsons() -> None:
    # By hand: z = 1.959964; centre = (0.8 + 0.192073) / 1.384146 = 0.716740; half = 0.226577.
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.490162, abs=1e-5)
    assert high == pytest.approx(0.943318, abs=1e-5)


@pytest.mark.parametrize(("successes", "low", "high"), [(0, 0.0, 0.277533), (10, 0.722467, 1.0)])
def test_the_interval_stays_within_the_range_at_its_ends(successes: int, low: float, high: float) -> None:
    assert wilson_interval(successes, 10) == pytest.approx((low, high), abs=1e-5)


def test_without_episodes_nothing_is_known() -> None:
    rate = success_rate([])
    assert (rate.low, rate.high, rate.episodes) == (0.0, 1.0, 0)
    assert math.isnan(rate.rate)


def test_a_higher_confidence_gives_a_wider_interval() -> None:
    narrow, wide = wilson_interval(30, 100, confidence=0.8), wilson_interval(30, 100, confidence=0.99)
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]


@pytest.mark.parametrize(("successes", "episodes", "confidence"), [(-1, 3, 0.95), (4, 3, 0.95), (1, 3, 1.0)])
def test_values_outside_their_range_are_refused(successes: int, episodes: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        wilson_interval(successes, episodes, confidence=confidence)


def test_episodes_that_infrastructure_ended_are_left_out_and_counted() -> None:
    rate = success_rate([_trajectory(True), _trajectory(False), _trajectory(False, failure="step_timeout")])
    assert (rate.successes, rate.episodes, rate.failed, rate.rate) == (1, 2, 1, 0.5)
    assert "1 failed" in str(rate)


def test_success_is_broken_down_by_family() -> None:
    rates = by_family([_trajectory(True, family="b"), _trajectory(False, family="a"), _trajectory(True)])
    assert {name: (rate.successes, rate.episodes) for name, rate in rates.items()} == {
        "a": (0, 1),
        "b": (1, 1),
        "other": (1, 1),
    }
    assert list(rates) == ["a", "b", "other"]
