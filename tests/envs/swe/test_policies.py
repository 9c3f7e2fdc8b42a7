"""Baselines of SWE-v0 on embedded tasks, in real sandboxes."""

from collections.abc import Iterator

import pytest

from agentenv.baselines import make_baseline
from agentenv.errors import UsageError
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.embedded import generate_task


@pytest.fixture(scope="module")
def env() -> Iterator[SWEEnv]:
    env = SWEEnv(sandbox="local-unisolated", split="heldout", levels=(1, 2, 3, 4), max_turns=12)
    yield env
    env.close()


def _play(env: SWEEnv, policy: str, seed: int) -> tuple[float, list[str]]:
    baseline = make_baseline(env, policy, seed)
    observation, info = env.reset(seed=seed)
    baseline.begin(observation, info)
    actions: list[str] = []
    while True:
        actions.append(baseline.act(observation))
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            return reward, actions


def test_the_oracle_solves_tasks_of_every_level_in_three_turns(env: SWEEnv) -> None:
    seeds: dict[int, list[int]] = {}
    for seed in range(40):
        task = generate_task(seed, split="heldout", levels=(1, 2, 3, 4))
        seeds.setdefault(task.level, []).append(seed)
    assert sorted(seeds) == [1, 2, 3, 4]
    for level, some in seeds.items():
        for seed in some[:3]:
            reward, actions = _play(env, "oracle", seed)
            assert (reward, len(actions)) == (1.0, 3), (level, seed)


def test_a_random_edit_seldom_solves_a_task_and_guess_and_test_more_often() -> None:
    env = SWEEnv(sandbox="local-unisolated", split="heldout", max_turns=12)
    try:
        solved = {
            name: sum(_play(env, name, seed)[0] for seed in range(8)) for name in ("random", "scripted")
        }
    finally:
        env.close()
    assert solved["random"] < solved["scripted"] < 8


def test_another_protocol_is_refused_by_name() -> None:
    env = SWEEnv(sandbox="local-unisolated", protocol="r2e")
    try:
        baseline = make_baseline(env, "oracle")
        with pytest.raises(UsageError, match=r"speaks the protocol 'bash' only, not 'r2e'"):
            baseline.begin(*env.reset(seed=0))
    finally:
        env.close()
