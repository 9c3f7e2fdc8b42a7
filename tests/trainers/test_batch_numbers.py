"""Numbers that describe a batch."""

from dataclasses import replace

import pytest

from agentenv.trajectory import Trajectory
from agentenv_trainers.batch_numbers import batch_numbers

WON = Trajectory(
    prompt_ids=[3, 4],
    completion_ids=[5, 6],
    rollout_logprobs=[-0.5, -0.6],
    action_mask=[True, True],
    policy_versions=[0, 0],
    reward=1.0,
    terminated=True,
)


def test_an_episode_that_failed_is_no_reward_of_zero():
    failed = replace(WON, reward=0.0, info={"failure": "infrastructure"})
    numbers = batch_numbers([WON, failed], "bootstrap", 0)
    assert (numbers["reward"], numbers["success"]) == (1.0, 1.0)
    assert numbers["untrained_trajectories"] == 1.0


def test_where_all_failed_reward_is_zero_and_all_are_untrained():
    failed = replace(WON, info={"failure": "infrastructure"})
    numbers = batch_numbers([failed], "bootstrap", 0)
    assert numbers["reward"] == pytest.approx(0.0)
    assert numbers["untrained_trajectories"] == 1.0
