"""Our environments in gymnasium's vector environments and wrappers; runs the example of docs/interop.md."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics

import agentenv
from agentenv.testing import EchoEnv

VECTORS = [partial(SyncVectorEnv), partial(AsyncVectorEnv, shared_memory=False)]


def words(observations: Any) -> list[str]:
    """The word that each first observation names."""
    return [text.removesuffix(".").split()[-1] for text in observations]


def make(
    count: int, kind: Callable[..., VectorEnv[Any, Any, Any]], **options: Any
) -> VectorEnv[Any, Any, Any]:
    return kind([partial(agentenv.make, "Echo-v0")] * count, **options)


@pytest.mark.parametrize("kind", VECTORS, ids=["sync", "async"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_vector_of_environments_is_each_of_them_step_by_step(
    kind: Callable[..., VectorEnv[Any, Any, Any]], mode: AutoresetMode
) -> None:
    envs = make(3, kind, autoreset_mode=mode)
    try:
        observations, infos = envs.reset(seed=[5, 6, 7])
        alone = [EchoEnv().reset(seed=seed) for seed in (5, 6, 7)]
        assert list(observations) == [observation for observation, _ in alone]
        assert list(infos["task_id"]) == [info["task_id"] for _, info in alone]
        first, _, third = words(observations)
        observations, rewards, terminations, truncations, infos = envs.step([first, "no", third])
        assert list(rewards) == [1.0, 0.0, 1.0]
        assert list(terminations) == [True, False, True] and not truncations.any()
        if mode is AutoresetMode.SAME_STEP:
            assert [text[:8] for text in observations] == ["Say the ", "You said", "Say the "]
            assert infos["final_obs"][0] == "Right." and infos["final_info"]["success"][0]
        else:
            assert list(observations) == ["Right.", "You said: no", "Right."]
            assert list(infos["success"]) == [True, False, True]
            observations, rewards, terminations, _, _ = envs.step(["ignored", "no", "ignored"])
            assert [text[:8] for text in observations] == ["Say the ", "You said", "Say the "]
            assert list(rewards) == [0.0, 0.0, 0.0] and not terminations.any()
    finally:
        envs.close()


def test_without_autoreset_the_one_who_steps_says_which_begin_anew() -> None:
    envs = make(2, SyncVectorEnv, autoreset_mode=AutoresetMode.DISABLED)
    observations, _ = envs.reset(seed=[5, 6])
    _, _, ended, _, _ = envs.step([words(observations)[0], "no"])
    observations, _ = envs.reset(options={"reset_mask": np.array(ended)})
    assert observations[0].startswith("Say the word") and observations[1] == "You said: no"
    envs.close()


def test_spaces_of_a_vector_sample_what_its_environments_take() -> None:
    envs = make(2, SyncVectorEnv)
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    assert len(actions) == 2 and all(isinstance(action, str) for action in actions)
    assert actions in envs.action_space
    envs.step(actions)
    envs.close()


def test_statistics_of_episodes_are_recorded_by_gymnasiums_wrappers() -> None:
    envs = RecordVectorStatistics(make(2, SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP))
    observations, _ = envs.reset(seed=[5, 6])
    envs.step(["no", "no"])
    *_, infos = envs.step([words(observations)[0], "no"])
    assert infos["episode"]["r"][0] == 1.0 and infos["episode"]["l"][0] == 2
    assert list(infos["_episode"]) == [True, False]
    envs.close()


def test_a_time_limit_and_statistics_wrap_one_environment() -> None:
    env = RecordEpisodeStatistics(TimeLimit(agentenv.make("GuessNumber-v0"), max_episode_steps=2))
    env.reset(seed=0)
    assert env.step("0")[2:4] == (False, False)
    _, _, terminated, truncated, info = env.step("0")
    assert (terminated, truncated, info["episode"]["l"]) == (False, True, 2)
    env.close()


def test_gymnasium_makes_vectors_of_registered_ids() -> None:
    envs = gymnasium.make_vec("agentenv/GuessNumber-v0", num_envs=2, vectorization_mode="sync", numbers=8)
    observations, _ = envs.reset(seed=[1, 2])
    assert list(observations) == [agentenv.make("GuessNumber-v0", numbers=8).reset(seed=s)[0] for s in (1, 2)]
    envs.close()


def test_the_example_of_the_documentation_runs(documented: Callable[..., str]) -> None:
    exec(documented("SyncVectorEnv"), found := {})
    assert list(found["rewards"]) == [0.0] * 4
