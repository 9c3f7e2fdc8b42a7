"""Math-v0: one turn, graded."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import agentenv
from agentenv.baselines import make_baseline
from agentenv.errors import UsageError
from agentenv.testing import check_env
from agentenv_envs.math_reasoning import MathEnv


def test_it_keeps_the_contract_of_environments() -> None:
    env = MathEnv()
    env.reset(seed=3)
    check_env(MathEnv(), actions=[rf"so \boxed{{{env.task.answer}}}"], seed=3)
    gymnasium_check_env(gymnasium.make("agentenv/Math-v0").unwrapped, skip_render_check=True)


@pytest.mark.parametrize("make", [agentenv.make, gymnasium.make])
def test_it_is_registered(make: object) -> None:
    env = make("agentenv/Math-v0", levels=[0])  # type: ignore[operator]
    observation, info = env.reset(seed=5)
    assert observation.startswith(r"Solve the problem and write the final answer in \boxed{}. Problem: ")
    assert info["level"] == 0 and info["task_id"].startswith(f"{info['family']}-0-")


def test_one_answer_ends_the_episode_and_only_the_right_one_is_rewarded() -> None:
    env = MathEnv()
    env.reset(seed=0)
    answer = env.task.answer
    _, reward, terminated, truncated, info = env.step(rf"\boxed{{1000003}} no: \boxed{{{answer}}}")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["success"] is True and info["expected"] == answer
    assert info["metrics"] == {"turns": 1.0, "invalid_actions": 0.0, "answered": 1.0, "verifier_stopped": 0.0}
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(rf"\boxed{{{answer}}} no: \boxed{{1000003}}")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(r"\boxed{1}")


@pytest.mark.parametrize(
    "action", ["7", "", r"\boxed{}", r"\boxed{7", r"<think>\boxed{7}</think> it is 7", "x" * 1_000_000]
)
def test_an_action_without_an_answer_is_told_so_and_counted(action: str) -> None:
    env = MathEnv()
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(action)
    assert r"\boxed{}" in observation and (reward, terminated) == (0.0, True)
    assert info["malformed"] is True
    assert info["metrics"]["invalid_actions"] == 1.0 and info["metrics"]["answered"] == 0.0


def test_an_answer_of_a_megabyte_is_wrong_and_is_not_repeated_in_info() -> None:
    env = MathEnv()
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(r"\boxed{" + "7" * 1_000_000 + "}")
    assert (reward, terminated) == (0.0, True)
    assert len(info["answer"]) <= 200 and info["decided_by"] == "size"


def test_the_oracle_is_always_right_and_guessing_seldom() -> None:
    env = MathEnv(split="heldout", levels=(0, 1, 2, 3, 4))
    scores = {}
    for name in ("oracle", "random"):
        baseline = make_baseline(env, name, 0)
        won = 0.0
        for seed in range(300):
            baseline.begin(*env.reset(seed=seed))
            won += env.step(baseline.act(env.reset(seed=seed)[0]))[1]
        scores[name] = won / 300
    assert scores["oracle"] == 1.0
    assert scores["random"] < 0.1


def test_an_instruction_of_ones_own_stands_before_the_problem() -> None:
    env = MathEnv(instruction="Q: ")
    observation, _ = env.reset(seed=0)
    assert observation == f"Q: {env.task.problem}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "validation"}, "split must be of train, heldout, got 'validation'"),
        ({"levels": (0, 9)}, "levels"),
        ({"families": ["geometry"]}, "families"),
        ({"fields": {"problem": "q", "answer": "a"}}, "fields.*name a dataset"),
        ({"dataset_config": "en"}, "dataset_config.*name a dataset"),
        ({"heldout_share": 0.1}, "heldout_share"),
        ({"split": 3}, "split is 3; it has to be text, or None"),
        ({"dataset": ""}, "dataset is ''"),
        ({"instruction": 7}, "instruction is 7"),
        ({"levels": 0}, "levels must be a list"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        MathEnv(**arguments)  # type: ignore[arg-type]
