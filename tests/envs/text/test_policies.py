"""Baselines of the text environments: what each is worth, and that none is told more than it may know."""

import pytest

import agentenv
from agentenv.baselines import baseline_names, make_baseline

EPISODES = 200


def _play(name: str, policy: str, seed: int) -> tuple[float, list[str], int]:
    env = agentenv.make(name, split="heldout")
    baseline = make_baseline(env, policy, seed)
    observation, info = env.reset(seed=seed)
    baseline.begin(observation, info)
    actions, malformed, done = [], 0, False
    reward = 0.0
    while not done:
        actions.append(baseline.act(observation))
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        malformed += info["malformed"]
        done = terminated or truncated
    return reward, actions, malformed


def test_the_oracle_solves_every_task_and_random_few_and_scripted_lies_between(name: str) -> None:
    assert baseline_names(agentenv.make(name)) == ["oracle", "random", "scripted"]
    success = {}
    for policy in ("oracle", "random", "scripted"):
        played = [_play(name, policy, seed) for seed in range(EPISODES)]
        assert sum(malformed for _, _, malformed in played) == 0
        success[policy] = sum(reward for reward, _, _ in played) / EPISODES
    assert success["oracle"] == 1.0
    assert success["random"] < 0.25
    assert success["random"] < success["scripted"] < 1.0


@pytest.mark.parametrize("policy", ["oracle", "random", "scripted"])
def test_the_same_seed_acts_alike(name: str, policy: str) -> None:
    assert _play(name, policy, 3) == _play(name, policy, 3)
