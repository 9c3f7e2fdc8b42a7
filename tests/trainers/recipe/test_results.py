"""Numbers of a run."""

from dataclasses import dataclass, field

import pytest

from agentenv.trajectory import Trajectory
from agentenv_trainers.recipe import evaluation_result, wilson_interval
from agentenv_trainers.recipe.results import settings, versions


def episode(success=False, **info):
    return Trajectory(
        [1], [2, 3], [-0.1, 0.0], [True, False], [0, -1], reward=float(success), info=info, end_reason="x"
    )


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    # Worked by hand from Wilson's formula with z = 1.959964.
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (256, 256, (0.9852, 1.0)), (0, 0, (0.0, 1.0))],
)
def test_wilsons_interval(successes, trials, expected):
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=5e-5)


def test_failed_episodes_are_counted_but_say_nothing_about_the_policy():
    result = evaluation_result([episode(True), episode(False), episode(False, failure="env_timeout")])
    assert result["success"] == 0.5
    assert result["episodes"] == 2
    assert result["action_tokens"] == 1.0
    assert result["failed"] == {"x": 1}


def test_an_evaluation_in_which_everything_failed_has_a_result():
    result = evaluation_result([episode(failure="env_timeout")])
    assert (result["success"], result["episodes"], result["interval"]) == (0.0, 0, [0.0, 1.0])


def test_settings_are_plain_and_hold_no_secret():
    @dataclass
    class Options:
        hub_token: str = "secret"
        levels: list = field(default_factory=lambda: [1, 2])
        thing: object = field(default_factory=object)

    result = settings(Options())
    assert set(result) == {"levels", "thing"}
    assert result["levels"] == [1, 2]
    assert isinstance(result["thing"], str)


def test_versions_name_what_computed_a_result():
    assert {"python", "torch", "trl"} <= set(versions())
