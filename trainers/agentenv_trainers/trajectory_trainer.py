"""``trl.GRPOTrainer`` fed by a trajectory source instead of its own generation.

What is TRL's: the training loop, optimizer and schedule, accumulation, the fused log-prob head, logging,
resume. What is replaced: the dataset (a counter), generation (``controller.get_batch``), the split into
micro-batches (by length), checkpoints (atomic, with the controller's state) and the loss (sub-classes).

Invariants:

* A batch trains ``policy_updates`` optimizer steps, one by default. Batches are numbered 0, 1, 2, ..., one
  ``get_batch(number)`` each; the weights that a batch starts with have its number as their version.
* After the last optimizer step of a batch, before anything else sees that step, the engines get the new weights under
  the next version; so do they before the first batch of a run, new or continued.
* Only the main process touches the controller; trajectories are dealt out to the others. What the controller raises
  is raised on all of them.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl.trainer.grpo_trainer import GRPOTrainer

from agentenv.errors import RolloutError, UsageError
from agentenv.trace import NO_TRACE, TRAINER, Trace, timed
from agentenv.trajectory import Trajectory
from agentenv_trainers.batch import TrajectoryBatch, collate
from agentenv_trainers.batch_numbers import batch_numbers
from agentenv_trainers.checkpoint import fitting, last_complete, require_complete, staged_checkpoint
from agentenv_trainers.controller import TrajectorySource
from agentenv_trainers.feeding import pass_counter, select_rows, unused_reward
from agentenv_trainers.policy_weights import policy_weights
from agentenv_trainers.processes import from_main
from agentenv_trainers.schedules import keep_rates
from agentenv_trainers.settings import TrainerSettings
from agentenv_trainers.token_recorder import TokenRecorder

logger = logging.getLogger(__name__)

_CONTROLLER_FILE = "controller.json"
_BATCHES_FILE = "batches.json"

_Result = TypeVar("_Result")


class TrajectoryTrainer(GRPOTrainer):
    """Base of the trainers: everything but the objective.

    Args:
        model: the policy, or a path or hub name to load it from.
        args: settings.
        controller: where trajectories come from and weights go to; may be None on processes other than the
            main one.
        processing_class: the tokenizer.
        callbacks: called after the engines have the new weights of a step.
        optimizers: the policy's optimizer and schedule, if not TRL's.
        peft_config: adapters to train instead of the model, as in TRL; engines get the merged weights.

    Raises:
        UsageError: no controller on the main process; DeepSpeed, FSDP 1 or an adapter of the head, which are not
            supported.
    """

    args: TrainerSettings

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
        super().__init__(
            model=model,
            args=args,
            reward_funcs=[unused_reward],
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=processing_class,
            callbacks=[_Lifecycle(self), *callbacks],
            optimizers=optimizers,
            peft_config=copy.deepcopy(peft_config),  # PEFT writes this model's layers into it
        )
        if type(self.model.get_output_embeddings()).__name__ == "TrainableTokensWrapper":
            raise UsageError(
                "peft_config trains tokens (trainable_token_indices) of a model that ties its embeddings: TRL computes "
                "log-probs from the head's own weight, without the adapter; leave them out"
            )
        if self.is_deepspeed_enabled:
            raise UsageError(
                "DeepSpeed is not supported (one engine cannot drive policy and critic): launch with FSDP2 or DDP"
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise UsageError("FSDP 1 is not supported: launch with fsdp_version 2")
        if controller is None and self.accelerator.is_main_process:
            raise UsageError("controller is None: the main process needs a source of trajectories")
        self._controller = controller
        self.batch: TrajectoryBatch | None = None
        """The batch that is trained; this process's share of it."""
        self.batches_taken = 0
        """Number of the next batch, and version of the weights that it will start with."""
        self.trace: Trace = NO_TRACE
        """Where the spans of training go; may be set before :meth:`train`."""
        self._update_began = 0.0
        self.token_recorder: TokenRecorder | None = None
        """Is given what the steps compute for each token; on all processes or on none."""
        self._sync_s = 0.0
        self._warned_of_long_rows = False

    # Data

    _buffered_inputs: list[dict[str, Any]] | None

    def get_train_dataloader(self) -> DataLoader[int]:
        """A counter of forward passes: what they train on comes from the controller."""
        passes = self.args.max_steps * self.args.gradient_accumulation_steps
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return pass_counter(passes, rows)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The next batch, under TRL's names, rows in the order of their episodes.

        TRL's ``prompt`` is the first token only and the rest of the prompt is part of its ``completion`` with
        tool_mask 0: a row then needs no padding between prompt and completion.
        """
        started = time.perf_counter()
        trajectories = self._pull()
        waited = time.perf_counter() - started
        self.batches_taken += 1
        share = self._share(trajectories)
        self.batch = batch = self._collate([trajectories[place] for place in share])
        self._warn_of_long_rows(int(batch.lengths.max()))
        self._record_batch(trajectories, waited)
        if self.token_recorder is not None:
            step = self.state.global_step + 1
            self.token_recorder.begin(step, batch, trajectories, share, self.args.truncation)
        extra = self._score(batch, trajectories, share)
        self._update_began = self.trace.now()
        columns = torch.arange(batch.input_ids.size(1), device=batch.input_ids.device)
        attention = (columns < batch.lengths.unsqueeze(1)).long()
        sampled = batch.spread(batch.rollout_logprobs)[:, 1:]
        return {
            "prompt_ids": batch.input_ids[:, :1],
            "prompt_mask": attention[:, :1],
            "completion_ids": batch.input_ids[:, 1:],
            "completion_mask": attention[:, 1:],
            "tool_mask": batch.action_mask[:, 1:].long(),
            "sampling_per_token_logps": sampled,
            "old_per_token_logps": sampled,
            "num_items_in_batch": self._sum_over_processes(torch.tensor(float(batch.num_tokens))),
            **extra,
        }

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """The micro-batch of this forward pass; pulls a new batch at the first pass of a batch."""
        passes = self.args.gradient_accumulation_steps
        if self._step % (passes * self.args.policy_updates) == 0 or self._buffered_inputs is None:
            whole = self._generate_and_score_completions(generation_batch)
            assert self.batch is not None
            self._buffered_inputs = [select_rows(whole, part) for part in self.batch.micro_batches(passes)]
        inputs: dict[str, Any] = self._buffered_inputs[self._step % passes]
        return inputs

    def _score(
        self, batch: TrajectoryBatch, everything: Sequence[Trajectory], share: Sequence[int]
    ) -> dict[str, Tensor]:
        """What the loss needs besides tokens and log-probs, such as ``advantages`` [R, T - 1].

        Args:
            batch: this process's episodes.
            everything: the trajectories of all processes.
            share: which of them this process has.
        """
        raise NotImplementedError

    def _collate(self, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        return collate(
            trajectories,
            pad_token_id=self._tokenizer.pad_token_id,
            truncation=self.args.truncation,
            device=self.accelerator.device,
        )

    def _warn_of_long_rows(self, longest: int) -> None:
        """Say once that a row has more tokens than the policy has positions."""
        config = self.model.config.get_text_config()
        positions: int | None = getattr(config, "max_position_embeddings", None)
        if positions is None or longest <= positions or self._warned_of_long_rows:
            return
        self._warned_of_long_rows = True
        logger.warning(
            "an episode of %d tokens is trained, but the model has %d positions: it was not made for more, and with "
            "learned positions cannot compute them; limit max_tokens_per_episode",
            longest,
            positions,
        )

    def _pull(self) -> list[Trajectory]:
        """The trajectories of this batch, the same list on every process."""
        step = self.batches_taken
        with timed(self.trace, TRAINER, "wait for batch", step=step + 1):
            trajectories = self._ask(lambda controller: controller.get_batch(step))
        if not trajectories:
            raise RolloutError(f"the controller gave no trajectory for training step {step}")
        return trajectories

    def _ask(self, question: Callable[[TrajectorySource], _Result]) -> _Result:
        """What the controller says, on all processes; called on all of them."""

        def ask() -> _Result:
            assert self._controller is not None  # checked by the constructor
            return question(self._controller)

        return from_main(self.accelerator, ask)

    def _share(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Places of this process's share: dealt by length, so that every process has about as many tokens."""
        places = list(range(len(trajectories)))
        processes = self.accelerator.num_processes
        if processes == 1:
            return places
        if len(trajectories) < processes:
            raise RolloutError(f"{len(trajectories)} trajectories cannot be dealt to {processes} processes")

        def length(place: int) -> int:
            return len(trajectories[place].prompt_ids) + len(trajectories[place].completion_ids)

        return sorted(places, key=length, reverse=True)[self.accelerator.process_index :: processes]

    def _deal(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """This process's share."""
        return [trajectories[place] for place in self._share(trajectories)]

    # Numbers

    def _record(self, name: str, value: float) -> None:
        self._metrics["train"][name].append(value)

    def _sum_over_processes(self, values: Tensor) -> Tensor:
        values = values.to(self.accelerator.device)
        if self.accelerator.num_processes == 1:
            return values
        summed: Tensor = self.accelerator.reduce(values, reduction="sum")
        return summed

    def _record_batch(self, trajectories: Sequence[Trajectory], wait_s: float) -> None:
        """Numbers of the batch as it came; the same on every process but for the controller's own."""
        controllers: Mapping[str, float] = self._controller.metrics() if self._controller is not None else {}
        own = batch_numbers(trajectories, self.args.truncation, self.batches_taken - 1)
        for name, value in {**controllers, **own, "batch_wait_s": wait_s, "sync_s": self._sync_s}.items():
            self._record(name, float(value))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as ``transformers.Trainer``, with the policy's gradient norm under its documented name too."""
        if "grad_norm" in logs:
            logs["policy_grad_norm"] = logs["grad_norm"]
        super().log(logs, start_time)

    # Weights

    def push_weights(self) -> None:
        """Give the engines the policy's weights, under the version of the next batch; called on all processes."""
        started = time.perf_counter()
        with timed(self.trace, TRAINER, "weight sync", version=self.batches_taken):
            weights = policy_weights(self.accelerator, self.model_wrapped) or {}
            self._ask(lambda controller: controller.sync_weights(weights, self.batches_taken))
        self._sync_s = time.perf_counter() - started

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train to ``max_steps``; see ``transformers.Trainer.train``.

        Args:
            resume_from_checkpoint: a complete checkpoint's path, or True for the last complete one of
                ``output_dir``.

        Raises:
            UsageError: there is no such checkpoint, it is not complete, or it is of another model or of other settings
                of what is trained.
        """
        if resume_from_checkpoint is True:
            found = last_complete(self.args.output_dir)
            if found is None:
                raise UsageError(
                    f"no complete checkpoint in output_dir {self.args.output_dir!r} to continue from"
                )
            resume_from_checkpoint = str(found)
        elif resume_from_checkpoint:
            resume_from_checkpoint = str(require_complete(resume_from_checkpoint))
        self.batches_taken = 0
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial=trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        main = self.accelerator.is_main_process
        with (
            timed(self.trace, TRAINER, "checkpoint"),
            staged_checkpoint(
                run_dir, name, is_main_process=main, wait=self.accelerator.wait_for_everyone
            ) as staging,
        ):
            self._staging_dir = str(staging)
            try:
                # TRL's own method would write a model card and look up the git commit first.
                super(GRPOTrainer, self)._save_checkpoint(model, trial)
            finally:
                self._staging_dir = None
            self.accelerator.wait_for_everyone()  # the folder is there when the main process has come so far
            self._save_extra(staging / name)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``transformers.Trainer``; a sharded policy is written whole, too, when a user asks for it."""
        if not self.is_fsdp_enabled or _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model)
        self._save(output_dir or self.args.output_dir, state_dict=state)
        self.accelerator.wait_for_everyone()

    _staging_dir: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        output_dir: str = self._staging_dir or super()._get_output_dir(trial)
        return output_dir

    def _save_extra(self, folder: Path) -> None:
        """Files beside TRL's; called on all processes, written by the main one."""

        def write(controller: TrajectorySource) -> None:
            (folder / _BATCHES_FILE).write_text(
                json.dumps({"batches_taken": self.batches_taken}), encoding="utf-8"
            )
            state = json.dumps(controller.state_dict(), allow_nan=False)
            (folder / _CONTROLLER_FILE).write_text(state, encoding="utf-8")

        self._ask(write)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with fitting(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        rates = getattr(self.lr_scheduler, "base_lrs", ())
        with fitting(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            keep_rates(self.lr_scheduler, rates)
            self._load_extra(Path(checkpoint))

    def _load_extra(self, folder: Path) -> None:
        """Inverse of :meth:`_save_extra`, before the first batch; on all processes."""
        batches = folder / _BATCHES_FILE
        if not batches.exists():
            raise UsageError(
                f"checkpoint {str(folder)!r} has no {_BATCHES_FILE}: it is not of one of these trainers"
            )
        self.batches_taken = json.loads(batches.read_text(encoding="utf-8"))["batches_taken"]
        path = folder / _CONTROLLER_FILE

        def load(controller: TrajectorySource) -> None:
            if not path.exists():
                raise UsageError(
                    f"checkpoint {str(folder)!r} has no {_CONTROLLER_FILE}: its prompt ledger is lost"
                )
            controller.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

        self._ask(load)

    def _begin(self) -> None:
        """Called once per ``train()``, with model, optimizer and state in place, before the first batch."""
        # A batch whose updates the end of the last run cut short is not taken again.
        self._step = 0
        self._buffered_inputs = None
        # Weights first: an episode started with older ones would be stale at once.
        self.push_weights()
        self._ask(lambda controller: controller.start())

    def _end_step(self) -> None:
        """Called after every optimizer step."""
        now = self.trace.now()
        self.trace.span(TRAINER, "policy update", self._update_began, now, step=self.batches_taken)
        self._update_began = now
        if self.token_recorder is not None:
            self.token_recorder.finish(self.accelerator)
        if self._step % (self.args.gradient_accumulation_steps * self.args.policy_updates) == 0:
            self.push_weights()


class _Lifecycle(TrainerCallback):
    """Comes before the users' callbacks, so that they see engines with the new weights."""

    def __init__(self, trainer: TrajectoryTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._end_step()
