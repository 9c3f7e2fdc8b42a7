"""GuessNumber-v0: answers, limits, and bisection."""

import random

import pytest

from agentenv_envs.text import GuessNumberEnv


@pytest.fixture
def env() -> GuessNumberEnv:
    """57, from 37 to 68."""
    env = GuessNumberEnv(split="heldout")
    first, _ = env.reset(seed=2)
    assert first.endswith("You have 6 guesses. It is from 37 to 68.")
    assert env.task.number == 57
    return env


def test_guesses_are_answered_by_where_the_number_lies(env: GuessNumberEnv) -> None:
    assert [env.step(guess)[0] for guess in ("53", "61", "56", "58")] == [
        "higher",
        "lower",
        "higher",
        "lower",
    ]
    assert env.step("57")[:4] == ("right", 1.0, True, False)


def test_a_guess_outside_of_the_range_is_answered_like_any_other(env: GuessNumberEnv) -> None:
    assert env.step("0")[0] == "higher"
    assert env.step("999999999")[0] == "lower"
    assert env.solutions() == ["52", "53"]  # the middle of 37 to 68 is 52.5 still


def test_a_guess_against_what_is_known_takes_nothing_away_from_it(env: GuessNumberEnv) -> None:
    for guess in ("53", "40", "61", "68"):
        env.step(guess)
    assert env.solutions() == ["57"]  # from 54 to 60


def test_the_last_guess_may_still_win_and_ends_the_episode(env: GuessNumberEnv) -> None:
    for _ in range(5):
        assert env.step("37")[1:4] == (0.0, False, False)
    assert env.step("37")[:4] == ("higher", 0.0, False, True)
    env.reset(seed=2)
    for _ in range(5):
        env.step("37")
    assert env.step("57.")[:4] == ("right", 1.0, True, False)


@pytest.mark.parametrize("said", ["fifty", "-57", "5 7", "57!", "", "9" * 10])
def test_what_is_no_whole_number_is_not_understood(env: GuessNumberEnv, said: str) -> None:
    text, _, _, _, info = env.step(said)
    assert text == "Not understood: write a whole number from 37 to 68."
    assert info["malformed"] is True


@pytest.mark.parametrize(("numbers", "guesses"), [(2, 2), (3, 3), (4, 3), (16, 5), (32, 6), (33, 7), (99, 8)])
def test_bisection_finds_every_number_in_the_guesses_there_are(numbers: int, guesses: int) -> None:
    env = GuessNumberEnv(numbers=numbers)
    assert env.max_turns == guesses
    rng = random.Random(0)
    for seed in range(300):
        env.reset(seed=seed)
        assert env.task.high - env.task.low + 1 == numbers and env.task.low >= 1 and env.task.high <= 99
        reward, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.demonstrate(1.0, rng))
            ended = terminated or truncated
        assert reward == 1.0
