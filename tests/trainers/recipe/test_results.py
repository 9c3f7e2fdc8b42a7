"""Numbers of a run."""

from dataclasses import dataclass, field

from agentenv.trajectory import Trajectory
from agentenv_trainers.recipe import Parsed, RecipeArguments, evaluation_result
from agentenv_trainers.recipe.results import described, settings, versions


def episode(success=False, **info):
    return Trajectory(
        [1], [2, 3], [-0.1, 0.0], [True, False], [0, -1], reward=float(success), info=info, end_reason="x"
    )


def test_failed_episodes_are_counted_but_say_nothing_about_the_policy():
    result = evaluation_result([episode(True), episode(False), episode(False, failure="env_timeout")])
    assert result["success"] == 0.5
    assert result["episodes"] == 2
    assert result["action_tokens"] == 1.0
    assert result["failed"] == {"x": 1}


def test_success_is_told_by_family():
    result = evaluation_result([episode(True, family="clamp"), episode(False, family="clamp"), episode(True)])
    assert result["families"] == {"clamp": 0.5, "other": 1.0}


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


def test_a_run_says_how_it_was_started_without_secrets(tmp_path, monkeypatch):
    @dataclass
    class Config:
        seed: int = 0
        epochs: int = 3
        hub_token: str = "secret"

    given = {"seed": 4, "output_dir": "out", "hub_token": "secret"}
    parsed = Parsed(RecipeArguments(), Config(seed=4), given, frozenset(given))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["recipes/mine.py", "--seed", "4"])
    found = described(parsed)
    assert found["program"] == "recipes/mine.py"
    assert found["given"] == {"seed": 4}
    assert found["args"]["seed"] == 4 and "epochs" not in found["args"]
    assert found["settings"]["epochs"] == 3
    assert "secret" not in str(found)
    monkeypatch.setattr("sys.argv", ["/elsewhere/mine.py"])
    assert described(parsed)["program"] == "mine.py"


def test_versions_name_what_computed_a_result():
    assert {"python", "torch", "trl"} <= set(versions())
