"""One run of benchmarks/learning.py, along the path that any training run takes.

agentenv.make, AsyncController, LLMProxy, TransformersEngine and a trainer; LaggedSource between controller and trainer
makes the staleness exact. Logging, checkpoints and progress bars are off: a run is small and is repeated if it fails.
"""

import functools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from learning_methods import ALL, CRITIC_RATE, Run
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

import agentenv
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.trajectory import Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOConfig, SAOTrainer, TrajectorySource
from agentenv_trainers.lagged_source import LaggedSource
from agentenv_trainers.recipe.experiment import EVALUATION_SEED
from agentenv_trainers.recipe.results import evaluation_result, versions

NUM_ENVS = 32
LIMITS = {"max_tokens_per_turn": 12, "max_tokens_per_episode": 256}
"""An episode of KeyDoor has at most a dozen turns and about a hundred tokens."""
CURVES = (
    "success",
    "staleness_mean",
    "response_tokens",
    "truncation_rate",
    "entropy",
    "masked_share",
    "masked_low",
    "masked_high",
    "masked_nonfinite",
    "policy_grad_norm",
    "critic_grad_norm",
    "critic_loss",
    "explained_variance",
    "advantage_std",
    "loss",
)
"""Kept for every training step, where the method has it."""

OnStep = Callable[[int, Mapping[str, float]], None]


class ShuffledRewards:
    """A source whose rewards are dealt out among the episodes of each batch anew; ``success`` stays as it was.

    Args:
        source: of the trajectories.
        seed: of the shuffling.
    """

    def __init__(self, source: TrajectorySource, seed: int) -> None:
        self._source, self._seed = source, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def get_batch(self, step: int) -> list[Trajectory]:
        """The batch, with the same rewards in another order."""
        batch = self._source.get_batch(step)
        rewards = [trajectory.reward for trajectory in batch]
        random.Random(f"{self._seed}:{step}").shuffle(rewards)
        return [replace(item, reward=reward) for item, reward in zip(batch, rewards, strict=True)]


class Curves(TrainerCallback):
    """The numbers of every step, by name; None where a step does not have one, or one that is not a number.

    Args:
        names: which ones.
        on_step: called with the number of finished steps and all their numbers.
    """

    def __init__(self, names: Sequence[str], on_step: OnStep | None = None) -> None:
        self._names, self._on_step = names, on_step
        self._steps: list[list[float | None]] = []

    @property
    def values(self) -> dict[str, list[float | None]]:
        """One list per name, all of the same length; names that no step has are left out."""
        columns = zip(self._names, zip(*self._steps, strict=True), strict=True) if self._steps else ()
        return {name: list(column) for name, column in columns if any(v is not None for v in column)}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step's numbers; the summary that transformers logs at the end is none."""
        if not logs or "train_runtime" in logs:
            return
        self._steps.append([_number(logs.get(name)) for name in self._names])
        if self._on_step is not None:
            self._on_step(state.global_step, logs)


def _number(value: float | None) -> float | None:
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


class Clock(TrainerCallback):
    """Where the wall time of a run goes: seconds by what the trainer reports of each step."""

    PARTS = ("batch_wait_s", "critic_s", "sync_s")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(self.PARTS, 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add up a step."""
        for name in self.PARTS:
            self.seconds[name] += (logs or {}).get(name) or 0.0


def play(run: Run, policy: Path, on_step: OnStep | None = None) -> dict[str, Any]:
    """Train by the method and evaluate what it came to; for the method "start" only evaluate.

    Args:
        run: what is to be done.
        policy: folder of the policy that the run starts from.
        on_step: called after every training step.

    Returns:
        JSON-able: ``run``, ``final`` (the evaluation), ``curves``, ``seconds`` and ``versions``.
    """
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    began, cpu_began = time.perf_counter(), time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    seconds: dict[str, float] = {}
    curves: dict[str, list[float | None]] = {}
    if run.method == "start":
        with AsyncController(
            training_env(run), LLMProxy([open_engine(model, tokenizer)]), tokenizer, evaluation_config()
        ) as controller:
            final = evaluate(controller, run, run.sizes.start_episodes)
    else:
        final, curves, seconds = train(run, model, tokenizer, on_step)
    seconds |= {"total": time.perf_counter() - began, "cpu": time.process_time() - cpu_began}
    return {
        "run": run.as_dict(),
        "final": final,
        "curves": curves,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "versions": versions(),
    }


def train(
    run: Run, model: Any, tokenizer: Any, on_step: OnStep | None = None
) -> tuple[dict[str, Any], dict[str, list[float | None]], dict[str, float]]:
    """The evaluation after training, the curves, and seconds by part."""
    method = ALL[run.method]
    began = time.perf_counter()
    # Weights of new layers, should there be any, are the run's own; the episodes come from the controller's seed.
    torch.manual_seed(run.seed)
    curves, clock = Curves(CURVES, on_step), Clock()
    with TemporaryDirectory() as folder:
        config = make_config(run, folder)
        controller = AsyncController(
            training_env(run),
            LLMProxy([open_engine(model, tokenizer)]),
            tokenizer,
            config.rollout_config(),
            seed=run.seed,
            task_seeds=range(method.pool) if method.pool is not None else None,
        )
        with controller:
            lagged = LaggedSource(controller, run.staleness)
            source: Any = ShuffledRewards(lagged, run.seed) if method.shuffled else lagged
            make = SAOTrainer if method.trainer == "sao" else GRPOTrainer
            trainer: Any = make(model, config, source, tokenizer, callbacks=[curves, clock])
            trainer.remove_callback(PrinterCallback)
            ready = time.perf_counter()
            trainer.train()
            trained = time.perf_counter()
            lagged.catch_up()
            final = evaluate(controller, run, run.sizes.evaluation_episodes)
            evaluated = time.perf_counter()
    parts = {name.removesuffix("_s"): value for name, value in clock.seconds.items()}
    seconds = {"setup": ready - began, "training": trained - ready, "evaluation": evaluated - trained}
    return final, curves.values, {**seconds, **parts}


def make_config(run: Run, folder: str) -> SAOConfig | GRPOConfig:
    """The trainer's config: what all runs share, and the method's own."""
    shared: dict[str, Any] = {
        "output_dir": folder,
        "seed": run.seed,
        "max_steps": run.sizes.steps,
        "per_device_train_batch_size": run.sizes.batch_size,
        "learning_rate": run.learning_rate,
        "mode": "sync",
        "worker": "inline",
        "num_envs": min(NUM_ENVS, run.sizes.batch_size),
        # The limit of turns is part of the task here: who has not opened the door by then has failed.
        "truncation": "zero",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **LIMITS,
    }
    method = ALL[run.method]
    if method.has_critic:
        shared["critic_learning_rate"] = CRITIC_RATE * run.learning_rate
        shared["critic_only_steps"] = run.sizes.critic_only_steps
    make = SAOConfig if method.trainer == "sao" else GRPOConfig
    return make(**{**shared, **run.settings})


def open_engine(model: Any, tokenizer: Any) -> TransformersEngine:
    """An engine with a slot for each environment."""
    return TransformersEngine(
        model, tokenizer, max_batch=NUM_ENVS, max_length=LIMITS["max_tokens_per_episode"]
    )


def evaluation_config() -> RolloutConfig:
    """Settings of a controller that trains nothing."""
    return RolloutConfig(num_envs=NUM_ENVS, worker="inline", **LIMITS)  # type: ignore[arg-type]


def training_env(run: Run) -> Callable[[], Any]:
    """Makes the environment of the training tasks."""
    return functools.partial(agentenv.make, run.environment)


def evaluate(controller: AsyncController, run: Run, episodes: int) -> dict[str, Any]:
    """Held-out tasks, sampled at temperature 1.

    Raises:
        RuntimeError: an episode failed, which no environment that runs in process has a reason to.
    """
    held_out = functools.partial(agentenv.make, run.environment, split="heldout")
    result = evaluation_result(
        controller.evaluate(
            held_out,
            range(EVALUATION_SEED, EVALUATION_SEED + episodes),
            num_envs=NUM_ENVS,
            sampling_seed=run.seed,
        )
    )
    if result["failed"]:
        raise RuntimeError(f"evaluation of {run.name}: episodes failed: {result['failed']}")
    return result
