"""Trajectories: invariants, JSON round trip, success."""

import dataclasses
import json

import pytest

from agentenv.trajectory import Segment, Trajectory


def _trajectory() -> Trajectory:
    return Trajectory(
        prompt_ids=[1, 2],
        completion_ids=[3, 4, 5],
        rollout_logprobs=[-0.5, -0.25, 0.0],
        action_mask=[True, True, False],
        policy_versions=[0, 1, -1],
        reward=0.5,
        terminated=True,
        end_reason="terminated",
        episode_id="g0-0",
        messages=[{"role": "user", "content": "häh?"}],
        info={"success": True, "family": "f", "metrics": {"tries": 2.0}},
    )


def test_a_well_formed_trajectory_is_valid() -> None:
    _trajectory().validate()
    assert _trajectory().num_action_tokens == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rollout_logprobs": [-0.5, -0.25]}, "lengths differ"),
        ({"rollout_logprobs": [-0.5, 0.25, 0.0]}, "action token 1"),
        ({"rollout_logprobs": [float("nan"), -0.25, 0.0]}, "action token 0"),
        ({"rollout_logprobs": [-0.5, -0.25, -0.1]}, "observation token 2"),
        ({"policy_versions": [0, -1, -1]}, "action token 1"),
        ({"policy_versions": [0, 1, 1]}, "observation token 2"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"earlier_segments": [Segment([1], [2], [], [True], [0])]}, "lengths differ"),
    ],
)
def test_a_broken_invariant_is_named(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(_trajectory(), **change).validate()  # type: ignore[arg-type]


def test_json_gives_back_the_same_trajectory() -> None:
    original = dataclasses.replace(_trajectory(), earlier_segments=[Segment([9], [8], [-1.0], [True], [0])])
    text = original.to_json()
    assert "\n" not in text
    assert Trajectory.from_json(text) == original


@pytest.mark.parametrize("text", ["[]", "{}", '{"prompt_ids": [1], "no_such_field": 2}', "not json"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a trajectory|Expecting value"):
        Trajectory.from_json(text)


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(_trajectory(), reward=float("nan")).to_json()


def test_success_is_the_environments_word_before_the_rewards() -> None:
    assert not dataclasses.replace(_trajectory(), info={"success": False}).success
    assert dataclasses.replace(_trajectory(), info={}).success
    assert not dataclasses.replace(_trajectory(), info={}, reward=0.0).success


def test_split_gives_each_segment_the_reward() -> None:
    forked = dataclasses.replace(_trajectory(), earlier_segments=[Segment([9], [8], [-1.0], [True], [0])])
    first, last = forked.split()
    assert (forked.num_action_tokens, first.num_action_tokens, last.num_action_tokens) == (3, 1, 2)
    assert (first.prompt_ids, first.completion_ids, first.reward) == ([9], [8], 0.5)
    assert (last.prompt_ids, last.completion_ids, last.reward) == ([1, 2], [3, 4, 5], 0.5)
    assert not first.earlier_segments and not last.earlier_segments
    single = _trajectory()
    assert single.split() == [single]
    assert set(json.loads(single.to_json())) == {field.name for field in dataclasses.fields(Trajectory)}
