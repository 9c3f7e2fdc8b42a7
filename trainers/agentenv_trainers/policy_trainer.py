"""The policy's side of every trainer: log-probs, loss by ``objective``, advantages that need no critic.

Invariants:

* Importance weights and advantages are detached: the only gradient is that of the log-prob (of the clipped ratio,
  where the loss is TRL's).
* Tokens that a mask or a clip leaves without gradient stay in the denominator, the trained tokens of the batch.
* A log-prob that is not finite, of the engine or the trainer, trains nothing and is counted; so does a ratio too large
  to take a gradient of.
* Advantages that compare episodes are computed on all processes from all episodes, before these are dealt out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from agentenv.errors import UsageError
from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import TrajectoryBatch, reason_to_drop
from agentenv_trainers.controller import TrajectorySource
from agentenv_trainers.length_buckets import join_buckets, length_buckets
from agentenv_trainers.objectives import (
    RunningMeanBaseline,
    cispo_weights,
    double_sided_regions,
    double_sided_weights,
    group_advantages,
    k3_divergence,
    proximal_weights,
    topr_weights,
    zero_variance_share,
)
from agentenv_trainers.policy_head import can_score_directly, score_actions
from agentenv_trainers.processes import mean_and_variance
from agentenv_trainers.reference import copy_policy
from agentenv_trainers.settings import TrainerSettings
from agentenv_trainers.trajectory_trainer import TrajectoryTrainer

_BASELINE_FILE = "baseline.json"
_TRL_LOSSES = {"ppo_clip", "decoupled_ppo", "tis"}
"""Objectives that are losses of TRL's; the others are detached weights on the log-prob."""
_CLIPPED = {"ppo_clip", "decoupled_ppo"}
"""Objectives whose gradient passes through the ratio itself."""
_LARGEST_LOG_RATIO = 44.0
"""The square of a larger ratio is infinite in float32, and a gradient through it soon NaN. Engines that report -9999 in
place of minus infinity, as servers of JSON do, come far beyond."""


class PolicyTrainer(TrajectoryTrainer):
    """Trains a policy by one of the objectives; see :class:`TrajectoryTrainer` for arguments and errors."""

    args: TrainerSettings
    _metrics: dict[str, Any]

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: TrainerSettings,
        controller: TrajectorySource | None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        # TRL would load the reference from a hub name, which a model in memory does not have.
        beta, args.beta = args.beta, 0.0
        try:
            super().__init__(
                model,
                args,
                controller,
                processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        finally:
            args.beta = beta
        self.beta = beta
        # Copied before the first forward pass wraps anything around the policy.
        self._reference = copy_policy(self.model, args, self.accelerator) if beta > 0.0 else None
        self._baseline: RunningMeanBaseline | None = None
        if args.advantage in ("running_mean", "running_mean_per_task"):
            self._baseline = RunningMeanBaseline(
                args.baseline_window, per_task=args.advantage == "running_mean_per_task"
            )
        self._choose_trl_loss()
        self._scores: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._sums: dict[str, Tensor] = {}

    def _choose_trl_loss(self) -> None:
        """Set the attributes that TRL's loss reads; TRL took them from fields of its own."""
        args = self.args
        if args.objective == "tis":
            # Its "cispo" is - min(r, C) A log pi with the weight detached.
            self.loss_type, self.epsilon_high = "cispo", args.importance_cap
        elif args.objective in _TRL_LOSSES:
            self.loss_type = args.loss_type
            self.epsilon_low, self.epsilon_high = args.clip_low, args.clip_high
            # dr_grpo divides by it.
            self.max_completion_length = args.rollout_config().max_tokens_per_episode

    # Advantages

    def _score(
        self, batch: TrajectoryBatch, everything: Sequence[Trajectory], share: Sequence[int]
    ) -> dict[str, Tensor]:
        advantages = self._advantages(batch, everything, share)
        self._record("advantage_std", math.sqrt(mean_and_variance(advantages)[1]))
        scale = self.args.negative_advantage_scale
        if scale != 1.0:
            advantages = torch.where(advantages < 0.0, advantages * scale, advantages)
        scored = {"advantages": batch.spread(advantages)[:, 1:]}
        if self.args.splits_ratio and self.args.policy_updates > 1:
            scored["proximal_logprobs"] = self._proximal_logprobs(batch)
        return scored

    def _advantages(
        self, batch: TrajectoryBatch, everything: Sequence[Trajectory], share: Sequence[int]
    ) -> Tensor:
        """[N] advantages of the trained tokens; here all tokens of an episode have the same.

        Args:
            batch: this process's episodes.
            everything: the trajectories of all processes.
            share: which of them this process has.
        """
        kept = [reason_to_drop(trajectory, self.args.truncation) is None for trajectory in everything]
        if self._baseline is not None:
            present = [t for t, is_kept in zip(everything, kept, strict=True) if is_kept]
            found = iter(self._baseline.advantages([t.reward for t in present], [t.task_id for t in present]))
            values = torch.tensor([next(found) if is_kept else 0.0 for is_kept in kept])
        else:
            values = self._group_advantages(everything, torch.tensor(kept))
        places = torch.tensor(list(share), dtype=torch.long)[batch.sources.cpu()]
        return values[places].float().to(batch.rewards.device).repeat_interleave(batch.token_counts)

    def _group_advantages(self, everything: Sequence[Trajectory], present: Tensor) -> Tensor:
        names = {name: number for number, name in enumerate(dict.fromkeys(t.group_id for t in everything))}
        groups = torch.tensor([names[t.group_id] for t in everything])
        rewards = torch.tensor([t.reward for t in everything], dtype=torch.float64)
        self._record("zero_variance_share", zero_variance_share(rewards, groups, present))
        return group_advantages(rewards, groups, present, scale=self.args.scale_rewards)

    @torch.no_grad()
    def _proximal_logprobs(self, batch: TrajectoryBatch) -> Tensor:
        """[R, T - 1] log-probs of the trained tokens under the policy before this batch's first update."""
        flat = torch.zeros_like(batch.rollout_logprobs)
        model: nn.Module = self.model_wrapped
        for part in batch.micro_batches(self.args.gradient_accumulation_steps):
            mask = part.action_mask[:, 1:]
            logprobs, _, _ = self._logprobs(model, part.input_ids, part.attention_mask, mask)
            flat[part.token_index] = logprobs[mask]
        return batch.spread(flat)[:, 1:]

    # Loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The objective's loss: a mean over the trained tokens of the whole batch.

        dis, cispo, topr: - sum_t [w_t A_t] log pi_t / N, w_t A_t detached; ppo_clip, decoupled_ppo and tis are TRL's.
        With ``splits_ratio`` the ratio pi / pi_rollout is (pi / pi_proximal) (pi_proximal / pi_rollout): the objective
        has the first factor, and the second, capped, scales the advantage. Optional: a k3 term that holds the policy
        near its start (``beta``), a router's loss.
        """
        mask = inputs["tool_mask"].bool()
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logprobs, entropies, aux_loss = self._logprobs(
            model, input_ids, attention_mask, mask, compute_aux_loss=self.aux_loss_enabled
        )
        rollout = inputs["sampling_per_token_logps"]
        split = self.args.splits_ratio
        behind = inputs.get("proximal_logprobs", logprobs.detach()) if split else rollout
        finite = torch.isfinite(logprobs.detach()) & torch.isfinite(rollout) & torch.isfinite(behind)
        if self.args.objective in _CLIPPED:
            finite = finite & (logprobs.detach() - behind <= _LARGEST_LOG_RATIO)
        trained = mask & finite
        scored = logprobs.detach()
        # 0 * inf is NaN: what does not count must be finite.
        logprobs = torch.where(trained, logprobs, 0.0)
        old, advantages = torch.where(trained, rollout, 0.0), inputs["advantages"]
        if split:
            proximal = torch.where(trained, behind, 0.0)
            advantages = advantages * proximal_weights(proximal, old, cap=self.args.mismatch_cap)
            old = proximal
        reference = kl = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _, _ = self._logprobs(self._reference, input_ids, attention_mask, mask)
            kl = k3_divergence(logprobs, reference, trained).sum()
        if self.args.objective in _TRL_LOSSES:
            self._scores = (logprobs, entropies, aux_loss)
            loss = self._trl_loss(
                model,
                inputs
                | {
                    "tool_mask": trained.long(),
                    "advantages": advantages,
                    "old_per_token_logps": old,
                    "ref_per_token_logps": reference,
                },
            )
            self._scores = None
        else:
            normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            weights = self._weights(logprobs, old, trained, inputs["advantages"])
            loss = -(torch.where(trained, weights * advantages, 0.0) * logprobs).sum() / normalizer
            if kl is not None:
                loss = loss + self.beta * kl / normalizer
            if self.aux_loss_enabled:
                loss = loss + self.router_aux_loss_coef * aux_loss / self.args.gradient_accumulation_steps
        low, high = self._left_out(logprobs.detach(), old, trained, advantages)
        sums = {
            "tokens": mask.sum(),
            "masked_nonfinite": (mask & ~finite).sum(),
            "entropy": torch.where(mask, entropies.detach(), 0.0).sum(),
            "masked_low": low.sum(),
            "masked_high": high.sum(),
        }
        if kl is not None:
            sums["kl"] = kl.detach()
        self._add_sums(sums)
        if self.token_recorder is not None:
            self.token_recorder.add(
                inputs["token_index"],
                policy_logprobs=scored[mask],
                advantages=inputs["advantages"][mask],
                kept=(trained & ~low & ~high)[mask],
            )
        return loss

    def _weights(self, logprobs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """[b, t] detached weights of the objectives that TRL lacks."""
        args = self.args
        if args.objective == "dis":
            return double_sided_weights(logprobs, old, clip_low=args.clip_low, clip_high=args.clip_high)
        if args.objective == "cispo":
            return cispo_weights(logprobs, old, clip_low=args.clip_low, clip_high=args.clip_high)
        # All tokens of a trajectory have one advantage, and those outside the mask have 0.
        return topr_weights(logprobs, old, mask, advantages.sum(dim=1) >= 0.0)

    def _left_out(
        self, logprobs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[b, t] bool: the tokens that the objective leaves without gradient for their ratio, below and above."""
        args = self.args
        if args.objective not in ("dis", "ppo_clip", "decoupled_ppo"):
            none = torch.zeros_like(mask)
            return none, none
        regions = double_sided_regions(logprobs, old, clip_low=args.clip_low, clip_high=args.clip_high)
        low, high = regions.low & mask, regions.high & mask
        if args.objective != "dis":
            # The clip acts only where it would go on in the direction of the advantage.
            low, high = low & (advantages < 0.0), high & (advantages > 0.0)
        return low, high

    def _trl_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """``trl.GRPOTrainer``'s loss on our log-probs; its own metrics are left out, as ours say the same."""
        metrics, self._metrics = self._metrics, {mode: defaultdict(list) for mode in ("train", "eval")}
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._metrics = metrics
        return loss

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """TRL's own, but inside its loss: there the ones that we have already."""
        if self._scores is not None:
            return self._scores
        scores: tuple[Tensor, Tensor, Tensor | None] = super()._get_per_token_logps_and_entropies(
            *args, **kwargs
        )
        return scores

    def _logprobs(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask: Tensor,
        *,
        compute_aux_loss: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[b, t - 1] log-probs and entropies (nats) of the trained tokens, and the router's loss where asked for.

        Other positions hold anything finite. Rows of unequal length go through the model in several passes.

        Args:
            model: the policy, wrapped, or the reference.
            input_ids: [b, t].
            attention_mask: [b, t].
            mask: [b, t - 1] bool, true where the token one to the right is trained.
            compute_aux_loss: it counts all tokens of a batch together, so there is one pass then.
        """
        lengths = attention_mask.sum(dim=1)
        if compute_aux_loss:
            return self._logprobs_of(model, input_ids, attention_mask, mask, compute_aux_loss=True)
        if self.accelerator.num_processes == 1:
            buckets = length_buckets(lengths)
        else:
            # A forward pass is a collective operation there: every process must make as many.
            buckets = [torch.arange(lengths.numel(), device=lengths.device)]
        parts = []
        for rows in buckets:
            width = int(lengths[rows].max())
            parts.append(self._logprobs_of(model, input_ids[rows, :width], None, mask[rows, : width - 1]))
        width = mask.size(1)
        return (
            join_buckets(buckets, [part[0] for part in parts], width),
            join_buckets(buckets, [part[1] for part in parts], width),
            None,
        )

    def _logprobs_of(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        mask: Tensor,
        *,
        compute_aux_loss: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
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
        if attention_mask is None:
            # Padding is on the right, out of reach of a causal model: without holes attention takes its fast path.
            # The router's loss, though, counts every token that is not masked.
            attention_mask = torch.ones_like(input_ids)
        return self._get_per_token_logps_and_entropies(
            model=model,
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=input_ids.size(1) - 1,
            compute_entropy=True,
            compute_aux_loss=compute_aux_loss,
        )

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
        if self._baseline is not None and self.accelerator.is_main_process:
            state = json.dumps(self._baseline.state_dict(), allow_nan=False)
            (folder / _BASELINE_FILE).write_text(state, encoding="utf-8")

    def _load_extra(self, folder: Path) -> None:
        super()._load_extra(folder)
        if self._baseline is None:
            return
        path = folder / _BASELINE_FILE
        if not path.exists():
            raise UsageError(
                f"checkpoint {str(folder)!r} has no {_BASELINE_FILE}: its run had no advantage "
                f"{self.args.advantage!r}"
            )
        self._baseline.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    def _begin(self) -> None:
        super()._begin()
        self._sums = {}
