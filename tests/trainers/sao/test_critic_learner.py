"""Order and targets of the critic's updates, truncation, value pretraining."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentenv.errors import UsageError
from agentenv.trajectory import Trajectory
from agentenv_trainers import Critic, SAOTrainer, collate
from agentenv_trainers.sao.critic_learner import CriticLearner
from agentenv_trainers.sao.value_pretraining import monte_carlo_returns
from agentenv_trainers.testing import ReplayController

MakeTrainer = Callable[..., SAOTrainer]
MakeEpisodes = Callable[..., list[Trajectory]]


def score(trainer: SAOTrainer) -> dict[str, Any]:
    trainer.push_weights()
    batch: dict[str, Any] = trainer._generate_and_score_completions([{}] * 8)
    return batch


def test_targets_are_made_once_then_k_updates_then_fresh_values_for_the_actor(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    real_values, real_update = CriticLearner.values, CriticLearner.update

    def values(self: CriticLearner, batch: Any) -> Any:
        result = real_values(self, batch)
        calls.append(("values", result.tokens.clone()))
        return result

    def update(self: CriticLearner, batch: Any, returns: torch.Tensor, *, updates: int) -> Any:
        calls.append(("update", (returns.clone(), updates)))
        return real_update(self, batch, returns, updates=updates)

    monkeypatch.setattr(CriticLearner, "values", values)
    monkeypatch.setattr(CriticLearner, "update", update)
    trainer = make_trainer(critic_updates=3, critic_lambda=0.5)
    trainer.critic.head.bias.data.fill_(0.25)
    score(trainer)
    assert [name for name, _ in calls] == ["values", "update", "values"]
    assert calls[1][1][1] == 3
    assert not torch.equal(calls[0][1], calls[2][1])  # the actor's values are of the updated critic


def test_at_lambda_one_no_values_are_computed_for_the_targets(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    real = CriticLearner.values

    def values(self: CriticLearner, batch: Any) -> Any:
        nonlocal count
        count += 1
        return real(self, batch)

    monkeypatch.setattr(CriticLearner, "values", values)
    score(make_trainer(critic_lambda=1.0))
    assert count == 1


def test_the_update_is_gradient_descent_on_the_mean_squared_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(critic_updates=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.critic.head.bias.data.fill_(0.25)  # with zero weights every value is 0.25
    score(trainer)
    batch = trainer.batch
    assert batch is not None
    returns = torch.repeat_interleave(batch.rewards, batch.token_counts)
    metrics = trainer._metrics["train"]
    assert metrics["critic_loss"][-1] == pytest.approx(((returns - 0.25) ** 2).mean().item(), rel=1e-5)
    # d/db of the mean of (b - R)^2 is the bias's part of the gradient; the norm is at least as large.
    assert metrics["critic_grad_norm"][-1] >= abs(2 * (0.25 - returns.mean().item())) - 1e-5


def test_the_critics_learning_rate_warms_up_by_training_steps(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(critic_warmup_steps=4, critic_learning_rate=1.0, critic_updates=2)
    rates = []
    for _ in range(5):
        rates.append(trainer.critic_learner._optimizer.param_groups[0]["lr"])
        trainer.critic_learner._optimizer.step()
        trainer.critic_learner._schedule.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def advantages_of(make_trainer: MakeTrainer, episodes: list[Trajectory], **changes: Any) -> torch.Tensor:
    trainer = make_trainer(
        controller=ReplayController(lambda step: episodes), critic_learning_rate=0.0, **changes
    )
    trainer.critic.head.bias.data.fill_(0.5)  # every value is 0.5
    batch = score(trainer)
    advantages: torch.Tensor = batch["advantages"][batch["tool_mask"].bool()]
    return advantages


def test_truncated_episodes_are_bootstrapped_or_not_as_set_and_never_as_if_terminated_by_accident(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    cut_off = [replace(t, reward=0.0) for t in make_episodes(8, truncated=True)]
    terminated = [replace(t, terminated=True, truncated=False, end_reason="terminated") for t in cut_off]
    # Values are 0.5 everywhere and no reward comes: bootstrapping leaves nothing to learn.
    bootstrap = advantages_of(make_trainer, cut_off, truncation="bootstrap")
    assert bootstrap.abs().max().item() < 1e-6
    zero = advantages_of(make_trainer, cut_off, truncation="zero")
    assert zero.max().item() < -0.2
    assert torch.equal(zero, advantages_of(make_trainer, terminated, truncation="bootstrap"))


def test_values_and_ends_are_those_of_the_states_before_a_token_and_after_the_end(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    episodes = make_episodes(3, truncated=True) + make_episodes(2, seed=1)
    trainer = make_trainer(gradient_accumulation_steps=4, per_device_train_batch_size=2)
    torch.nn.init.normal_(trainer.critic.head.weight)
    batch = trainer._collate(episodes)
    values, ends = trainer.critic_learner.values(batch)
    torch.testing.assert_close(trainer.critic_learner.end_values(batch), ends, rtol=1e-5, atol=1e-5)
    expected = []
    for index, episode in enumerate(episodes):
        with torch.no_grad():
            output = trainer.critic(torch.tensor([episode.prompt_ids + episode.completion_ids]))[0].tolist()
        first = len(episode.prompt_ids)
        expected += [output[first + i - 1] for i, is_action in enumerate(episode.action_mask) if is_action]
        assert ends[index].item() == pytest.approx(output[-1] if index < 3 else 0.0, abs=1e-5)
    assert values.tolist() == pytest.approx(expected, abs=1e-5)


def test_without_skipping_the_critic_is_read_and_trained_at_observation_tokens_too(
    make_trainer: MakeTrainer,
) -> None:
    # Prompt 5; the policy writes 6 7, the environment 8 9, the policy 3.
    episode = Trajectory(
        prompt_ids=[5],
        completion_ids=[6, 7, 8, 9, 3],
        rollout_logprobs=[-1.0, -1.0, 0.0, 0.0, -1.0],
        action_mask=[True, True, False, False, True],
        policy_versions=[0, 0, -1, -1, 0],
        reward=1.0,
        terminated=True,
        end_reason="terminated",
        start_version=0,
    )
    trainer = make_trainer(max_grad_norm=0.0)
    torch.nn.init.normal_(trainer.critic.head.weight)
    learner = trainer.critic_learner
    with torch.no_grad():
        output = trainer.critic(torch.tensor([[5, 6, 7, 8, 9, 3]]))[0]
    skipping = collate([episode], pad_token_id=0, truncation="zero")
    torch.testing.assert_close(learner.values(skipping).tokens, output[[0, 1, 4]])
    assert monte_carlo_returns(skipping, 0.5).tolist() == [0.25, 0.5, 1.0]
    whole = collate([episode], pad_token_id=0, truncation="zero", skip_observations=False)
    torch.testing.assert_close(learner.values(whole).tokens, output[:5])
    returns = monte_carlo_returns(whole, 0.5)
    assert returns.tolist() == [0.0625, 0.125, 0.25, 0.5, 1.0]
    update = learner.update(whole, returns, updates=1)
    assert update.loss == pytest.approx(((output[:5] - returns) ** 2).mean().item(), rel=1e-5)


def test_dropped_episodes_train_nothing(make_trainer: MakeTrainer, make_episodes: MakeEpisodes) -> None:
    mixed = make_episodes(4, seed=1) + make_episodes(4, seed=2, truncated=True)
    trainer = make_trainer(controller=ReplayController(lambda step: mixed), truncation="drop")
    batch = score(trainer)
    assert batch["num_items_in_batch"].item() == sum(t.num_action_tokens for t in mixed[:4])
    assert trainer._metrics["train"]["untrained_trajectories"][-1] == 4
    assert trainer._metrics["train"]["truncation_rate"][-1] == 0.5


def test_a_run_of_dropped_batches_changes_no_weight(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    trainer = make_trainer(
        controller=ReplayController(lambda step: make_episodes(8, truncated=True)),
        truncation="drop",
        gradient_accumulation_steps=2,
        max_steps=2,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert all(math.isfinite(p.sum().item()) for p in trainer.critic.parameters())


def test_monte_carlo_returns_are_discounted_rewards_to_come(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    episodes = [replace(t, reward=1.0) for t in make_episodes(3)]
    batch = make_trainer()._collate(episodes)
    returns = monte_carlo_returns(batch, 0.5)
    expected = [0.5 ** (n - 1 - i) for n in batch.token_counts.tolist() for i in range(n)]
    assert returns.tolist() == pytest.approx(expected)


def parity_episodes(make_episodes: MakeEpisodes, count: int) -> list[Trajectory]:
    """The prompt's first token tells the reward, so a critic can learn it."""
    return [
        replace(t, prompt_ids=[2 + i % 2, *t.prompt_ids], reward=float(i % 2))
        for i, t in enumerate(make_episodes(count, seed=5))
    ]


def test_value_pretraining_teaches_the_returns_and_shows_its_progress(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    trainer = make_trainer(value_pretrain_learning_rate=1e-2)
    policy = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen: list[tuple[int, int]] = []
    report = trainer.pretrain_critic(
        parity_episodes(make_episodes, 60),
        steps=40,
        on_progress=lambda step, total, loss: seen.append((step, total)),
    )
    assert seen == [(i, 40) for i in range(1, 41)]
    assert report.steps == 40
    assert report.trajectories == 54  # a tenth is held out
    assert report.loss_last < 0.25 * report.loss_first
    assert report.explained_variance > 0.5
    assert all(torch.equal(p, policy[name]) for name, p in trainer.model.named_parameters())


def test_pretraining_may_move_attention_and_rl_then_may_not(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    episodes = parity_episodes(make_episodes, 20)
    for allowed in (True, False):
        trainer = make_trainer(value_pretrain_attention=allowed, value_pretrain_learning_rate=1e-2)
        attention = {n: p.detach().clone() for n, p in trainer.critic.named_parameters() if "self_attn" in n}
        trainer.pretrain_critic(episodes, steps=3)
        moved = any(
            not torch.equal(p, attention[n]) for n, p in trainer.critic.named_parameters() if n in attention
        )
        assert moved == allowed
        assert not any(p.requires_grad for n, p in trainer.critic.named_parameters() if n in attention)
        assert not trainer.critic_learner._optimizer.state  # RL starts with a fresh optimizer


def test_epochs_and_steps_of_pretraining(make_trainer: MakeTrainer, make_episodes: MakeEpisodes) -> None:
    trainer = make_trainer(value_pretrain_steps=2)
    episodes = parity_episodes(make_episodes, 40)  # 36 trained on, in batches of 8
    assert trainer.pretrain_critic(episodes, epochs=1).steps == 5
    assert trainer.pretrain_critic(episodes).steps == 2
    with pytest.raises(UsageError, match="not both"):
        trainer.pretrain_critic(episodes, steps=1, epochs=1)
    with pytest.raises(UsageError, match="at least 2"):
        trainer.pretrain_critic(episodes[:1])


@pytest.mark.parametrize("truncation", ["bootstrap", "drop"])
def test_pretraining_needs_two_episodes_that_can_be_trained_on(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes, truncation: str
) -> None:
    trainer = make_trainer(truncation=truncation)
    mute = [
        replace(t, action_mask=[False] * len(t.action_mask), rollout_logprobs=[0.0] * len(t.action_mask))
        for t in make_episodes(8)
    ]
    cut_off = make_episodes(8, truncated=True) if truncation == "drop" else []
    with pytest.raises(UsageError, match="1 usable trajectories, at least 2"):
        trainer.pretrain_critic([*mute, *cut_off, *make_episodes(1)])
    assert not trainer.critic.head_is_trained
    assert trainer.pretrain_critic([*mute, *cut_off, *make_episodes(2)], steps=1).trajectories == 1


@pytest.mark.parametrize("given", [{"steps": 0}, {"epochs": 0.0}, {"epochs": math.nan}])
def test_pretraining_of_no_length_is_refused(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes, given: dict[str, Any]
) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=f"{name} is {given[name]}, must be"):
        make_trainer().pretrain_critic(make_episodes(8), **given)


def test_a_critic_and_the_name_of_another_are_refused(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError, match="critic_model='runs/critic' names another"):
        make_trainer(critic=Critic.from_policy(make_policy()), critic_model="runs/critic")


def test_a_run_pretrains_by_itself_where_set_with_episodes_of_the_starting_policy(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(value_pretrain_episodes=20, value_pretrain_steps=3, max_steps=1)
    trainer.train()
    # Three batches of 8 at step 0 for the critic, then the training step's own.
    assert trainer._controller.steps == [0, 0, 0, 0]


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"}
    return peft.LoraConfig(**{**settings, **changes})


def test_adapters_inside_frozen_attention_alone_are_an_error(
    make_trainer: MakeTrainer,
) -> None:
    config = lora(target_modules=["q_proj", "v_proj"])
    with pytest.raises(UsageError, match="nothing of its backbone would train"):
        make_trainer(critic_peft_config=config)
    trainer = make_trainer(critic_peft_config=config, freeze_critic_attention=False)
    assert any(p.requires_grad for p in trainer.critic.backbone.parameters())


def moved_by_training(trainer: SAOTrainer) -> set[str]:
    before = {name: p.detach().clone() for name, p in trainer.critic.named_parameters()}
    trainer.train()
    return {name for name, p in trainer.critic.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("pretraining", [False, True], ids=["rl", "with_pretraining"])
def test_a_critics_adapters_train_and_its_own_weights_never(
    make_trainer: MakeTrainer, pretraining: bool
) -> None:
    settings = {"value_pretrain_episodes": 8, "value_pretrain_steps": 3} if pretraining else {}
    moved = moved_by_training(
        make_trainer(critic_peft_config=lora(), max_steps=2, critic_updates=2, **settings)
    )
    adapters = {name for name in moved if "lora_" in name}
    assert moved == adapters | {"head.weight", "head.bias"}
    assert any("mlp" in name for name in adapters)
    # Pretraining may train attention's adapters, RL not.
    assert any("self_attn" in name for name in adapters) == pretraining


def test_a_checkpoint_holds_of_a_critic_with_adapters_what_trains(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = make_trainer(critic_peft_config=lora(), **settings, output_dir=str(tmp_path / "a"))
    whole.train()
    checkpoint = tmp_path / "a" / "checkpoint-1"
    saved = torch.load(checkpoint / "critic.pt")["critic"]
    assert all("lora_" in name or name.startswith("head.") for name in saved)
    assert len(saved) == 2 * 7 * 2 + 2  # layers, projections, A and B; the head
    resumed = make_trainer(critic_peft_config=lora(), **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, parameter in resumed.critic.named_parameters():
        assert torch.equal(parameter, whole.critic.get_parameter(name)), name
    with pytest.raises(UsageError, match="other parameters than this one"):
        make_trainer(**settings).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_checkpointed_activations_change_no_gradient(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any], adapters: bool, use_reentrant: bool
) -> None:
    def norms(**settings: Any) -> list[float]:
        critic = Critic.from_policy(make_policy())
        torch.manual_seed(0)
        torch.nn.init.normal_(critic.head.weight)
        trainer = make_trainer(
            critic=critic, critic_peft_config=lora() if adapters else None, max_steps=2, **settings
        )
        trainer.train()
        return [e["critic_grad_norm"] for e in trainer.state.log_history if "critic_grad_norm" in e]

    checkpointed = norms(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    assert checkpointed == pytest.approx(norms(), rel=1e-5)
    assert len(checkpointed) == 2


def test_in_bfloat16_weights_values_and_gradients_stay_float32(make_trainer: MakeTrainer) -> None:
    trainer, exact = make_trainer(bf16=True), make_trainer()
    for each in (trainer, exact):
        torch.manual_seed(0)
        torch.nn.init.normal_(each.critic.head.weight)
    hidden: list[torch.dtype] = []
    trainer.critic.backbone.layers[0].mlp.register_forward_hook(lambda m, i, o: hidden.append(o.dtype))
    batch = trainer._collate(trainer._pull())
    values = trainer.critic_learner.values(batch).tokens
    assert hidden[0] == torch.bfloat16
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.to(torch.bfloat16).float())  # not rounded on the way out
    reference = exact.critic_learner.values(batch).tokens
    assert 0 < (values - reference).abs().max() < 0.1
    returns = monte_carlo_returns(batch, 1.0)
    update = trainer.critic_learner.update(batch, returns, updates=1)
    expected = exact.critic_learner.update(batch, returns, updates=1)
    assert update.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert {p.dtype for p in trainer.critic.parameters()} == {torch.float32}


def test_a_critic_model_of_another_vocabulary_or_too_small_is_refused_by_the_trainer(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    words = {f"w{i}": i for i in range(24)}
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0"
    )
    Critic.from_policy(make_policy()).save_pretrained(tmp_path, other)
    with pytest.raises(
        UsageError, match="first at id 0, which is 'w0' for the critic and 't0' for the policy"
    ):
        make_trainer(critic_model=str(tmp_path))
    with pytest.raises(UsageError, match="24 tokens, but the critic embeds only 20"):
        make_trainer(critic=Critic.from_policy(make_policy(vocab_size=20)))


def test_value_pretraining_is_saved_and_a_run_with_the_saved_critic_does_not_repeat_it(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(value_pretrain_learning_rate=1e-2)
    trainer.pretrain_critic(parity_episodes(make_episodes, 20), steps=3)
    trainer.critic_learner.save_pretrained(tmp_path / "critic", tokenizer)
    reusing = make_trainer(critic_model=str(tmp_path / "critic"), value_pretrain_episodes=8, max_steps=1)
    batch = trainer._collate(make_episodes(4, seed=9))
    values = trainer.critic_learner.values(batch).tokens
    assert torch.equal(reusing.critic_learner.values(batch).tokens, values)
    assert values.abs().max() > 0.01
    reusing.train()
    assert reusing._controller.steps == [0]  # no batch was taken for pretraining
    # An untrained critic of the same kind is pretrained.
    Critic.from_policy(trainer.model).save_pretrained(tmp_path / "new", tokenizer)
    pretraining = make_trainer(critic_model=str(tmp_path / "new"), value_pretrain_episodes=8, max_steps=1)
    pretraining.train()
    assert pretraining._controller.steps == [0, 0]
