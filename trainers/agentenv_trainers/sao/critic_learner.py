"""Training of the critic: K updates per batch on one set of targets, and value pretraining.

Invariants:

* Targets are given; nothing here changes them between the K updates.
* Optimizer and gradients are plain torch and do not pass through accelerate. While the policy accumulates
  gradients, accelerate's optimizer wrapper silently skips ``step()`` on all but the last forward pass of a
  step; the critic trains at the first one and would never move.
* The loss is the mean over the value tokens of all processes, whatever the split into forward passes.
* Several processes train with DDP, or with FSDP2 where accelerate was launched with it. Every forward pass is then a
  call on all processes, so all make as many as the one that needs most.
* What trained at the start is what is saved: with adapters not the backbone's own weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from agentenv.errors import UsageError
from agentenv_trainers.adapters import adapter_layers
from agentenv_trainers.batch import TrajectoryBatch
from agentenv_trainers.critic import Critic, freeze_attention
from agentenv_trainers.length_buckets import join_buckets, length_buckets
from agentenv_trainers.policy_weights import policy_weights
from agentenv_trainers.sao.config import SAOConfig
from agentenv_trainers.schedules import keep_rates
from agentenv_trainers.sharding import reshard, shard

_FILE = "critic.pt"
_FOLDER = "critic"
"""Of a checkpoint: one file, or with FSDP2 a folder to which each process writes its shards."""


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
        accelerator: for device, autocast, DDP and FSDP2.

    Raises:
        ValueError: attention is to be frozen, but the architecture has none that is recognised.
        UsageError: the critic has adapters in frozen attention only, so that nothing of its backbone would train.
    """

    def __init__(self, critic: Critic, args: SAOConfig, accelerator: Accelerator) -> None:
        self._args = args
        self._accelerator = accelerator
        self._is_sharded = bool(accelerator.is_fsdp2)
        self.critic = critic
        self._trainable = {name for name, p in critic.named_parameters() if p.requires_grad}
        self.frozen: list[str] = freeze_attention(critic) if args.freeze_critic_attention else []
        """Names of the frozen attention modules."""
        if adapter_layers(critic.backbone) and not any(p.requires_grad for p in critic.backbone.parameters()):
            raise UsageError(
                "the critic's adapters are all inside its attention, which is frozen: nothing of its backbone would "
                "train. Target MLP layers too (target_modules), or set freeze_critic_attention=False"
            )
        self._enable_checkpointing()
        if self._is_sharded:
            shard(critic, critic.backbone, accelerator, float32=[critic.head])
        else:
            critic.to(accelerator.device)
        self._prepare(args.critic_learning_rate)

    def values(self, batch: TrajectoryBatch) -> ValueEstimates:
        """Values of all value tokens and of the ends, in one pass over the batch."""
        tokens = torch.zeros(batch.num_values, device=batch.input_ids.device)
        row_ends = torch.zeros(batch.num_rows, device=batch.input_ids.device)
        with torch.no_grad():
            for part in batch.micro_batches(self._passes(batch)):
                output = self._forward(part.input_ids, part.attention_mask.sum(dim=1))
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
        chunks = cut_off.split(self._args.per_device_train_batch_size) if cut_off.numel() else ()
        with torch.no_grad():
            for chosen in chunks:
                rows = batch.last_rows[chosen]
                lengths = batch.lengths[rows]
                output = self._forward(batch.input_ids[rows, : int(lengths.max())], lengths)
                ends[chosen] = output.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
            for _ in range(self._most(len(chunks)) - len(chunks)):
                self._forward(batch.input_ids[:1, :1], batch.lengths[:1])
        return ends

    def update(self, batch: TrajectoryBatch, returns: Tensor, *, updates: int) -> CriticUpdate:
        """Gradient steps on the mean squared error to ``returns`` [M], one per pass over the batch."""
        # Summed over processes; DDP averages gradients, so each process divides by its share of the mean.
        tokens = torch.tensor(float(batch.num_values), device=returns.device)
        scale = self._accelerator.num_processes / self._sum(tokens).clamp(min=1.0)
        predictions = torch.zeros_like(returns)
        losses, norms = [], []
        parts = batch.micro_batches(self._passes(batch))
        for index in range(updates):
            total = torch.zeros((), device=returns.device)
            for number, part in enumerate(parts, start=1):
                is_last = number == len(parts)
                with self._sync_if(is_last):
                    output = self._forward(part.input_ids, part.attention_mask.sum(dim=1))
                    values = output[:, :-1][part.value_mask[:, 1:]]
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
            self._set_trainable(attention=True)
        learning_rate = self._args.value_pretrain_learning_rate
        self._prepare(
            self._args.critic_learning_rate if learning_rate is None else learning_rate, warmup=False
        )
        try:
            yield
        finally:
            self._set_trainable(attention=not self._args.freeze_critic_attention)
            self._prepare(self._args.critic_learning_rate)

    def save_pretrained(
        self, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Write the critic as ``Critic.from_pretrained`` reads it, shards gathered; called on all processes."""
        weights = policy_weights(self._accelerator, self.critic)
        if weights is not None:
            self.critic.save_pretrained(folder, tokenizer, state_dict=weights)
        self._accelerator.wait_for_everyone()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into a checkpoint; called on all processes."""
        if self._is_sharded:
            state_dict_saver.save(self._sharded_state(), checkpoint_id=str(folder / _FOLDER))
        elif self._accelerator.is_main_process:
            torch.save(self.state_dict(), folder / _FILE)

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`; the number of processes may differ.

        Raises:
            UsageError: the checkpoint has no critic, or one of other parameters.
        """
        path = folder / (_FOLDER if self._is_sharded else _FILE)
        if not path.exists():
            raise UsageError(
                f"checkpoint {str(folder)!r} has no {path.name}: it is not of a run with a critic, or not of one "
                f"{'with' if self._is_sharded else 'without'} FSDP"
            )
        if not self._is_sharded:
            self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # copied from there
            return
        state = self._sharded_state()
        state_dict_loader.load(state, checkpoint_id=str(path))  # writes into the tensors
        set_optimizer_state_dict(self.critic, self._optimizer, state["optimizer"])
        self._continue_schedule(state["schedule"])

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule, of a critic that is not sharded."""
        return {
            "critic": self._saved_weights(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        expected, found = self._saved_weights().keys(), state["critic"].keys()
        if expected != found:
            raise UsageError(
                "the checkpoint's critic has other parameters than this one, such as "
                f"{min(expected ^ found)!r}: model, adapters or critic_model differ"
            )
        self.critic.load_state_dict(state["critic"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self._continue_schedule(state["schedule"])

    def _continue_schedule(self, state: dict[str, Any]) -> None:
        rates = self._schedule.base_lrs
        self._schedule.load_state_dict(state)
        keep_rates(self._schedule, rates)

    def _saved_weights(self) -> dict[str, Tensor]:
        """What trains, and buffers; the rest is as it was before training."""
        fixed = {name for name, _ in self.critic.named_parameters()} - self._trainable
        return {name: tensor for name, tensor in self.critic.state_dict().items() if name not in fixed}

    def _sharded_state(self) -> dict[str, Any]:
        reshard(self.critic)
        return {
            "critic": self._saved_weights(),
            "optimizer": get_optimizer_state_dict(self.critic, self._optimizer),
            "schedule": self._schedule.state_dict(),
        }

    def _enable_checkpointing(self) -> None:
        args = self._args
        plugin = self._accelerator.state.fsdp_plugin if self._is_sharded else None
        if not args.activation_checkpointing and not (plugin and plugin.activation_checkpointing):
            return
        self.critic.backbone.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
        if (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
            # Reentrant checkpoints cut the gradient where no input of a layer needs one.
            self.critic.backbone.enable_input_require_grads()

    def _set_trainable(self, *, attention: bool) -> None:
        reshard(self.critic)
        for name, parameter in self.critic.named_parameters():
            parameter.requires_grad_(name in self._trainable)
        if not attention:
            freeze_attention(self.critic)

    def _prepare(self, learning_rate: float, *, warmup: bool = True) -> None:
        # DDP looks at requires_grad when it wraps, so the wrapper is made anew whenever that changes.
        self._wrapped: nn.Module = self.critic
        if self._accelerator.num_processes > 1 and not self._is_sharded:
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
            fused=True,
        )
        steps = args.critic_warmup_steps if warmup else 0
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / steps) if steps else 1.0
        )

    def _forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """[b, t] values, anything finite beyond a row's length; rows of unequal length in several passes."""
        with self._accelerator.autocast():
            if self._accelerator.num_processes > 1:
                whole: Tensor = self._wrapped(input_ids)
                return whole
            buckets = length_buckets(lengths)
            parts = [self._wrapped(input_ids[rows, : int(lengths[rows[0]])]) for rows in buckets]
        return join_buckets(buckets, parts, input_ids.size(1))

    @contextlib.contextmanager
    def _sync_if(self, is_last: bool) -> Iterator[None]:
        """Gradients of all but the last forward pass of an update stay local."""
        if isinstance(self._wrapped, FSDPModule):
            self._wrapped.set_requires_gradient_sync(is_last)
            yield
        elif isinstance(self._wrapped, DistributedDataParallel) and not is_last:
            with self._wrapped.no_sync():
                yield
        else:
            yield

    def _step(self) -> Tensor:
        limit = self._args.max_grad_norm if self._args.max_grad_norm > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _passes(self, batch: TrajectoryBatch) -> int:
        """Forward passes over a batch: as many as the policy makes, more where rows would exceed its size."""
        needed = -(-batch.num_rows // self._args.per_device_train_batch_size)
        return self._most(max(self._args.gradient_accumulation_steps, needed))

    def _most(self, passes: int) -> int:
        """The most forward passes that any process needs, where all must make the same number."""
        if self._accelerator.num_processes == 1:
            return passes
        counts: Tensor = self._accelerator.gather(torch.tensor([passes], device=self._accelerator.device))
        return int(counts.max())

    def _sum(self, value: Tensor) -> Tensor:
        if self._accelerator.num_processes == 1:
            return value
        summed: Tensor = self._accelerator.reduce(value, reduction="sum")
        return summed
