"""The SAO trainer (arXiv 2607.07508).

One training step, in this order:

1. take the batch from the controller;
2. targets of the critic, once; K updates of the critic on them;
3. a fresh forward pass of the critic; advantages of the policy from its values;
4. forward and backward passes of the policy with double-sided importance weights, one optimizer step;
5. the new weights go to the engines under the next version.

Invariants:

* During ``critic_only_steps`` the policy's parameters do not change by a bit; versions count on.
* Where advantages come from no critic there is none: nothing is copied, trained or saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from agentenv.errors import UsageError
from agentenv.trace import TRAINER
from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import TrajectoryBatch, collate
from agentenv_trainers.controller import TrajectorySource
from agentenv_trainers.critic import Critic
from agentenv_trainers.objectives import estimate_advantages, explained_share
from agentenv_trainers.policy_trainer import PolicyTrainer
from agentenv_trainers.processes import mean_and_variance
from agentenv_trainers.sao.config import SAOConfig
from agentenv_trainers.sao.critic_learner import CriticLearner
from agentenv_trainers.sao.value_pretraining import PretrainingReport, pretrain_values


class SAOTrainer(PolicyTrainer):
    """Trains a policy, and a critic beside it, on single rollouts.

    Args:
        model: the policy (a causal LM), or a path or hub name to load it from.
        args: settings.
        controller: source of trajectories, such as ``agentenv.rollout.AsyncController``; the caller stops it.
        processing_class: the tokenizer.
        critic: None: the one that ``critic_model`` names, or a copy of the policy's backbone.
        callbacks: called after the engines have the weights of a step.
        optimizers: the policy's optimizer and schedule, if not TRL's.
        peft_config: adapters of the policy, as in TRL.
        critic_peft_config: adapters of the critic's backbone; its value head is always trained whole.

    Raises:
        UsageError: see :class:`TrajectoryTrainer`; a critic whose tokenizer is not the policy's; a critic where
            ``advantage`` uses none, or beside one that ``critic_model`` names.
        ValueError: the critic's attention is to be frozen but not recognised.
    """

    _tag_names: ClassVar[list[str]] = ["agentenv", "sao"]
    _name = "SAO"

    args: SAOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SAOConfig,
        controller: TrajectorySource | None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        critic: Critic | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        critic_peft_config: Any = None,
    ) -> None:
        if args.advantage != "gae" and (critic is not None or critic_peft_config is not None):
            raise UsageError(f"a critic was given, but advantage={args.advantage!r} uses none")
        if critic is not None and args.critic_model is not None:
            raise UsageError(
                f"a critic was given, and critic_model={args.critic_model!r} names another: give one"
            )
        super().__init__(
            model,
            args,
            controller,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self._critic_learner: CriticLearner | None = None
        self._values_pretrained = False
        if args.advantage == "gae":
            critic = critic or self._make_critic()
            critic.check_size(self._tokenizer)
            if critic_peft_config is not None:
                critic.add_adapters(critic_peft_config)
            self._values_pretrained = critic.head_is_trained
            self._critic_learner = CriticLearner(critic, args, self.accelerator)

    def _make_critic(self) -> Critic:
        if self.args.critic_model is None:
            return Critic.from_policy(self.model)
        return Critic.from_pretrained(
            self.args.critic_model,
            self._tokenizer,
            attn_implementation=self.model.config._attn_implementation,
            trust_remote_code=self.args.trust_remote_code,
        )

    @property
    def critic_learner(self) -> CriticLearner:
        """The critic with its optimizer.

        Raises:
            UsageError: ``advantage`` is not "gae".
        """
        if self._critic_learner is None:
            raise UsageError(f"there is no critic with advantage={self.args.advantage!r}")
        return self._critic_learner

    @property
    def critic(self) -> Critic:
        """The critic, unwrapped."""
        return self.critic_learner.critic

    def pretrain_critic(
        self,
        trajectories: Sequence[Trajectory],
        *,
        steps: int | None = None,
        epochs: float | None = None,
        on_progress: Callable[[int, int, float], None] | None = None,
    ) -> PretrainingReport:
        """Train the critic on the returns of the fixed starting policy; see :func:`pretrain_values`."""
        report = pretrain_values(
            self.critic_learner,
            trajectories,
            self._deal,
            self.args,
            self._collate,
            steps,
            epochs,
            on_progress,
        )
        self._values_pretrained = True
        return report

    # One step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A forward and backward pass; none of the policy while only the critic trains."""
        if self.state.global_step >= self.args.critic_only_steps:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        # No backward pass: the optimizer skips parameters without a gradient, momentum and weight decay
        # included.
        model.train()
        self._prepare_inputs(inputs)
        self._step += 1
        return torch.zeros((), device=self.accelerator.device)

    def _collate(self, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        return collate(
            trajectories,
            pad_token_id=self._tokenizer.pad_token_id,
            truncation=self.args.truncation,
            skip_observations=self.args.skip_observations,
            device=self.accelerator.device,
        )

    def _advantages(
        self, batch: TrajectoryBatch, everything: Sequence[Trajectory], share: Sequence[int]
    ) -> Tensor:
        """[N] advantages of the trained tokens, after the critic's updates on the batch."""
        if self._critic_learner is None:
            return super()._advantages(batch, everything, share)
        started, began = time.perf_counter(), self.trace.now()
        args, learner = self.args, self._critic_learner
        if args.critic_lambda < 1.0:
            values, ends = learner.values(batch)
        else:
            # The returns are then sums of rewards (and the value after the end): no value of a token enters.
            values, ends = (
                torch.zeros(batch.num_values, device=batch.rewards.device),
                learner.end_values(batch),
            )
        _, returns = self._estimate(batch, values, ends, gae_lambda=args.critic_lambda)
        update = learner.update(batch, returns, updates=args.critic_updates)
        self._record("critic_loss", update.loss)
        self._record("critic_grad_norm", update.grad_norm)
        mean, variance = mean_and_variance(returns)
        _, unexplained = mean_and_variance(returns - update.predictions)
        self._record("explained_variance", explained_share(unexplained, variance))
        self._record("return_mean", mean)
        if self.state.global_step < args.critic_only_steps:
            advantages = torch.zeros_like(returns)
        else:
            values, ends = learner.values(batch)
            if self.token_recorder is not None:
                self.token_recorder.set_values(values)
            advantages, _ = self._estimate(batch, values, ends, gae_lambda=None)
            self._record("value_mean", mean_and_variance(values)[0])
        self._record("critic_s", time.perf_counter() - started)
        self.trace.span(TRAINER, "critic update", began, self.trace.now(), step=self.batches_taken)
        return advantages[batch.value_is_action]

    def _estimate(
        self, batch: TrajectoryBatch, values: Tensor, ends: Tensor, *, gae_lambda: float | None
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns [M] at the value tokens."""
        if not batch.num_values:
            return torch.zeros_like(values), torch.zeros_like(values)
        padded, mask = batch.pad_episodes(values)
        step_ids, _ = batch.pad_episodes(batch.step_ids)
        estimate = estimate_advantages(
            batch.rewards,
            padded,
            mask,
            step_ids,
            gamma=self.args.gamma,
            gae_lambda=gae_lambda,
            alpha=self.args.lambda_alpha,
            granularity=self.args.value_granularity,
            bootstrap_values=ends,
        )
        return estimate.advantages[mask], estimate.returns[mask]

    # Checkpoints and start

    def _save_extra(self, folder: Path) -> None:
        super()._save_extra(folder)
        if self._critic_learner is not None:
            self._critic_learner.save(folder)

    def _load_extra(self, folder: Path) -> None:
        super()._load_extra(folder)
        if self._critic_learner is not None:
            self._critic_learner.load(folder)
            self._values_pretrained = True

    def _begin(self) -> None:
        super()._begin()
        wanted = self.args.value_pretrain_episodes
        if wanted and not self._values_pretrained:
            trajectories: list[Trajectory] = []
            while len(trajectories) < wanted:
                trajectories += self._pull()
            self.pretrain_critic(trajectories, steps=self.args.value_pretrain_steps)
