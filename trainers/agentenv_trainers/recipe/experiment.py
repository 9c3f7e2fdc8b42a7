"""A training run from the first evaluation to the report: the part that all recipes share.

    with Experiment("swe_sao", parsed, controller, eval_env=held_out, eval_tasks="...") as experiment:
        trainer = SAOTrainer(model, config, experiment.rollouts, tokenizer)
        experiment.evaluate("before")
        experiment.train(trainer)
        experiment.evaluate("after")
    return experiment.exit_code

Invariants:
- However the block ends (done, interrupted, failed), rollouts and sandboxes are closed, summary.json and
  report.html say what is known, and the directory's lock is released.
- A resumed run repeats no finished part: the result before training and the pretrained critic are kept, training goes
  on at the last complete checkpoint, and lines that a crashed run wrote after it are dropped.
- The evaluations before and after play the same tasks, from seeds that training never uses.
- With several processes only the main one plays, writes and shows; the others go through the same stages, train, and
  end as the main one ends, whose exit code counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from transformers import PrinterCallback, Trainer

from agentenv.report import Progress, RunDirectory, write_report
from agentenv.report.model_card import write_model_card
from agentenv.report.page import UNISOLATED_WARNING
from agentenv.report.run_directory import read_lines
from agentenv.report.token_records import EpisodeTokens
from agentenv.rollout import AsyncController
from agentenv.rollout.slot import EpisodeSource
from agentenv.trace import TRAINER, ChromeTrace, NoTrace, timed
from agentenv.trajectory import Trajectory
from agentenv_trainers.checkpoint import last_complete
from agentenv_trainers.processes import (
    MainProcessFailedError,
    MainProcessInterrupted,
    from_main,
    processes_of_run,
)
from agentenv_trainers.recipe.arguments import Parsed
from agentenv_trainers.recipe.interruption import Interrupted, Interruption
from agentenv_trainers.recipe.lora import has_adapters, save_merged
from agentenv_trainers.recipe.playing import play
from agentenv_trainers.recipe.recorder import StepRecorder
from agentenv_trainers.recipe.results import described, evaluation_result
from agentenv_trainers.recipe.rollouts import RecordedRollouts
from agentenv_trainers.recipe.sandboxes import Sandboxes, close_sandboxes
from agentenv_trainers.token_recorder import TokenRecorder
from agentenv_trainers.trajectory_trainer import TrajectoryTrainer

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

EVALUATION_SEED = 2**31
"""First task seed of the evaluations, in every run; the seeds that training draws lie below it."""
PRETRAINING_SEED = 2**31 + 2**30
"""First task seed of the episodes that pretrain a critic."""


class Experiment:
    """One run in its output directory; a context manager around its stages.

    Args:
        name: of the recipe, shown in the report.
        parsed: the options; ``config.output_dir`` becomes the folder of checkpoints.
        controller: plays the training episodes and the evaluations; stopped at the end. None on processes other than
            the main one.
        eval_env: makes the environment of the evaluations; None likewise.
        eval_tasks: a sentence for the report: what the evaluations play, and whether training sees it.
        sandboxes: closed and counted at the end; None where the environment has none.
        trace: of the controller's proxy; opened in the directory, closed at the end.
        env: name of the environment, for the model card.

    Raises:
        UsageError: on entering, the output directory is in use or holds no run to resume.
    """

    def __init__(
        self,
        name: str,
        parsed: Parsed[Any, Any],
        controller: AsyncController | None,
        *,
        eval_env: EpisodeSource | None,
        eval_tasks: str,
        sandboxes: Sandboxes | None = None,
        trace: ChromeTrace | NoTrace | None = None,
        env: str | None = None,
    ) -> None:
        self._name, self._parsed = name, parsed
        self._arguments, self._config = parsed.arguments, parsed.config
        self._processes = processes_of_run()
        self._is_main = self._processes.is_main_process
        if self._is_main:
            assert controller is not None and eval_env is not None
            self._controller, self._eval_env = controller, eval_env
        self._sandboxes, self._eval_tasks, self._env_name = sandboxes, eval_tasks, env
        self._trace = trace or NoTrace()
        self._interruption = Interruption(quiet=not self._is_main)
        self._checkpoint: Path | None = None
        self._step = 0
        self._after: dict[str, Any] | None = None
        self.exit_code = 0
        """What the process should end with."""

    @property
    def rollouts(self) -> RecordedRollouts | None:
        """The source of trajectories to give to the trainer; None on processes other than the main one."""
        return self._rollouts if self._is_main else None

    def __enter__(self) -> Experiment:
        self._folder, self._checkpoint, has_critic = self._on_main(self._open)
        if self._checkpoint is not None:
            self._step = int(self._checkpoint.name.rpartition("-")[2])
        self._config.output_dir = str(self._folder / "checkpoints")
        if self._checkpoint is None and has_critic:
            self._config.critic_model = str(self._critic_path)  # pretrained before the run was interrupted
        if not self._is_main:
            self._interruption.__enter__()
            return self
        self._rollouts = RecordedRollouts(
            self._controller,
            self._run,
            self._interruption,
            shuffle_seed=self._config.seed if self._arguments.control == "shuffled_rewards" else None,
            keep=self._arguments.logged_trajectories,
            next_step=lambda: self._step + 1,
        )
        self._earlier_s = max(
            (line.get("seconds") or 0.0 for line in read_lines(self._run.metrics_path)), default=0.0
        )
        self._began = time.monotonic()
        self._interruption.__enter__()
        self._progress = Progress()
        self._progress.note(f"output: {self._run.path}")
        if self._checkpoint is not None:
            self._progress.note(f"resumed at step {self._step}")
        if self._sandboxes is not None and self._sandboxes.kind == "local-unisolated":
            self._progress.note(f"WARNING: {UNISOLATED_WARNING}")
        return self

    def evaluate(self, phase: str) -> dict[str, Any]:
        """Play the evaluation's tasks with the current policy, sampled at temperature 1.

        Args:
            phase: "before" or "after" training.

        Returns:
            The result, also kept for the summary.

        Raises:
            RolloutError: more than ``max_failure_rate`` of the episodes failed.
        """
        return self._on_main(lambda: self._evaluate(phase))

    def _evaluate(self, phase: str) -> dict[str, Any]:
        known: dict[str, Any] | None = self._run.record.get(phase)
        if known is not None:
            return known
        number = self._arguments.eval_episodes
        trajectories = self._play(f"evaluation {phase}", self._eval_env, EVALUATION_SEED, number)
        self._run.drop_phase(phase)
        self._run.log_trajectories(phase, self._step, trajectories)
        result = evaluation_result(trajectories)
        self._run.record[phase] = result
        self._run.save_record()
        low, high = result["interval"]
        failed = f", {sum(result['failed'].values())} failed" if result["failed"] else ""
        self._progress.note(
            f"success {phase} training: {result['success']:.3f} "
            f"[{low:.3f}, {high:.3f}] over {result['episodes']} episodes{failed}"
        )
        return result

    def pretrain_critic(self, trainer: Any, train_env: EpisodeSource | None) -> None:
        """Fit the critic to episodes of the starting policy on training tasks, before the first step.

        The critic is saved in the run's directory; a run whose ``critic_model`` is that folder starts with its
        values and skips this.

        Args:
            trainer: a trainer with a critic, such as ``SAOTrainer``.
            train_env: makes the training environment; None on processes other than the main one.
        """
        number = self._config.value_pretrain_episodes
        if number == 0 or self._checkpoint is not None:
            return
        if trainer.critic.head_is_trained:
            if self._is_main:
                self._progress.note(f"critic: values of {self._config.critic_model}, no pretraining")
            return

        def play() -> list[Trajectory]:
            assert train_env is not None
            trajectories = self._play("critic's episodes", train_env, PRETRAINING_SEED, number)
            self._progress.stage("critic's pretraining", unit="step", total=self._config.value_pretrain_steps)
            return trajectories

        def show(step: int, loss: float) -> None:
            self._interruption.check()
            self._progress.update(step, {"loss": f"{loss:.3f}"})

        trajectories = self._on_main(play)
        # In the middle of an update the others would wait for this process.
        with self._interruption.at_once() if self._processes.num_processes == 1 else nullcontext():
            report = trainer.pretrain_critic(
                trajectories, on_progress=lambda step, _, loss: self._on_main(lambda: show(step, loss))
            )
        trainer.critic_learner.save_pretrained(self._critic_path, trainer.processing_class)
        if not self._is_main:
            return
        self._progress.note(
            f"critic pretrained on {report.trajectories} episodes, "
            f"explained variance {report.explained_variance:.2f}"
        )
        explained = report.explained_variance
        self._run.record["critic"] = {
            "steps": report.steps,
            "trajectories": report.trajectories,
            "explained_variance": explained if math.isfinite(explained) else None,
        }
        self._run.save_record()

    @property
    def _critic_path(self) -> Path:
        return self._folder / "critic"

    def train(self, trainer: TrajectoryTrainer) -> None:
        """Train to the end (or to the interruption), with checkpoints, and save the model.

        Raises:
            Interrupted: the user ended the run; its checkpoint is written.
        """
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(
            StepRecorder(
                self._step_done,
                self._step_logged,
                lambda: self._on_main(lambda: self._interruption.requested),
            )
        )
        trainer.trace = self._trace
        trainer.token_recorder = TokenRecorder(
            self._log_tokens,
            trainer.processing_class,
            tokens_per_step=self._arguments.token_records,
            episodes_per_step=self._arguments.logged_trajectories,
        )
        total = self._config.max_steps
        if self._is_main:
            self._progress.stage("training", unit="step", total=total, done=self._step)
        try:
            trainer.train(resume_from_checkpoint=str(self._checkpoint) if self._checkpoint else None)
        except (Interrupted, MainProcessInterrupted):
            # Raised only while waiting for a batch: all is as the last finished step left it. If the batch had
            # just come, an older checkpoint is right: one of now would skip that batch's tasks.
            if not self._on_main(lambda: self._rollouts.batch_lost):
                self._save_checkpoint(trainer)
            raise
        self._on_main(self._interruption.check)
        self._save_model(trainer)

    def _save_model(self, trainer: Trainer) -> None:
        """The trained policy, as transformers loads it; beside it the adapters alone, where such were trained."""
        model = self._folder / "model"
        if has_adapters(trainer):
            save_merged(trainer, model)
            model = self._folder / "adapter"
        trainer.save_model(str(model))
        if self._is_main:
            (model / "training_args.bin").unlink(missing_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._is_main:
            self._interruption.__exit__()
            # The main process tells what it was, and its exit code counts; a code of this one would have the launcher
            # end the main one while it still cleans up.
            return isinstance(error, MainProcessFailedError | MainProcessInterrupted)
        interrupted = isinstance(error, KeyboardInterrupt)
        status = "finished" if error is None else "interrupted" if interrupted else "failed"
        try:
            report = self._conclude(status, error)
            self._progress.note(f"{status} after {self._step} steps; report: {report}")
        finally:
            self._run.close()
            self._progress.close()
            self._interruption.__exit__()
        if interrupted:
            self.exit_code = self._interruption.exit_code if self._interruption.requested else 130
        return interrupted

    def _conclude(self, status: str, error: BaseException | None) -> Path:
        """Close what runs, then write what is known."""
        try:
            self._controller.stop()
        except Exception:
            logger.exception("the rollouts did not stop cleanly")
        self._trace.close()
        left = close_sandboxes(self._sandboxes)
        summary = {
            "status": status,
            "before": self._run.record.get("before"),
            "after": self._run.record.get("after"),
            "sandbox": self._sandboxes.kind if self._sandboxes else None,
            "seconds": round(self._seconds(), 1),
            "steps": self._step,
            "episodes": self._controller.counts(),
            "containers_left": left,
            "args": self._run.record["args"],
        }
        if status == "failed":
            summary["error"] = f"{type(error).__name__}: {error}"
        self._run.write_summary(summary)
        if (self._run.model_path / "config.json").is_file():
            write_model_card(self._run.path)
        return write_report(self._run.path)

    def _step_done(self, step: int) -> None:
        self._step = step

    def _step_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down and show a finished training step."""
        if not self._is_main:
            return
        self._run.log_metrics(step, {**metrics, "seconds": self._seconds()})
        shown = {
            label: f"{metrics[name]:.2f}"
            for name, label in (("reward", "reward"), ("success", "success"), ("staleness_mean", "staleness"))
            if name in metrics
        }
        if "episodes_per_s" in metrics:
            shown["episodes/s"] = f"{metrics['episodes_per_s']:.1f}"
        self._progress.update(step, shown)

    def _log_tokens(self, episodes: Sequence[EpisodeTokens]) -> bool:
        """Write down a step's tokens; returns whether there is room for more."""
        room_mb = self._arguments.token_records_mb
        has_room = self._run.log_tokens(episodes, max_bytes=room_mb * 1e6)
        if not has_room:
            self._progress.note(f"tokens/ has its {room_mb:g} MB: no more is kept (--token_records_mb)")
        return has_room

    def _on_main(self, call: Callable[[], _Result]) -> _Result:
        return from_main(self._processes, call)

    def _open(self) -> tuple[Path, Path | None, bool]:
        """Open the run's directory; returns it, the checkpoint to go on from, and whether a critic was pretrained."""
        try:
            self._run = self._open_directory()
            self._trace.open(self._run.new_trace_path())
        except BaseException:
            self._controller.stop()
            close_sandboxes(self._sandboxes)
            raise
        return self._run.path, self._checkpoint, "critic" in self._run.record

    def _open_directory(self) -> RunDirectory:
        path = self._config.output_dir
        record = {
            "name": self._name,
            "env": self._env_name,
            "algorithm": type(self._config).__name__.removesuffix("Config"),
            "eval_tasks": self._eval_tasks,
            "sandbox": self._sandboxes.kind if self._sandboxes else None,
            **described(self._parsed),
        }
        if not self._arguments.resume:
            started = datetime.now().astimezone().isoformat(timespec="seconds")
            return RunDirectory.create(path, {**record, "started": started})
        run = RunDirectory.resume(path)
        self._checkpoint = last_complete(run.checkpoints_path)
        run.rewind(int(self._checkpoint.name.rpartition("-")[2]) if self._checkpoint else 0)
        run.record.update(record)
        run.record.pop("after", None)
        run.save_record()
        return run

    def _play(self, stage: str, env: EpisodeSource, first_seed: int, number: int) -> list[Trajectory]:
        with self._interruption.at_once(), timed(self._trace, TRAINER, "evaluation", stage=stage):
            return play(
                self._controller,
                env,
                range(first_seed, first_seed + number),
                self._progress,
                stage=stage,
                max_failure_rate=self._config.max_failure_rate,
            )

    def _save_checkpoint(self, trainer: Trainer) -> None:
        if self._step > 0 and trainer.model is not None:
            trainer._save_checkpoint(trainer.model, trial=None)

    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._began
