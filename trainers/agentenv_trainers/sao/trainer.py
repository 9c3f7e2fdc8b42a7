"""The SAO trainer (arXiv 2607.07508).

One training step, in this order:

1. take the batch from the controller;
2. targets of the critic, once; K updates of the critic on them;
3. a fresh forward pass of the critic; advantages of the policy from its values;
4. forward and backward passes of the policy with double-sided importance weights, one optimizer step;
5. the new weights go to the engines under the version ``global_step``.

Invariants:

* The weights of the objective and the advantages are detached: the only gradient is that of the log-prob.
* Masked tokens stay in the denominator, the number of trained tokens of the whole batch.
* During ``critic_only_steps`` the policy's parameters do not change by a bit; versions count on.
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
from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import TrajectoryBatch
from agentenv_trainers.controller import TrajectorySource
from agentenv_trainers.critic import Critic
from agentenv_trainers.objectives import (
    double_sided_regions,
    double_sided_weights,
    estimate_advantages,
    explained_variance,
    k3_divergence,
)
from agentenv_trainers.policy_head import can_score_directly, score_actions
from agentenv_trainers.sao.config import SAOConfig
from agentenv_trainers.sao.critic_learner import CriticLearner
from agentenv_trainers.sao.reference import copy_policy
from agentenv_trainers.sao.value_pretraining import PretrainingReport, pretrain_values
from agentenv_trainers.trajectory_trainer import TrajectoryTrainer

_CRITIC_FILE = "critic.pt"


class SAOTrainer(TrajectoryTrainer):
    """Trains a policy, and a critic beside it, on single rollouts.

    Args:
        model: the policy (a causal LM), or a path or hub name to load it from.
        args: settings.
        controller: source of trajectories, such as ``agentenv.rollout.AsyncController``; the caller stops it.
        processing_class: the tokenizer.
        critic: None: a copy of the policy's backbone.
        callbacks: called after the engines have the weights of a step.
        optimizers: the policy's optimizer and schedule, if not TRL's.

    Raises:
        UsageError: see :class:`TrajectoryTrainer`.
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
    ) -> None:
        # TRL would load the reference from a hub name, which a model in memory does not have.
        beta, args.beta = args.beta, 0.0
        try:
            super().__init__(
                model, args, controller, processing_class, callbacks=callbacks, optimizers=optimizers
            )
        finally:
            args.beta = beta
        self.beta = beta
        # Copies are taken before the first forward pass wraps anything around the policy.
        self._reference = copy_policy(self.model, args) if beta > 0.0 else None
        self.critic_learner = CriticLearner(critic or Critic.from_policy(self.model), args, self.accelerator)
        self._values_pretrained = False
        self._sums: dict[str, Tensor] = {}

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

    def _score(self, batch: TrajectoryBatch) -> dict[str, Tensor]:
        started = time.perf_counter()
        args = self.args
        if args.critic_lambda < 1.0:
            values, ends = self.critic_learner.values(batch)
        else:
            # The returns are then sums of rewards (and the value after the end): no value of a token enters.
            values, ends = torch.zeros_like(batch.rollout_logprobs), self.critic_learner.end_values(batch)
        _, returns = self._estimate(batch, values, ends, gae_lambda=args.critic_lambda)
        update = self.critic_learner.update(batch, returns, updates=args.critic_updates)
        self._record("critic_loss", update.loss)
        self._record("critic_grad_norm", update.grad_norm)
        self._record("explained_variance", explained_variance(update.predictions, returns))
        self._record("return_mean", float(returns.mean()) if returns.numel() else 0.0)
        if self.state.global_step < args.critic_only_steps:
            advantages = torch.zeros_like(returns)
        else:
            values, ends = self.critic_learner.values(batch)
            advantages, _ = self._estimate(batch, values, ends, gae_lambda=None)
            self._record("value_mean", float(values.mean()) if values.numel() else 0.0)
            self._record("advantage_std", float(advantages.std(correction=0)) if advantages.numel() else 0.0)
        scale = args.negative_advantage_scale
        if scale != 1.0:
            advantages = torch.where(advantages < 0.0, advantages * scale, advantages)
        scored = {"advantages": batch.spread(advantages)[:, 1:]}
        self._record("critic_s", time.perf_counter() - started)
        return scored

    def _estimate(
        self, batch: TrajectoryBatch, values: Tensor, ends: Tensor, *, gae_lambda: float | None
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns [N] of the trained tokens."""
        if not batch.num_tokens:
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

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """- sum over tokens of [f(r) * A] * log pi / (trained tokens of the whole batch), f(r) * A detached.

        Source: SAO, arXiv 2607.07508 (policy objective). Departure: the optional k3 term that holds the policy
        near its start (``beta``, off by default).
        """
        mask = inputs["tool_mask"].bool()
        logprobs, entropies, aux_loss = self._logprobs(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        rollout = inputs["sampling_per_token_logps"]
        bounds = {"clip_low": self.args.clip_low, "clip_high": self.args.clip_high}
        weights = double_sided_weights(logprobs, rollout, **bounds)
        coefficients = torch.where(mask, weights * inputs["advantages"], 0.0)
        # Where the weight is 0 the log-prob may be infinite, and 0 * inf is NaN.
        trained = torch.where(coefficients != 0.0, logprobs, torch.zeros_like(logprobs))
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        loss = -(coefficients * trained).sum() / normalizer
        regions = double_sided_regions(logprobs, rollout, **bounds)
        sums = {
            "tokens": mask.sum(),
            "masked_low": (regions.low & mask).sum(),
            "masked_high": (regions.high & mask).sum(),
            "masked_nonfinite": (regions.nonfinite & mask).sum(),
            "entropy": torch.where(mask, entropies.detach(), 0.0).sum(),
        }
        if self._reference is not None:
            with torch.no_grad():
                reference, _, _ = self._logprobs(self._reference, inputs)
            kl = k3_divergence(logprobs, reference, mask & ~regions.nonfinite).sum()
            loss = loss + self.beta * kl / normalizer
            sums["kl"] = kl.detach()
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / self.args.gradient_accumulation_steps
        self._add_sums(sums)
        return loss

    def _logprobs(
        self, model: nn.Module, inputs: dict[str, Any], *, compute_aux_loss: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[b, t] log-probs and entropies (nats) of the trained tokens, and the router's loss where asked for.

        Other positions hold anything finite.
        """
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["tool_mask"].bool()
        if not compute_aux_loss and can_score_directly(model, int(mask.sum())):
            assert isinstance(model, PreTrainedModel)
            with self.accelerator.autocast():
                scores = score_actions(model, input_ids, nn.functional.pad(mask, (1, 0)))
            zeros = torch.zeros(mask.shape, device=mask.device)
            return (
                zeros.masked_scatter(mask, scores.logprobs),
                zeros.masked_scatter(mask, scores.entropies),
                None,
            )
        if not compute_aux_loss:
            # Padding is on the right, out of reach of a causal model: without holes attention takes its fast
            # path. The router's loss, though, counts every token that is not masked.
            attention_mask = torch.ones_like(attention_mask)
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model=model,
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=input_ids.size(1) - 1,
            compute_entropy=True,
            compute_aux_loss=compute_aux_loss,
        )
        return logprobs, entropies, aux_loss

    # Numbers

    def _add_sums(self, sums: dict[str, Tensor]) -> None:
        """Add up the sums of the forward passes of a step; at the last one record means over the tokens."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros((), device=value.device)) + value.float()
        if not self.accelerator.sync_gradients:
            return
        names = list(self._sums)
        totals = dict(
            zip(
                names,
                self._sum_over_processes(torch.stack([self._sums[n] for n in names])).tolist(),
                strict=True,
            )
        )
        self._sums = {}
        tokens = max(totals.pop("tokens"), 1.0)
        means = {name: total / tokens for name, total in totals.items()}
        for name, mean in means.items():
            self._record(name, mean)
        self._record("masked_share", means["masked_low"] + means["masked_high"] + means["masked_nonfinite"])

    # Checkpoints and start

    def _save_extra(self, folder: Path) -> None:
        super()._save_extra(folder)
        torch.save(self.critic_learner.state_dict(), folder / _CRITIC_FILE)

    def _load_extra(self, folder: Path) -> None:
        super()._load_extra(folder)
        path = folder / _CRITIC_FILE
        if not path.exists():
            raise UsageError(f"checkpoint {str(folder)!r} has no {_CRITIC_FILE}: it is not of an SAO run")
        self.critic_learner.load_state_dict(
            torch.load(path, map_location=self.accelerator.device, weights_only=True)
        )
        self._values_pretrained = True

    def _begin(self) -> None:
        super()._begin()
        self._sums = {}
        wanted = self.args.value_pretrain_episodes
        if wanted and not self._values_pretrained:
            trajectories: list[Trajectory] = []
            while len(trajectories) < wanted:
                trajectories += self._pull()
            self.pretrain_critic(trajectories, steps=self.args.value_pretrain_steps)
