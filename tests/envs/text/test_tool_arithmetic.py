"""ToolArithmetic-v0: the calculator, the question, and the answer."""

import random

import pytest

from agentenv_envs.text import ToolArithmeticEnv
from agentenv_envs.text.tool_arithmetic import Calculation


@pytest.fixture
def env() -> ToolArithmeticEnv:
    """(38 * 22) + 31 = 867."""
    env = ToolArithmeticEnv(split="heldout")
    first, _ = env.reset(seed=0)
    assert first.endswith("What is (38 * 22) + 31?")
    return env


def test_the_calculator_is_exact_and_takes_any_numbers(env: ToolArithmeticEnv) -> None:
    calls = ("add 38 22", "sub 22 38", "mul -7 111111111111", "MUL 999999999999 999999999999.")
    assert [env.step(call)[0] for call in calls] == [
        "60",
        "-16",
        "-777777777777",
        "999999999998000000000001",
    ]


def test_the_right_answer_is_rewarded_with_or_without_the_calculator(env: ToolArithmeticEnv) -> None:
    assert env.step("mul 38 22")[:4] == ("836", 0.0, False, False)
    assert env.step("add 31 836")[:4] == ("867", 0.0, False, False)
    assert env.step("answer 867")[:4] == ("", 1.0, True, False)
    env.reset(seed=0)
    assert env.step("answer 867")[:4] == ("", 1.0, True, False)


def test_a_wrong_answer_ends_the_episode_without_reward(env: ToolArithmeticEnv) -> None:
    _, reward, terminated, truncated, info = env.step("answer 836")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_five_turns_without_an_answer_are_truncated(env: ToolArithmeticEnv) -> None:
    for _ in range(4):
        assert env.step("mul 38 22")[2:4] == (False, False)
    assert env.step("mul 38 22")[2:4] == (False, True)


@pytest.mark.parametrize(
    "said", ["867", "add 38", "add 38 22 31", "div 38 22", "add 3.5 2", "answer", "add 1000000000000 1", ""]
)
def test_what_is_no_call_is_not_understood(env: ToolArithmeticEnv, said: str) -> None:
    text, _, _, _, info = env.step(said)
    assert text.startswith("Not understood: write add, sub or mul") and info["malformed"] is True


def test_a_mistake_can_be_made_up_for(env: ToolArithmeticEnv) -> None:
    env.step("add 38 22")
    assert env.solutions() == ["mul 38 22"]
    env.step("mul 38 22")
    assert env.solutions() == ["add 836 31"]
    assert set(env.mistakes()) == {"sub 836 31", "mul 836 31", "add 836 22", "answer 836"}


def test_a_calculation_goes_from_left_to_right() -> None:
    calculation = Calculation(7, (("add", 3), ("mul", 4), ("sub", 15)))
    assert calculation.values == [7, 10, 40, 25]
    assert str(calculation) == "((7 + 3) * 4) - 15"
    assert eval(str(calculation)) == 25


@pytest.mark.parametrize(("operations", "digits"), [(1, 1), (2, 2), (4, 2)])
def test_questions_have_the_asked_size_mean_what_they_say_and_stay_above_zero(
    operations: int, digits: int
) -> None:
    env = ToolArithmeticEnv(operations=operations, digits=digits)
    for seed in range(200):
        first, _ = env.reset(seed=seed)
        numbers = [env.task.first, *(operand for _, operand in env.task.operations)]
        assert len(numbers) == operations + 1 and {len(str(number)) for number in numbers} == {digits}
        assert min(env.task.values) >= 0
        assert eval(first.partition("What is ")[2].rstrip("?")) == env.task.values[-1]


def test_the_oracle_uses_one_turn_for_each_operation(env: ToolArithmeticEnv) -> None:
    rng = random.Random(0)
    assert [env.step(env.demonstrate(1.0, rng))[0] for _ in range(3)] == ["836", "867", ""]
