"""Loading of baselines: names, lazy import, and one clear error for what cannot be found."""

import sys
from pathlib import Path

import gymnasium
import pytest

import agentenv
from agentenv.baselines import baseline_names, load_baseline, make_baseline
from agentenv.errors import UsageError
from agentenv.testing import EchoEnv
from agentenv.wrappers import TurnLimit


class Guess(agentenv.BaseEnv):
    policies = {  # noqa: RUF012
        "right": "guess_policies_of_this_test:Right",
        "gone": "no_such_module_anywhere:Right",
        "absent": "guess_policies_of_this_test:Wrong",
        "empty": "guess_policies_of_this_test",
    }


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "guess_policies_of_this_test.py").write_text(
        "class Right:\n"
        "    def __init__(self, env, seed):\n"
        "        self.made_for = (type(env).__name__, seed)\n"
        "    def begin(self, observation, info):\n"
        "        self.word = observation\n"
        "    def act(self, observation):\n"
        "        return self.word\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "guess_policies_of_this_test"
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_names_come_from_the_class_or_from_an_environment_however_wrapped() -> None:
    assert baseline_names(Guess) == ["absent", "empty", "gone", "right"]
    assert baseline_names(TurnLimit(Guess(), 3)) == ["absent", "empty", "gone", "right"]
    assert baseline_names(agentenv.BaseEnv()) == []


def test_a_baseline_is_imported_when_it_is_made_and_gets_the_environment_without_wrappers(
    module: str,
) -> None:
    wrapped = TurnLimit(Guess(), 3)
    assert module not in sys.modules
    made = make_baseline(wrapped, "right", seed=7)
    assert made.made_for == ("Guess", 7)  # type: ignore[attr-defined]
    made.begin("word", {})
    assert made.act("anything") == "word"


def test_a_class_needs_no_entry_where_it_is_named_in_full(module: str) -> None:
    assert load_baseline(EchoEnv, f"{module}:Right").__name__ == "Right"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rigth", "Guess has no policy 'rigth'; did you mean 'right'"),
        ("zzz", "it has absent, empty, gone, right"),
        ("gone", "policy 'gone' of Guess: there is no module 'no_such_module_anywhere'"),
        ("absent", "policy 'absent' of Guess: 'guess_policies_of_this_test' has no class 'Wrong'"),
        ("empty", "policy 'empty' of Guess must be 'module:Class', got 'guess_policies_of_this_test'"),
    ],
)
def test_what_cannot_be_found_is_one_error_that_names_it(module: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_baseline(Guess, name)


def test_a_module_that_a_baseline_lacks_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_something_of_this_test.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        load_baseline(Guess, "lacks_something_of_this_test:Right")


def test_policies_that_are_no_mapping_are_refused() -> None:
    class Odd(agentenv.BaseEnv):
        policies = ["random"]  # type: ignore[assignment]  # noqa: RUF012

    with pytest.raises(UsageError, match=r"policies of Odd must map names to 'module:Class', got list"):
        baseline_names(Odd)


def test_the_echo_oracle_says_the_word_and_the_random_one_seldom_does() -> None:
    env = gymnasium.make("agentenv/Echo-v0")
    rewards = {}
    for name in baseline_names(env):
        rewards[name] = []
        for seed in range(20):
            baseline = make_baseline(env, name, seed=seed)
            observation, info = env.reset(seed=seed)
            baseline.begin(observation, info)
            rewards[name].append(env.step(baseline.act(observation))[1])
    assert rewards["oracle"] == [1.0] * 20
    assert sum(rewards["random"]) < 10
