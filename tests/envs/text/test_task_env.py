"""What all text environments have in common: the contract, tasks by seed, disjoint splits, turns, demonstrators."""

import random
import subprocess
import sys
from typing import Any

import pytest

import agentenv
from agentenv.errors import UsageError
from agentenv.testing import check_env
from agentenv_envs.text.task_env import TextTaskEnv


def test_the_contract_is_kept_on_a_solution_and_on_nonsense(name: str) -> None:
    env: TextTaskEnv[Any] = agentenv.make(name, split="heldout")  # type: ignore[assignment]
    for seed in range(5):
        rng = random.Random(seed)
        env.reset(seed=seed)
        actions, ended = [], False
        while not ended:
            actions.append(env.demonstrate(1.0, rng))
            ended = any(env.step(actions[-1])[2:4])
        check_env(env, actions=actions, seed=seed)


def test_it_runs_in_the_event_loop_itself(name: str) -> None:
    assert agentenv.make(name).unwrapped.worker == "inline"  # type: ignore[attr-defined]


SMALL: dict[str, dict[str, int]] = {
    "KeyDoor-v0": {"size": 3},  # 504 tasks
    "GuessNumber-v0": {},  # 2176
    "ToolArithmetic-v0": {"operations": 1, "digits": 1},  # 207
    "StyledReply-v0": {"items": 2},  # 8064
}
"""Few tasks, so that a few thousand seeds bring many of them in either split."""


def test_no_task_is_in_both_splits(name: str) -> None:
    def tasks(split: str) -> set[Any]:
        env: TextTaskEnv[Any] = agentenv.make(name, split=split, **SMALL[name])  # type: ignore[assignment]
        found = set()
        for seed in range(3000):
            env.reset(seed=seed)
            found.add(env.task)
        return found

    train, heldout = tasks("train"), tasks("heldout")
    assert len(train) > 120 and len(heldout) > 25
    assert not train & heldout


def test_the_share_of_held_out_tasks_is_a_fifth() -> None:
    env: TextTaskEnv[Any] = agentenv.make("GuessNumber-v0", split="heldout")  # type: ignore[assignment]
    found = set()
    for seed in range(20_000):
        env.reset(seed=seed)
        found.add(env.task)
    # 68 ranges of 32 numbers: 2176 tasks, of which 435 would be a fifth; the standard deviation is 19.
    assert 435 - 4 * 19 < len(found) < 435 + 4 * 19


def test_a_seed_is_the_same_task_in_every_process(name: str) -> None:
    env = agentenv.make(name)
    here = [env.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert len(set(here)) > 15
    script = f"import agentenv; e = agentenv.make({name!r}); [print(e.reset(seed=s)[1]['task_id']) for s in range(20)]"
    there = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert there.split() == here


def test_without_a_seed_the_tasks_follow_from_the_last_one(name: str) -> None:
    env = agentenv.make(name)
    runs = []
    for _ in range(2):
        env.reset(seed=3)
        runs.append([env.reset()[1]["task_id"] for _ in range(10)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 5


def test_the_oracle_always_reaches_the_end_and_the_careless_rarely(name: str, play: Any) -> None:
    env = agentenv.make(name, split="heldout")
    rng = random.Random(0)
    oracle = [play(env, seed=seed, skill=1.0, rng=rng)[-1] for seed in range(300)]
    careless = [play(env, seed=seed, skill=0.0, rng=rng)[-1] for seed in range(300)]
    if name == "StyledReply-v0":
        assert all(step[4]["quality"] == 1 for step in oracle)
        assert all(step[4]["quality"] == 0 for step in careless)
    else:
        assert all(step[:4][1:] == (1.0, True, False) and step[4]["success"] for step in oracle)
        # Guessing anything finds one of 32 numbers in 6 attempts in 6/32 = 19 % at most, but for excluded middles.
        assert sum(step[4]["success"] for step in careless) < 0.25 * 300


def test_mistakes_are_understood_and_are_no_solutions(name: str) -> None:
    env: TextTaskEnv[Any] = agentenv.make(name)  # type: ignore[assignment]
    for seed in range(50):
        rng = random.Random(seed)
        env.reset(seed=seed)
        ended = False
        while not ended:
            assert not set(env.mistakes()) & set(env.solutions())
            _, _, terminated, truncated, info = env.step(env.demonstrate(0.7, rng))
            assert info["malformed"] is False
            ended = terminated or truncated


def test_nonsense_is_answered_by_one_line_costs_a_turn_and_is_counted(name: str) -> None:
    env = agentenv.make(name)
    env.reset(seed=0)
    limit = env.unwrapped.max_turns  # type: ignore[attr-defined]
    for turn in range(1, limit + 1):
        text, reward, terminated, truncated, info = env.step("```bash\nrm -rf /\n```")
        assert "\n" not in text and reward == 0.0
        assert info["malformed"] is True and info["malformed_actions"] == turn
    if name == "StyledReply-v0":
        assert terminated and not truncated
    else:
        assert truncated and not terminated
        assert text.startswith("Not understood: write ")
    assert info["success"] is False
    assert info["metrics"]["malformed_actions"] == limit and info["metrics"]["turns"] == limit


def test_a_step_needs_a_running_episode(name: str, play: Any) -> None:
    env = agentenv.make(name)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("north")
    play(env, seed=0)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("north")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("KeyDoor-v0", {"split": "test"}, "split must be one of train, heldout, got 'test'"),
        ("KeyDoor-v0", {"size": 1}, "size must be a whole number from 2 to 9, got 1"),
        ("KeyDoor-v0", {"size": 2.5}, "size must be a whole number from 2 to 9, got 2.5"),
        ("KeyDoor-v0", {"max_turns": 3}, "max_turns must be 4 or more, got 3"),
        ("GuessNumber-v0", {"numbers": 1}, "numbers must be a whole number from 2 to 99, got 1"),
        ("GuessNumber-v0", {"max_turns": 0}, "max_turns must be a whole number from 1 to 10000, got 0"),
        ("ToolArithmetic-v0", {"operations": 5}, "operations must be a whole number from 1 to 4, got 5"),
        ("ToolArithmetic-v0", {"digits": True}, "digits must be a whole number from 1 to 2, got True"),
        ("StyledReply-v0", {"wanted": "rude"}, "wanted must be one of plain, polite, loud, got 'rude'"),
        ("StyledReply-v0", {"items": 9}, "items must be a whole number from 2 to 8, got 9"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        agentenv.make(name, **arguments)
    assert str(caught.value).startswith(message)
