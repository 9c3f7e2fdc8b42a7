"""What is recorded for a token is what training used: against the loss's own inputs, and computed anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentenv.report.token_records import EpisodeTokens, SegmentTokens
from agentenv.trajectory import Segment, Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOTrainer
from agentenv_trainers.objectives import double_sided_regions, length_adaptive_lambda, skip_observation_gae
from agentenv_trainers.testing import ReplayController
from agentenv_trainers.token_recorder import TokenRecorder

MakeTrainer = Callable[..., SAOTrainer]
MakeEpisodes = Callable[..., list[Trajectory]]


class Kept(list[EpisodeTokens]):
    """What a recorder handed on, a step at a time."""

    def __init__(self, *, most_steps: float = math.inf) -> None:
        super().__init__()
        self.steps = 0
        self._most = most_steps

    def __call__(self, episodes: Sequence[EpisodeTokens]) -> bool:
        self.extend(episodes)
        self.steps += 1
        return self.steps < self._most


def record(trainer: Any, tokens: int = 10_000, **options: Any) -> Kept:
    """Train with a recorder."""
    kept: Kept = options.pop("kept", Kept())
    trainer.token_recorder = TokenRecorder(kept, trainer.processing_class, tokens_per_step=tokens, **options)
    trainer.train()
    return kept


def actions(segment: SegmentTokens, name: str) -> torch.Tensor:
    """The numbers of the sampled tokens; there are none elsewhere."""
    column = getattr(segment, name)
    assert all(
        (value is not None) == mask for value, mask in zip(column, segment.action_mask, strict=True)
    ), name
    return torch.tensor([value for value in column if value is not None], dtype=torch.float64)


def test_sampled_tokens_have_the_numbers_of_the_episode_and_of_the_policy_before_the_step(
    make_trainer: MakeTrainer, make_policy: Callable[..., Qwen3ForCausalLM], make_episodes: MakeEpisodes
) -> None:
    trainer = make_trainer(max_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    kept = record(trainer)
    episodes = make_episodes(8, seed=0)
    before = make_policy()
    assert [item.episode_id for item in kept] == [item.episode_id for item in episodes]
    for found, episode in zip(kept, episodes, strict=True):
        (segment,) = found.segments
        ids = episode.prompt_ids + episode.completion_ids
        prompt = len(episode.prompt_ids)
        assert (found.step, found.phase) == (1, "train")
        assert segment.token_ids == ids
        assert segment.texts == [f"t{token}" for token in ids]
        assert segment.action_mask == [False] * prompt + episode.action_mask
        assert segment.policy_versions == [-1] * prompt + episode.policy_versions
        sampled = [x for x, mask in zip(episode.rollout_logprobs, episode.action_mask, strict=True) if mask]
        assert actions(segment, "rollout_logprobs").tolist() == pytest.approx(sampled)
        with torch.no_grad():
            logits = before(input_ids=torch.tensor([ids])).logits[0, :-1].double()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        expected = logprobs[torch.tensor(segment.action_mask[1:])]
        torch.testing.assert_close(actions(segment, "policy_logprobs"), expected, rtol=1e-4, atol=1e-5)
        ratios = (actions(segment, "policy_logprobs") - actions(segment, "rollout_logprobs")).exp()
        torch.testing.assert_close(actions(segment, "ratios"), ratios)


def test_what_the_double_sided_mask_leaves_out_is_marked(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=1, clip_low=0.2, clip_high=0.3)
    segments = [segment for episode in record(trainer) for segment in episode.segments]
    kept = torch.cat([actions(segment, "kept") for segment in segments]).bool()
    policy, rollout = (
        torch.cat([actions(segment, name) for segment in segments])
        for name in ("policy_logprobs", "rollout_logprobs")
    )
    regions = double_sided_regions(policy, rollout, clip_low=0.2, clip_high=0.3)
    assert torch.equal(kept, regions.accepted)
    assert regions.low.any() and regions.high.any() and regions.accepted.any()
    share = trainer.state.log_history[0]["masked_share"]
    assert 1.0 - kept.double().mean().item() == pytest.approx(share, abs=1e-6)


def test_a_log_prob_that_is_not_finite_is_none_and_its_token_not_kept(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    first, *others = make_episodes(8)
    place = first.action_mask.index(True)
    first.rollout_logprobs[place] = -math.inf
    trainer = make_trainer(max_steps=1, controller=ReplayController(lambda step: [first, *others]))
    (segment,) = record(trainer)[0].segments
    at = len(first.prompt_ids) + place
    assert (segment.rollout_logprobs[at], segment.ratios[at], segment.kept[at]) == (None, None, False)
    assert segment.policy_logprobs[at] is not None


def test_values_are_the_critics_and_advantages_those_that_follow_from_them(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    trainer = make_trainer(max_steps=1)
    kept = record(trainer)
    for found, episode in zip(kept, make_episodes(8), strict=True):
        (segment,) = found.segments
        # The critic is updated first, the advantages come from it, and nothing changes it afterwards. The value of a
        # token is read where it is predicted: at the token before.
        with torch.no_grad():
            values = trainer.critic(torch.tensor([segment.token_ids]))[0]
        expected = values[:-1][torch.tensor(segment.action_mask[1:])].double()
        found_values = actions(segment, "values")
        torch.testing.assert_close(found_values, expected, rtol=1e-4, atol=1e-5)
        count = found_values.numel()
        mask = torch.ones(1, count, dtype=torch.bool)
        rewards = torch.zeros(1, count, dtype=torch.float64)
        rewards[0, -1] = episode.reward
        advantages, _ = skip_observation_gae(
            rewards,
            found_values.unsqueeze(0),
            mask,
            gamma=1.0,
            gae_lambda=length_adaptive_lambda(torch.tensor([count]), alpha=trainer.args.lambda_alpha),
        )
        torch.testing.assert_close(actions(segment, "advantages"), advantages[0], rtol=1e-4, atol=1e-5)


def test_observations_have_values_too_where_the_recursion_does_not_skip_them(
    make_trainer: MakeTrainer,
) -> None:
    kept = record(make_trainer(max_steps=1, skip_observations=False))
    inner = [
        segment
        for episode in kept
        for segment in episode.segments
        if segment.action_mask[segment.action_mask.index(True) :].count(False)
    ]
    for segment in inner:
        first = segment.action_mask.index(True)
        last = len(segment.action_mask) - 1 - segment.action_mask[::-1].index(True)
        given = [value is not None for value in segment.values]
        assert given == [first <= i <= last for i in range(len(given))]
        actions(segment, "advantages")
    assert inner


def test_every_segment_of_a_forked_episode_is_recorded(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    earlier = Segment([2], [3, 4, 5], [-1.0, 0.0, -1.0], [True, False, True], [0, -1, 0])
    episode = replace(make_episodes(1)[0], earlier_segments=[earlier])
    controller = ReplayController(lambda step: [episode, replace(episode, episode_id="second", reward=0.0)])
    trainer = make_trainer(max_steps=1, per_device_train_batch_size=2, controller=controller)
    kept = record(trainer)
    assert [item.episode_id for item in kept] == [episode.episode_id, "second"]
    for item in kept:
        for segment, part in zip(item.segments, episode.split(), strict=True):
            assert segment.token_ids == part.prompt_ids + part.completion_ids
            assert segment.action_mask[len(part.prompt_ids) :] == part.action_mask
            actions(segment, "policy_logprobs")
            actions(segment, "advantages")


def test_while_only_the_critic_trains_the_policy_has_no_numbers(make_trainer: MakeTrainer) -> None:
    kept = record(make_trainer(max_steps=2, critic_only_steps=1))
    first, second = ([item for item in kept if item.step == step] for step in (1, 2))
    (segment,) = first[0].segments
    actions(segment, "rollout_logprobs")
    assert {*segment.policy_logprobs, *segment.advantages, *segment.values, *segment.kept} == {None}
    actions(second[0].segments[0], "policy_logprobs")


@pytest.fixture
def make_grpo(
    make_policy: Callable[..., Qwen3ForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
    make_episodes: MakeEpisodes,
    tmp_path: Path,
) -> Callable[..., GRPOTrainer]:
    """On one batch of two groups: rewards 1 0 0 0 and 1 1 0 0."""

    def batch(step: int) -> list[Trajectory]:
        rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
        episodes = make_episodes(8, seed=step, version=step)
        return [
            replace(item, reward=reward, group_id=f"g{index // 4}")
            for index, (item, reward) in enumerate(zip(episodes, rewards, strict=True))
        ]

    def make(**changes: Any) -> GRPOTrainer:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 8,
            "group_size": 4,
            "max_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }
        return GRPOTrainer(
            make_policy(), GRPOConfig(**{**settings, **changes}), ReplayController(batch), tokenizer
        )

    return make


def test_advantages_of_groups_are_recorded_and_there_are_no_values(make_grpo: Any) -> None:
    kept = record(make_grpo())
    # Rewards less the group's mean, over its sample standard deviation: 1 0 0 0 has 1/4 and 1/2, 1 1 0 0 1/2 and
    # sqrt(1/3).
    expected = [1.5, -0.5, -0.5, -0.5, *(sign * 0.75**0.5 for sign in (1, 1, -1, -1))]
    for item, advantage in zip(kept, expected, strict=True):
        (segment,) = item.segments
        assert actions(segment, "advantages").tolist() == pytest.approx(
            [advantage] * sum(segment.action_mask), abs=1e-3
        )
        assert set(segment.values) == {None}


def test_what_a_clip_stops_depends_on_the_advantages_sign(make_grpo: Any) -> None:
    trainer = make_grpo(objective="ppo_clip", clip_low=0.2, clip_high=0.2)
    segments = [segment for item in record(trainer) for segment in item.segments]
    ratios, advantages, kept = (
        torch.cat([actions(segment, name) for segment in segments])
        for name in ("ratios", "advantages", "kept")
    )
    stopped = ((ratios <= 0.8) & (advantages < 0)) | ((ratios >= 1.2) & (advantages > 0))
    assert torch.equal(kept.bool(), ~stopped)
    assert stopped.any() and (~stopped & ((ratios <= 0.8) | (ratios >= 1.2))).any()


def test_of_several_updates_on_a_batch_the_first_is_recorded(make_grpo: Any) -> None:
    kept = record(make_grpo(max_steps=4, policy_updates=2, objective="ppo_clip", learning_rate=0.1))
    assert [item.step for item in kept] == [1] * 8 + [3] * 8
    alone = record(make_grpo(max_steps=1, objective="ppo_clip"))
    assert kept[:8] == alone


def test_whole_episodes_are_recorded_as_far_as_the_tokens_of_a_step_reach_and_at_least_one(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    lengths = [len(item.prompt_ids) + len(item.completion_ids) for item in make_episodes(8)]
    names = [item.episode_id for item in make_episodes(8)]
    for tokens, expected in ((sum(lengths[:3]), 3), (sum(lengths[:3]) - 1, 2), (1, 1), (0, 0)):
        kept = record(make_trainer(max_steps=1), tokens)
        assert [item.episode_id for item in kept] == names[:expected], tokens
    assert len(record(make_trainer(max_steps=1), episodes_per_step=2)) == 2
    assert len(record(make_trainer(max_steps=1), episodes_per_step=0)) == 0


def test_episodes_that_are_not_trained_are_left_out(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    episodes = make_episodes(8)
    episodes[1] = replace(episodes[1], info={"failure": "sandbox"})
    trainer = make_trainer(max_steps=1, controller=ReplayController(lambda step: episodes))
    assert [item.episode_id for item in record(trainer)] == [
        item.episode_id for item in episodes if not item.failed
    ]


def test_a_full_store_ends_the_recording(make_trainer: MakeTrainer) -> None:
    kept = record(make_trainer(max_steps=3), kept=Kept(most_steps=2))
    assert {item.step for item in kept} == {1, 2}
    assert kept.steps == 2


def test_recording_changes_nothing_that_is_trained(make_trainer: MakeTrainer) -> None:
    plain, recorded = make_trainer(max_steps=2), make_trainer(max_steps=2)
    plain.train()
    record(recorded)
    for (name, one), (_, other) in zip(
        plain.model.named_parameters(), recorded.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
