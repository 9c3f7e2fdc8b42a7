"""Training of the critic: K updates per batch on one set of targets, and value pretraining.

Invariants:

* Targets are given; nothing here changes them between the K updates.
* Optimizer and gradients are plain torch and do not pass through accelerate. While the policy accumulates
  gradients, accelerate's optimizer wrapper silently skips ``step()`` on all but the last forward pass of a
  step; the critic trains at the first one and would never move.
* The loss is the mean over the value tokens of all processes, whatever the split into forward passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from agentenv_trainers.batch import TrajectoryBatch
from agentenv_trainers.critic import Critic, freeze_attention
from agentenv_trainers.sao.config import SAOConfig


@dataclass(frozen=True)
class CriticUpdate:
    """What one call of :meth:`CriticLearner.update` saw."""

    loss: float
    """Mean squared error before the first update: on data the critic has not trained on."""
    grad_norm: float
    """Mean over the updates, before clipping."""
    predictions: Tensor
    """[M] values before the first update."""


class ValueEstimates(NamedTuple):
    """What the critic says of a batch, without gradient."""

    tokens: Tensor
    """[M] value of the state before each value token, for an action token that in which it was chosen."""
    ends: Tensor
    """[E] value of the state after the end of each episode that is bootstrapped, 0 for the others."""


class CriticLearner:
    """A critic with its optimizer and learning-rate schedule.

    Args:
        critic: trained in place; its attention is frozen here if the settings say so.
        args: settings.
        accelerator: for device, autocast and DDP.

    Raises:
        ValueError: attention is to be frozen, but the architecture has none that is recognised.
    """

    def __init__(self, critic: Critic, args: SAOConfig, accelerator: Accelerator) -> None:
        self._args = args
        self._accelerator = accelerator
        self.critic = critic.to(accelerator.device)
        self.frozen: list[str] = freeze_attention(critic) if args.freeze_critic_attention else []
        """Names of the frozen attention modules."""
        if args.activation_checkpointing:
            critic.backbone.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
        self._prepare(args.critic_learning_rate)

    def values(self, batch: TrajectoryBatch) -> ValueEstimates:
        """Values of all value tokens and of the ends, in one pass over the batch."""
        tokens = torch.zeros(batch.num_values, device=batch.input_ids.device)
        row_ends = torch.zeros(batch.num_rows, device=batch.input_ids.device)
        with torch.no_grad():
            for part in batch.micro_batches(self._passes(batch)):
                output = self._forward(part.input_ids)
                tokens[part.value_index] = output[:, :-1][part.value_mask[:, 1:]]
                if part.is_filler:
                    continue
                row_ends[part.rows] = output.gather(
                    1, part.attention_mask.sum(dim=1, keepdim=True) - 1
                ).squeeze(1)
        return ValueEstimates(tokens, torch.where(batch.truncated, row_ends[batch.last_rows], 0.0))

    def end_values(self, batch: TrajectoryBatch) -> Tensor:
        """The ``ends`` of :meth:`values` alone: only episodes that were cut off cost anything."""
        ends = torch.zeros(batch.rewards.numel(), device=batch.input_ids.device)
        cut_off = batch.truncated.nonzero().flatten()
        with torch.no_grad():
            for chosen in torch.split(cut_off, self._args.per_device_train_batch_size):
                rows = batch.last_rows[chosen]
                lengths = batch.lengths[rows]
                if not chosen.numel():
                    continue
                output = self._forward(batch.input_ids[rows, : int(lengths.max())])
                ends[chosen] = output.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        return ends

    def update(self, batch: TrajectoryBatch, returns: Tensor, *, updates: int) -> CriticUpdate:
        """Gradient steps on the mean squared error to ``returns`` [M], one per pass over the batch."""
        # Summed over processes; DDP averages gradients, so each process divides by its share of the mean.
        tokens = torch.tensor(float(batch.num_values), device=returns.device)
        scale = self._accelerator.num_processes / self._sum(tokens).clamp(min=1.0)
        predictions = torch.zeros_like(returns)
        losses, norms = [], []
        for index in range(updates):
            parts = batch.micro_batches(self._passes(batch))
            total = torch.zeros((), device=returns.device)
            for number, part in enumerate(parts, start=1):
                is_last = number == len(parts)
                with contextlib.nullcontext() if is_last else self._no_sync():
                    values = self._forward(part.input_ids)[:, :-1][part.value_mask[:, 1:]]
                    loss = ((values - returns[part.value_index]) ** 2).sum() * scale
                    loss.backward()
                if index == 0:
                    predictions[part.value_index] = values.detach()
                total += loss.detach()
            norms.append(float(self._step()))
            losses.append(float(self._sum(total)) / self._accelerator.num_processes)
        self._schedule.step()
        return CriticUpdate(loss=losses[0], grad_norm=sum(norms) / len(norms), predictions=predictions)

    @contextlib.contextmanager
    def pretraining(self) -> Iterator[None]:
        """Inside, updates use the settings of value pretraining; RL then starts with a fresh optimizer."""
        if self._args.value_pretrain_attention:
            self.critic.requires_grad_(True)
        learning_rate = self._args.value_pretrain_learning_rate
        self._prepare(
            self._args.critic_learning_rate if learning_rate is None else learning_rate, warmup=False
        )
        try:
            yield
        finally:
            if self._args.freeze_critic_attention:
                freeze_attention(self.critic)
            self._prepare(self._args.critic_learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.critic.load_state_dict(state["critic"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def _prepare(self, learning_rate: float, *, warmup: bool = True) -> None:
        # DDP looks at requires_grad when it wraps, so the wrapper is made anew whenever that changes.
        self._wrapped: nn.Module = self.critic
        if self._accelerator.num_processes > 1:
            on_gpu = self._accelerator.device.type == "cuda"
            self._wrapped = DistributedDataParallel(
                self.critic, device_ids=[self._accelerator.local_process_index] if on_gpu else None
            )
        args = self._args
        self._parameters = [p for p in self.critic.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=0.0,
        )
        steps = args.critic_warmup_steps if warmup else 0
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / steps) if steps else 1.0
        )

    def _forward(self, input_ids: Tensor) -> Tensor:
        with self._accelerator.autocast():
            values: Tensor = self._wrapped(input_ids)
        return values

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients of all but the last forward pass of an update stay local."""
        if isinstance(self._wrapped, DistributedDataParallel):
            context: contextlib.AbstractContextManager[None] = self._wrapped.no_sync()
            return context
        return contextlib.nullcontext()

    def _step(self) -> Tensor:
        limit = self._args.max_grad_norm if self._args.max_grad_norm > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _passes(self, batch: TrajectoryBatch) -> int:
        """Forward passes over a batch: as many as the policy makes, more where rows would exceed its size."""
        needed = -(-batch.num_rows // self._args.per_device_train_batch_size)
        return max(self._args.gradient_accumulation_steps, needed)

    def _sum(self, value: Tensor) -> Tensor:
        if self._accelerator.num_processes == 1:
            return value
        summed: Tensor = self._accelerator.reduce(value, reduction="sum")
        return summed
