"""GRPO through our data path against TRL's GRPOTrainer, and each objective against its formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer as TRLTrainer
from trl.trainer.utils import pad

from agentenv.trajectory import Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOConfig
from agentenv_trainers.testing import ReplayController

MakePolicy = Callable[..., Qwen3ForCausalLM]
MakeEpisodes = Callable[..., list[Trajectory]]
Make = Callable[..., GRPOTrainer]


@pytest.fixture
def grouped(make_episodes: MakeEpisodes) -> Callable[[int], list[Trajectory]]:
    """Two groups of four for a seed; in each some succeed."""

    def make(seed: int) -> list[Trajectory]:
        return [
            replace(
                trajectory,
                group_id=f"{seed}-{i // 4}",
                task_id=f"task-{i // 4}",
                reward=float(i % 4 == 0 or i == 6),
            )
            for i, trajectory in enumerate(make_episodes(8, seed=seed, version=seed))
        ]

    return make


@pytest.fixture
def make_grpo(
    make_policy: MakePolicy,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    grouped: Callable[[int], list[Trajectory]],
) -> Make:
    def make(*, controller: Any = None, policy: Any = None, **changes: Any) -> GRPOTrainer:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 8,
            "group_size": 4,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "use_cpu": True,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
        }
        config = GRPOConfig(**{**settings, **changes})
        return GRPOTrainer(
            policy or make_policy(), config, controller or ReplayController(grouped), tokenizer
        )

    return make


def trls_batch(trajectories: list[Trajectory], advantages: torch.Tensor) -> dict[str, Any]:
    """The episodes as TRL's own code lays them out: prompts padded on the left, completions on the right."""

    def column(name: str, side: str = "right", dtype: torch.dtype = torch.long) -> torch.Tensor:
        rows = [torch.tensor(getattr(t, name), dtype=dtype) for t in trajectories]
        return pad(rows, padding_value=0, padding_side=side)

    sampled = column("rollout_logprobs", dtype=torch.float32)
    tool_mask = column("action_mask")
    return {
        "prompt_ids": column("prompt_ids", "left"),
        "prompt_mask": pad(
            [torch.ones(len(t.prompt_ids), dtype=torch.long) for t in trajectories], 0, "left"
        ),
        "completion_ids": column("completion_ids"),
        "completion_mask": pad(
            [torch.ones(len(t.completion_ids), dtype=torch.long) for t in trajectories], 0
        ),
        "tool_mask": tool_mask,
        "advantages": advantages,
        "old_per_token_logps": sampled,
        "num_items_in_batch": tool_mask.sum().float(),
    }


def trls_trainer(policy: Qwen3ForCausalLM, tokenizer: Any, folder: Path, loss_type: str) -> TRLTrainer:
    args = TRLConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=64,
        loss_type=loss_type,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    trainer = TRLTrainer(
        policy,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["t2"] * 8}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "sapo"])
def test_loss_and_gradient_equal_those_of_trls_trainer(
    make_grpo: Make,
    make_policy: MakePolicy,
    tokenizer: PreTrainedTokenizerFast,
    grouped: Callable[[int], list[Trajectory]],
    tmp_path: Path,
    loss_type: str,
) -> None:
    trajectories = grouped(0)
    ours = make_grpo(loss_type=loss_type, max_tokens_per_episode=64)
    ours.push_weights()
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = ours._generate_and_score_completions([{}] * 8)
    loss = ours._compute_loss(ours.model, batch)
    loss.backward()
    rewards = torch.tensor([t.reward for t in trajectories]).view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1)
    theirs = trls_trainer(make_policy(), tokenizer, tmp_path / "trl", loss_type)
    their_loss = theirs._compute_loss(theirs.model, trls_batch(trajectories, advantages))
    their_loss.backward()
    assert abs(their_loss.item()) > 1e-3
    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-6)
    expected = gradients(theirs.model)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-3
    for name, gradient in gradients(ours.model).items():
        assert (gradient - expected[name]).abs().max().item() < 1e-6, name


def loss_of_one_step(trainer: GRPOTrainer) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Loss of the first batch, the batch, and the log-probs [R, T - 1] of its tokens."""
    trainer.push_weights()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{}] * 8)
    loss = trainer._compute_loss(trainer.model, batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    logprobs = trainer.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return loss, batch, logprobs.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"objective": "dis", "clip_low": 0.3, "clip_high": 0.5}, lambda r: r * ((r > 0.7) & (r < 1.5))),
        ({"objective": "cispo", "clip_low": 0.3, "clip_high": 0.5}, lambda r: r.clamp(0.7, 1.5)),
        ({"objective": "tis", "importance_cap": 1.2}, lambda r: r.clamp(max=1.2)),
    ],
)
def test_token_level_weights_scale_the_log_probs_gradient(
    make_grpo: Make, settings: dict[str, Any], weights: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    trainer = make_grpo(**settings)
    loss, batch, logprobs = loss_of_one_step(trainer)
    loss.backward()
    got = gradients(trainer.model)
    trainer.model.zero_grad()
    mask = batch["tool_mask"].bool()
    w = weights(torch.exp(logprobs.detach() - batch["sampling_per_token_logps"]))
    assert ((w - 1.0).abs() > 0.01)[mask].any()
    (-(w * batch["advantages"] * logprobs)[mask].sum() / mask.sum()).backward()
    for name, gradient in gradients(trainer.model).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_topr_truncates_the_product_of_bad_trajectories_only(make_grpo: Make) -> None:
    trainer = make_grpo(objective="topr")
    loss, batch, logprobs = loss_of_one_step(trainer)
    mask = batch["tool_mask"].bool()
    log_ratio = torch.where(mask, logprobs.detach() - batch["sampling_per_token_logps"], 0.0).sum(1)
    good = batch["advantages"].sum(1) >= 0.0
    assert good.any() and not good.all()
    w = torch.where(good, 1.0, log_ratio.exp().clamp(max=1.0)).unsqueeze(1)
    expected = -(w * batch["advantages"] * logprobs)[mask].sum() / mask.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_capped_mismatch_splits_the_ratio_at_the_policy_before_the_update(make_grpo: Make) -> None:
    # With one update the policy is its own proximal policy: the ratio left is 1, and the weight min(r, cap).
    trainer = make_grpo(objective="ppo_clip", mismatch_cap=1.2)
    loss, batch, logprobs = loss_of_one_step(trainer)
    loss.backward()
    got = gradients(trainer.model)
    trainer.model.zero_grad()
    mask = batch["tool_mask"].bool()
    w = torch.exp(logprobs.detach() - batch["sampling_per_token_logps"]).clamp(max=1.2)
    (-(w * batch["advantages"] * logprobs)[mask].sum() / mask.sum()).backward()
    for name, gradient in gradients(trainer.model).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_decoupled_ppo_clips_against_the_policy_before_the_batchs_first_update(make_grpo: Make) -> None:
    trainer = make_grpo(
        objective="decoupled_ppo", policy_updates=2, clip_low=0.01, clip_high=0.01, max_steps=4
    )
    trainer.push_weights()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{}] * 8)
    mask = batch["tool_mask"].bool()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)

    def logprobs() -> torch.Tensor:
        scores = trainer.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return scores.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)

    proximal = batch["proximal_logprobs"]
    torch.testing.assert_close(proximal[mask], logprobs()[mask].detach(), rtol=0, atol=2e-6)
    with torch.no_grad():  # as the first update would
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    loss = trainer._compute_loss(trainer.model, batch)
    ratio = torch.exp(logprobs() - proximal)
    behaviour = torch.exp(proximal - batch["sampling_per_token_logps"])
    advantages = batch["advantages"]
    clipped = torch.min(ratio * advantages, ratio.clamp(0.99, 1.01) * advantages)
    assert ((ratio - 1.0).abs() > 0.01)[mask].any()
    expected = -(behaviour * clipped)[mask].sum() / mask.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_several_updates_per_batch_take_one_batch_and_count_versions_by_batches(make_grpo: Make) -> None:
    trainer = make_grpo(objective="decoupled_ppo", policy_updates=2, max_steps=6)
    trainer.train()
    source = trainer._controller
    assert isinstance(source, ReplayController)
    assert source.steps == [0, 1, 2]
    assert source.synced_versions == [0, 1, 2, 3]
    assert trainer.state.global_step == 6


def test_a_batch_whose_updates_were_cut_short_is_not_taken_again(
    make_grpo: Make, grouped: Callable[[int], list[Trajectory]], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "objective": "decoupled_ppo",
        "policy_updates": 3,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    first = make_grpo(**settings)
    first.train()
    checkpoint = Path(first.args.output_dir) / "checkpoint-3"
    resumed = make_grpo(output_dir=str(tmp_path / "again"), **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    source = resumed._controller
    assert isinstance(source, ReplayController)
    assert source.steps == [0, 1]  # the first of them from the checkpoint
    assert source.synced_versions == [1, 2]
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, first.model.get_parameter(name)), name


def test_absent_members_do_not_enter_their_groups_mean(
    make_grpo: Make, grouped: Callable[[int], list[Trajectory]]
) -> None:
    trajectories = grouped(0)
    trajectories[1].info = {"failure": {"reason": "step_timeout"}}
    trainer = make_grpo(controller=ReplayController(lambda step: trajectories), scale_rewards="none")
    trainer.push_weights()
    batch = trainer._generate_and_score_completions([{}] * 8)
    assert trainer.batch is not None
    assert trainer.batch.sources.tolist() == [0, 2, 3, 4, 5, 6, 7]
    of_episodes = [round(row[row != 0.0][0].item(), 4) for row in batch["advantages"]]
    # Rewards 1, -, 0, 0 have mean 1/3; 1, 0, 1, 0 have 1/2.
    assert of_episodes == [0.6667, -0.3333, -0.3333, 0.5, -0.5, 0.5, -0.5]


def test_running_means_compare_with_what_came_before(
    make_grpo: Make, grouped: Callable[[int], list[Trajectory]]
) -> None:
    trainer = make_grpo(advantage="running_mean", baseline_window=4)
    trainer.push_weights()
    first = trainer._generate_and_score_completions([{}] * 8)["advantages"]
    # Rewards 1 0 0 0 1 0 1 0: the first batch is compared with its own mean, 3/8.
    assert round(first.max().item(), 4) == 0.625
    assert round(first.min().item(), 4) == -0.375
    second = trainer._generate_and_score_completions([{}] * 8)["advantages"]
    # Then with the last four of them, 1 0 1 0.
    assert round(second.max().item(), 4) == 0.5


@pytest.mark.parametrize("where", ["engine", "trainer"])
@pytest.mark.parametrize("objective", ["ppo_clip", "dis", "cispo", "tis", "topr"])
def test_a_log_prob_that_is_not_finite_is_masked_and_counted(
    make_grpo: Make, grouped: Callable[[int], list[Trajectory]], objective: str, where: str
) -> None:
    trajectories = grouped(0)
    if where == "engine":
        trajectories[0].rollout_logprobs[0] = float("nan")
        trajectories[5].rollout_logprobs[0] = float("-inf")
    trainer = make_grpo(
        objective=objective, controller=ReplayController(lambda step: trajectories), max_steps=1
    )
    if where == "trainer":
        scores = trainer._logprobs_of

        def broken(*args: Any, **kwargs: Any) -> Any:
            logprobs, entropies, aux = scores(*args, **kwargs)
            hole = torch.zeros_like(logprobs)
            row = int(args[3].any(dim=1).nonzero()[0])
            hole[row, int(args[3][row].nonzero()[0])] = float("nan")
            return logprobs + hole, entropies, aux

        trainer._logprobs_of = broken  # type: ignore[method-assign]
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "masked_nonfinite" in e)
    assert entry["masked_nonfinite"] > 0.0
    if where == "engine":
        tokens = sum(t.num_action_tokens for t in trajectories)
        assert entry["masked_nonfinite"] == pytest.approx(2 / tokens)
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("settings", [{}, {"loss_type": "sapo"}, {"delta": 5.0}])
@pytest.mark.parametrize("logprob", [-100.0, -9999.0, -1e30])
def test_a_ratio_too_large_for_a_gradient_is_masked_and_counted(
    make_grpo: Make, grouped: Callable[[int], list[Trajectory]], settings: dict[str, Any], logprob: float
) -> None:
    trajectories = grouped(0)
    trajectories[0].rollout_logprobs[0] = logprob  # as engines say that have no minus infinity
    trajectories[5].rollout_logprobs[0] = logprob
    trainer = make_grpo(controller=ReplayController(lambda step: trajectories), max_steps=1, **settings)
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "masked_nonfinite" in e)
    assert entry["masked_nonfinite"] == pytest.approx(2 / sum(t.num_action_tokens for t in trajectories))
    assert entry["policy_grad_norm"] > 0.0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("objective", ["ppo_clip", "tis", "cispo", "topr"])
def test_the_kl_term_is_the_same_under_every_objective(
    make_grpo: Make, grouped: Callable[[int], list[Trajectory]], objective: str
) -> None:
    trajectories = [replace(t, reward=1.0) for t in grouped(0)]  # advantages of 0: the KL term is alone

    def norm(objective: str) -> float:
        trainer = make_grpo(
            objective=objective, beta=0.5, max_steps=1, controller=ReplayController(lambda step: trajectories)
        )
        with torch.no_grad():
            trainer.model.lm_head.weight[1] += 0.1
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["loss"] == pytest.approx(0.5 * entry["kl"], rel=1e-3)
        return float(entry["policy_grad_norm"])

    assert norm(objective) == pytest.approx(norm("dis"), rel=1e-4)


def test_dr_grpo_divides_by_the_context_of_episodes_which_need_not_be_given(make_grpo: Make) -> None:
    norms = []
    for settings in ({}, {"max_tokens_per_episode": 8192}, {"max_tokens_per_episode": 4096}):
        trainer = make_grpo(loss_type="dr_grpo", max_steps=1, **settings)
        trainer.train()
        norms.append(trainer.state.log_history[0]["policy_grad_norm"])
    assert norms[0] == norms[1] > 0.0
    assert norms[2] == pytest.approx(2 * norms[0], rel=1e-4)


def test_groups_share_of_zero_variance_is_logged(make_grpo: Make) -> None:
    trainer = make_grpo(max_steps=1)
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "zero_variance_share" in e)
    assert entry["zero_variance_share"] == 0.0


def test_sao_takes_the_same_baselines_as_settings(make_policy: MakePolicy, tmp_path: Path) -> None:
    config = SAOConfig(output_dir=str(tmp_path), advantage="running_mean_per_task", use_cpu=True)
    assert config.baseline_window == 8
