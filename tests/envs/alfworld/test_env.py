"""ALFWorld-v0 as rollouts see it."""

import asyncio
import functools
import random
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import agentenv
from agentenv.baselines import baseline_names, make_baseline
from agentenv.errors import UsageError
from agentenv.rollout.workers import make_worker, worker_kind
from agentenv.testing import check_env
from agentenv_envs.alfworld import ALFWorldEnv
from agentenv_envs.alfworld.generate import synthetic_game
from agentenv_envs.alfworld.household import FAMILIES

pytestmark = pytest.mark.usefixtures("engine_installed")


def play(env: ALFWorldEnv, policy: str, seed: int) -> tuple[float, int, dict[str, Any]]:
    baseline = make_baseline(env, policy, seed)
    observation, info = env.reset(seed=seed)
    baseline.begin(observation, info)
    turns, done, reward = 0, False, 0.0
    while not done:
        observation, reward, terminated, truncated, info = env.step(baseline.act(observation))
        turns += 1
        done = terminated or truncated
    return reward, turns, info


def test_the_contract_is_kept_over_a_whole_solution() -> None:
    game = synthetic_game(4, size="small")
    check_env(ALFWorldEnv(size="small"), actions=[*(game.walkthrough or ())], seed=4)


def test_gymnasiums_own_checker_passes_and_both_ways_make_it() -> None:
    from gymnasium.utils.env_checker import check_env as gymnasium_check

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("agentenv/ALFWorld-v0", size="small")
        gymnasium_check(env.unwrapped, skip_render_check=True)
        env.close()
    made = agentenv.make("ALFWorld-v0", size="small")
    assert type(made) is ALFWorldEnv
    made.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_wins_ten_games_of_each_family(family: str) -> None:
    env = ALFWorldEnv(split="heldout", families=[family])
    played = [play(env, "oracle", seed) for seed in range(10)]
    env.close()
    assert [reward for reward, _, _ in played] == [1.0] * 10
    for _, turns, info in played:
        assert info["success"] and info["metrics"] == {"turns": turns, "invalid_actions": 0}
        assert turns <= 16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_demonstrator_wins_from_anywhere(family: str) -> None:
    env = ALFWorldEnv(split="heldout", families=[family], max_turns=100)
    for seed in range(6):
        env.reset(seed=seed)
        rng = random.Random(seed)
        ended = reward = 0.0
        for turn in range(100):
            # 40 turns of chance, so that other things are in the hand, moved and opened; then the straight way.
            action = env.demonstrate(0.3 if turn < 40 else 1.0, rng)
            assert action in env.commands
            _, reward, ended, _, _ = env.step(action)
            if ended:
                break
        assert reward == 1.0 and turn < 40 + 20, (seed, turn)
    env.close()


def test_random_commands_rarely_win() -> None:
    env = ALFWorldEnv(split="heldout")
    assert baseline_names(env) == ["oracle", "random"]
    played = [play(env, "random", seed) for seed in range(60)]
    env.close()
    assert sum(reward for reward, _, _ in played) < 6
    assert all(info["metrics"]["invalid_actions"] == 0 for _, _, info in played)
    assert all(turns == 50 for reward, turns, _ in played if not reward)


def test_a_command_in_any_spelling_is_valid_and_another_costs_a_turn() -> None:
    game = synthetic_game(2, size="small")
    env = ALFWorldEnv(size="small", max_turns=8)
    observation, info = env.reset(seed=2)
    assert info["task_id"] == game.task_id and info["family"] == game.task.family
    assert info["synthetic"] is True
    assert f"Your task is to: {game.sentence}." in observation
    assert "You do a task in a household." in observation and "8 turns" in observation
    assert observation.endswith(f"Admissible commands: {', '.join(info['admissible_commands'])}")
    command = (game.walkthrough or ())[0]
    _, _, _, _, said = env.step(f"<think>hm</think><action> {command.upper()}. </action>")
    assert said["action_valid"] and said["command"] == command
    for wrong in ("fly", "", "x" * 1_000_000, "open"):
        answer, reward, terminated, truncated, said = env.step(wrong)
        assert answer.startswith("Nothing happens.\n\nAdmissible commands: ")
        assert (reward, terminated, truncated, said["action_valid"]) == (0.0, False, False, False)
    for _ in range(3):
        _, reward, terminated, truncated, said = env.step("look")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert said["success"] is False and said["metrics"] == {"turns": 8, "invalid_actions": 4}
    assert said["invalid_actions"] == 4
    with pytest.raises(RuntimeError, match="step before reset"):
        env.step("look")
    env.close()


def test_put_is_move() -> None:
    seed = next(seed for seed in range(99) if synthetic_game(seed).task.family == FAMILIES[0])
    env = ALFWorldEnv()
    env.reset(seed=seed)
    commands = list(env.game.walkthrough or ())
    thing, _, place = commands[-1].removeprefix("move ").partition(" to ")
    commands[-1] = f"put {thing} in/on {place}"
    for command in commands:
        text, reward, terminated, _, _ = env.step(command)
    assert (reward, terminated) == (1.0, True)
    assert text == f"You move the {thing} to the {place}."
    env.close()


def test_the_commands_can_be_left_out_and_games_can_be_counted() -> None:
    env = ALFWorldEnv(size="small", show_commands=False, num_games=3)
    observation, info = env.reset(seed=1)
    assert "Admissible" not in observation and info["admissible_commands"]
    assert env.reset(seed=4)[1]["task_id"] == info["task_id"]
    assert env.reset(seed=5)[1]["task_id"] != info["task_id"]
    env.prefetch([0, 1, 2])
    assert env.reset(seed=0)[0]
    env.close()
    assert env.reset(seed=1)[0] == observation
    env.close()


def test_the_real_game_is_won_by_the_oracle(real_game: Path) -> None:
    env = ALFWorldEnv(split="valid_seen", data=str(real_game.parents[3]))
    reward, turns, info = play(env, "oracle", 0)
    env.close()
    assert (reward, turns, info["success"]) == (1.0, 6, True)
    reset_info = env.reset(seed=0)[1]
    rng = random.Random(0)
    for _ in range(12):
        env.step(rng.choice(env.commands))
    won = False
    while not won:
        _, _, won, truncated, _ = env.step(env.solution())
        assert not truncated
    env.reset(seed=0)
    assert reset_info["synthetic"] is False
    assert reset_info["task_id"] == "pick_heat_then_place_in_recep-Potato-None-SinkBasin-14/trial_T1"
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_turns": 0}, "max_turns must be a whole number of at least 1, got 0"),
        ({"show_commands": "no"}, "show_commands must be true or false, got 'no'"),
        ({"cache_dir": 5}, "cache_dir must be the name of a folder or None, got 5"),
        ({"cache_dir": ""}, "cache_dir must be the name of a folder or None, got ''"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ALFWorldEnv(**arguments)


def test_an_episode_in_a_process_of_its_own_is_the_same() -> None:
    env_fn = functools.partial(agentenv.make, "ALFWorld-v0", size="small")
    assert worker_kind(env_fn) == "process"
    game = synthetic_game(4, size="small")

    async def episode() -> tuple[str, float]:
        worker = make_worker("process", env_fn, "alfworld")
        deadline = asyncio.get_running_loop().time() + 60
        try:
            text, _ = await worker.reset(4, deadline)
            reward = 0.0
            for command in game.walkthrough or ():
                _, reward, _, _, _ = await worker.step(command, deadline)
        finally:
            worker.end()
            await worker.join(deadline)
        return text, reward

    text, reward = asyncio.run(episode())
    env = ALFWorldEnv(size="small")
    assert (text, reward) == (env.reset(seed=4)[0], 1.0)
    env.close()
