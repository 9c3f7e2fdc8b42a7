"""One step of SAO against TRL, against another split of the batch, and against what must not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl import GRPOTrainer

from agentenv.errors import RolloutError
from agentenv.trajectory import Trajectory
from agentenv_trainers import SAOTrainer
from agentenv_trainers.testing import ReplayController

MakeTrainer = Callable[..., SAOTrainer]
MakeEpisodes = Callable[..., list[Trajectory]]


EVERY_STEP = (
    "reward",
    "success",
    "staleness_mean",
    "staleness_max",
    "masked_low",
    "masked_high",
    "masked_share",
    "masked_nonfinite",
    "explained_variance",
    "critic_loss",
    "policy_grad_norm",
    "critic_grad_norm",
    "entropy",
    "response_tokens",
    "truncation_rate",
    "batch_wait_s",
    "critic_s",
    "sync_s",
)


def gradients_of_step(trainer: SAOTrainer) -> dict[str, torch.Tensor]:
    """The policy's gradient of the first step, caught before the optimizer."""
    caught: dict[str, torch.Tensor] = {}

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not caught:
                parameters = trainer.model.named_parameters()
                caught.update({name: p.grad.clone() for name, p in parameters if p.grad is not None})

    trainer.add_callback(Catch())
    trainer.train()
    return caught


def test_the_batch_has_the_keys_that_trls_loss_reads(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.push_weights()
    batch = trainer._generate_and_score_completions([{}] * 8)
    assert set(batch) == {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "tool_mask",
        "sampling_per_token_logps",
        "old_per_token_logps",
        "num_items_in_batch",
        "advantages",
    }
    shape = batch["completion_ids"].shape
    for name in (
        "completion_mask",
        "tool_mask",
        "sampling_per_token_logps",
        "old_per_token_logps",
        "advantages",
    ):
        assert batch[name].shape == shape, name


def test_the_gradient_equals_that_of_trls_token_mask_importance_sampling(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(clip_low=0.3, clip_high=5.0, max_steps=1)
    trainer.push_weights()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{}] * 8)
    trainer._compute_loss(trainer.model, batch).backward()
    ours = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    # TRL multiplies with the ratio of trainer to engine where that lies inside its bounds.
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    with torch.no_grad():
        logprobs = trainer._get_per_token_logps_and_entropies(
            model=trainer.model,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            logits_to_keep=input_ids.size(1) - 1,
        )[0]
    ratio = torch.exp((logprobs - batch["sampling_per_token_logps"]) * batch["tool_mask"])
    masked = (ratio < 0.7) | (ratio > 6.0)
    assert (masked & batch["tool_mask"].bool()).float().sum() > 0.0  # the bounds bite in this batch
    batch["importance_sampling_ratio"] = ratio.masked_fill(masked, 0.0)
    del batch[
        "old_per_token_logps"
    ]  # TRL then takes the trainer's own: a ratio of 1 with the log-prob's gradient
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = True
    trainer.model.zero_grad()
    GRPOTrainer._compute_loss(trainer, trainer.model, batch).backward()
    largest = max(p.grad.abs().max().item() for p in trainer.model.parameters())
    assert largest > 1e-3
    for name, parameter in trainer.model.named_parameters():
        assert (parameter.grad - ours[name]).abs().max().item() < 1e-6, name


def test_any_split_into_forward_passes_gives_the_same_gradient(make_trainer: MakeTrainer) -> None:
    splits = [(8, 1), (4, 2), (2, 4), (1, 8)]
    results = [
        gradients_of_step(
            make_trainer(per_device_train_batch_size=rows, gradient_accumulation_steps=passes, max_steps=1)
        )
        for rows, passes in splits
    ]
    for split, result in zip(splits[1:], results[1:], strict=True):
        for name, gradient in results[0].items():
            torch.testing.assert_close(result[name], gradient, rtol=1e-4, atol=2e-7, msg=f"{split}: {name}")


def scored_tokens(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [R, T], trained-token mask [R, T - 1] of a batch under TRL's names."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return input_ids, attention, batch["tool_mask"].bool()


def test_masked_tokens_stay_in_the_denominator(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    half_masked = make_episodes(8)
    for trajectory in half_masked[4:]:
        trajectory.rollout_logprobs = [
            -40.0 if a else 0.0 for a in trajectory.action_mask
        ]  # ratio far too high
    trainer = make_trainer(controller=ReplayController(lambda step: half_masked), max_steps=1)
    trainer.push_weights()
    batch = trainer._generate_and_score_completions([{}] * 8)
    tokens = sum(t.num_action_tokens for t in half_masked)
    assert batch["num_items_in_batch"].item() == tokens
    loss = trainer._compute_loss(trainer.model, batch).item()
    with torch.no_grad():
        logprobs = trainer._logprobs(trainer.model, *scored_tokens(batch))[0]
    ratio = torch.exp(logprobs - batch["sampling_per_token_logps"])
    kept = batch["tool_mask"].bool() & (ratio < 4.0) & (ratio > 0.2)
    by_hand = -(ratio * batch["advantages"] * logprobs)[kept].sum().item() / tokens
    assert loss == pytest.approx(by_hand, rel=1e-5)
    assert trainer._metrics["train"]["masked_high"][-1] >= 0.3


def test_log_probs_of_the_direct_head_equal_trls(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.push_weights()
    batch = trainer._generate_and_score_completions([{}] * 8)
    mask = batch["tool_mask"].bool()
    input_ids, attention, _ = scored_tokens(batch)
    logprobs, entropies, _ = trainer._logprobs(trainer.model, input_ids, attention, mask)
    expected = trainer._get_per_token_logps_and_entropies(
        model=trainer.model,
        input_ids=input_ids,
        attention_mask=attention,
        logits_to_keep=input_ids.size(1) - 1,
        compute_entropy=True,
    )
    torch.testing.assert_close(logprobs[mask], expected[0][mask], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies[mask], expected[1][mask], rtol=0, atol=2e-6)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_critic_moves_whatever_the_accumulation(make_trainer: MakeTrainer, passes: int) -> None:
    trainer = make_trainer(
        per_device_train_batch_size=8 // passes,
        gradient_accumulation_steps=passes,
        max_steps=2,
        critic_updates=2,
    )
    before = {name: p.detach().clone() for name, p in trainer.critic.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.critic.named_parameters() if not torch.equal(p, before[n])}
    assert "head.weight" in moved
    assert any("mlp" in name for name in moved)
    optimizer = trainer.critic_learner._optimizer
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}  # 2 steps of K = 2


def test_the_critics_attention_stays_as_it_was_bit_by_bit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(weight_decay=0.1, max_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.critic.named_parameters()}
    trainer.train()
    attention = [name for name in before if "self_attn" in name]
    assert len(attention) == 2 * 6  # two layers: q, k, v, o, q_norm, k_norm
    for name, parameter in trainer.critic.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in attention), name


def test_while_only_the_critic_trains_the_policy_does_not_change_by_a_bit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(critic_only_steps=2, max_steps=2, weight_decay=0.1, beta=0.1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    critic = trainer.critic.head.weight.detach().clone()
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert not torch.equal(trainer.critic.head.weight, critic)
    assert trainer._controller.synced_versions == [0, 1, 2]
    longer = make_trainer(critic_only_steps=2, max_steps=3)
    before = {name: p.detach().clone() for name, p in longer.model.named_parameters()}
    longer.train()
    assert not all(torch.equal(p, before[name]) for name, p in longer.model.named_parameters())


def test_engines_get_the_weights_of_every_step_before_callbacks_see_it(make_trainer: MakeTrainer) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pushed = trainer._controller.weights
            live = trainer.model.state_dict()
            same = all(torch.equal(pushed[name], live[name]) for name in live)
            seen.append((state.global_step, trainer._controller.synced_versions[-1], same))

    trainer = make_trainer(callbacks=[Look()], max_steps=3)
    trainer.train()
    assert seen == [(1, 1, True), (2, 2, True), (3, 3, True)]
    assert trainer._controller.synced_versions == [0, 1, 2, 3]
    assert trainer._controller.steps == [0, 1, 2]


def test_a_rollout_log_prob_that_is_not_finite_trains_nothing_and_is_counted(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.push_weights()
    batch = trainer._generate_and_score_completions([{}] * 8)
    rows, columns = batch["tool_mask"].nonzero().unbind(dim=1)
    batch["sampling_per_token_logps"][rows[0], columns[0]] = math.nan
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad.isfinite().all() for p in trainer.model.parameters())
    assert trainer._metrics["train"]["masked_nonfinite"][-1] == pytest.approx(1 / len(rows))


def test_every_documented_metric_is_logged_each_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=2)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        for name in EVERY_STEP:
            assert math.isfinite(entry[name]), name
        assert entry["policy_grad_norm"] == entry["grad_norm"]
        assert "kl" not in entry


def test_the_kl_term_is_zero_at_the_start_and_pulls_back_afterwards(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(beta=0.5, max_steps=3, learning_rate=1e-2)
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history[:3]]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[2] > 1e-4
    free = make_trainer(max_steps=3, learning_rate=1e-2)
    free.train()
    start = make_trainer().model.state_dict()

    def distance(model: Qwen3ForCausalLM) -> float:
        return sum((p - start[name]).norm().item() for name, p in model.state_dict().items())

    assert distance(trainer.model) != distance(free.model)


def test_negative_advantages_can_be_scaled(make_trainer: MakeTrainer) -> None:
    whole, halved = make_trainer(), make_trainer(negative_advantage_scale=0.5)
    results = []
    for trainer in (whole, halved):
        trainer.push_weights()
        results.append(trainer._generate_and_score_completions([{}] * 8)["advantages"])
    expected = torch.where(results[0] < 0, results[0] * 0.5, results[0])
    torch.testing.assert_close(results[1], expected)
    assert (results[0] < 0).any()


def test_an_empty_batch_of_the_controller_stops_the_run_with_the_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(controller=ReplayController(lambda step: []))
    with pytest.raises(RolloutError, match="step 0"):
        trainer.train()


def test_a_short_batch_trains_even_with_fewer_rows_than_forward_passes(
    make_trainer: MakeTrainer, make_episodes: MakeEpisodes
) -> None:
    trainer = make_trainer(
        controller=ReplayController(lambda step: make_episodes(3, seed=step)),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_steps=1,
    )
    reference = make_trainer(
        controller=ReplayController(lambda step: make_episodes(3, seed=step)), max_steps=1
    )
    ours, theirs = gradients_of_step(trainer), gradients_of_step(reference)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=2e-7)


def test_rows_longer_than_the_models_positions_are_said_once(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(policy=make_policy(max_position_embeddings=8)).train()
    (said,) = [record.message for record in caplog.records if "positions" in record.message]
    assert "the model has 8 positions" in said
    caplog.clear()
    make_trainer().train()
    assert not caplog.records
