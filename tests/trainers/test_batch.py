"""Trajectories as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv.trajectory import Segment, Trajectory
from agentenv_trainers import collate

# Prompt of two tokens; actions (5, 6) and (8); observations 7 and, after the last action, 9.
EPISODE = Trajectory(
    prompt_ids=[3, 4],
    completion_ids=[5, 6, 7, 8, 9],
    rollout_logprobs=[-0.5, -0.6, 0.0, -0.8, 0.0],
    action_mask=[True, True, False, True, False],
    policy_versions=[1, 1, -1, 2, -1],
    reward=1.0,
    terminated=True,
    end_reason="terminated",
    episode_id="a",
)
SHORT = replace(
    EPISODE,
    completion_ids=[5],
    rollout_logprobs=[-0.5],
    action_mask=[True],
    policy_versions=[1],
    reward=0.0,
    terminated=False,
    truncated=True,
    end_reason="max_turns",
    episode_id="b",
)


def build(*trajectories: Trajectory, truncation: str = "bootstrap"):
    return collate(trajectories, pad_token_id=0, truncation=truncation)  # type: ignore[arg-type]


def test_a_row_is_prompt_and_completion_without_a_gap_padded_on_the_right() -> None:
    batch = build(EPISODE, SHORT)
    assert batch.input_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [7, 3]
    assert batch.action_mask[0].nonzero().flatten().tolist() == [2, 3, 5]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.8, -0.5])
    assert batch.policy_versions.tolist() == [1, 1, 2, 1]
    assert batch.step_ids.tolist() == [0, 0, 1, 0]
    assert batch.token_counts.tolist() == [3, 1]


def test_flat_values_go_to_episodes_and_back() -> None:
    batch = build(EPISODE, SHORT)
    padded, mask = batch.pad_episodes(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert padded.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    assert padded[mask].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch.spread(padded[mask])[0].tolist() == [0, 0, 1.0, 2.0, 0, 3.0, 0]


@pytest.mark.parametrize(
    ("truncation", "episodes", "bootstrapped", "dropped"),
    [
        ("bootstrap", 2, [False, True], {}),
        ("zero", 2, [False, False], {}),
        ("drop", 1, [False], {"truncated": 1}),
    ],
)
def test_each_way_with_truncated_episodes(
    truncation: str, episodes: int, bootstrapped: list[bool], dropped: dict[str, int]
) -> None:
    batch = build(EPISODE, SHORT, truncation=truncation)
    assert batch.token_counts.numel() == episodes
    assert batch.truncated.tolist() == bootstrapped
    assert batch.dropped == dropped


def test_an_episode_that_terminated_at_its_limit_is_not_bootstrapped() -> None:
    both = replace(SHORT, terminated=True)
    assert build(both).truncated.tolist() == [False]
    assert build(both, truncation="drop").dropped == {}


def test_failed_episodes_and_those_without_actions_are_left_out_and_counted() -> None:
    failed = replace(EPISODE, info={"failure": "step_timeout"})
    silent = replace(
        EPISODE, completion_ids=[5], rollout_logprobs=[0.0], action_mask=[False], policy_versions=[-1]
    )
    batch = build(failed, silent, EPISODE)
    assert batch.dropped == {"failed": 1, "no_action_tokens": 1}
    assert batch.num_rows == 1


def test_a_batch_of_which_nothing_is_trained_still_goes_through_a_model() -> None:
    batch = build(SHORT, truncation="drop")
    assert batch.num_tokens == 0
    assert batch.token_counts.numel() == 0
    for part in batch.micro_batches(2):
        assert part.input_ids.size(1) >= 2
        assert not part.action_mask.any()


def test_the_segments_of_a_forked_episode_are_rows_of_one_episode() -> None:
    earlier = Segment(
        prompt_ids=[3],
        completion_ids=[5, 6],
        rollout_logprobs=[-0.1, -0.2],
        action_mask=[True, True],
        policy_versions=[1, 1],
    )
    forked = replace(SHORT, earlier_segments=[earlier])
    batch = build(forked, EPISODE)
    assert batch.num_rows == 3
    assert batch.token_counts.tolist() == [3, 3]
    assert batch.last_rows.tolist() == [1, 2]
    assert batch.step_ids.tolist() == [0, 0, 1, 0, 0, 1]
    assert batch.rollout_logprobs[:3].tolist() == pytest.approx([-0.1, -0.2, -0.5])


def test_an_empty_prompt_is_refused_by_episode() -> None:
    with pytest.raises(ValueError, match="'a' has an empty prompt"):
        build(replace(EPISODE, prompt_ids=[]))


def test_no_trajectories_are_refused() -> None:
    with pytest.raises(ValueError, match="no trajectories"):
        build()


def test_a_trajectory_that_breaks_its_invariants_is_refused() -> None:
    with pytest.raises(ValueError, match="'a'"):
        build(replace(EPISODE, policy_versions=[1]))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_episode_unless_the_episode_failed(reward: float) -> None:
    with pytest.raises(ValueError, match=f"'a': reward is {reward}, must be finite"):
        build(SHORT, replace(EPISODE, reward=reward))
    failed = replace(EPISODE, reward=reward, info={"failure": {"reason": "step_timeout"}})
    assert build(SHORT, failed).rewards.tolist() == [0.0]


def test_a_mask_of_zeros_and_ones_is_a_mask() -> None:
    numbers = replace(EPISODE, action_mask=[1, 1, 0, 1, 0])  # type: ignore[list-item]
    assert torch.equal(build(numbers, SHORT).action_mask, build(EPISODE, SHORT).action_mask)
    assert build(numbers).action_mask.dtype is torch.bool


def test_a_log_prob_that_is_not_finite_is_left_to_the_objective() -> None:
    batch = build(replace(SHORT, rollout_logprobs=[math.nan]))
    assert batch.rollout_logprobs.isnan().all()


@given(seed=st.integers(0, 1000), count=st.integers(1, 9), parts=st.integers(1, 12))
def test_micro_batches_hold_every_trained_token_once(
    make_episodes: Callable[..., list[Trajectory]], seed: int, count: int, parts: int
) -> None:
    batch = build(*make_episodes(count, seed=seed))
    pieces = batch.micro_batches(parts)
    assert len(pieces) == parts
    index = torch.cat([piece.token_index for piece in pieces])
    assert sorted(index.tolist()) == list(range(batch.num_tokens))
    tokens = batch.input_ids[batch.action_mask]
    for piece in pieces:
        assert piece.input_ids[piece.action_mask].tolist() == tokens[piece.token_index].tolist()
        assert not (piece.action_mask & ~piece.attention_mask).any()
    widths = [piece.input_ids.size(1) for piece in pieces]
    assert widths == sorted(widths, reverse=True)
