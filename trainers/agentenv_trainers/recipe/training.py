"""A training run from its command line to its exit code: all of a recipe but what it trains on.

    RECIPE = Recipe("my_sao", MyArguments, SAOConfig, POLICY_FOLDER, set_up, embedded=EMBEDDED, smoke=SMOKE)

    if __name__ == "__main__":
        sys.exit(run_recipe(RECIPE.main))

Invariants:
- Whatever can be wrong with the input is found before anything is written.
- The trainer follows from the config: SAO with a critic that may be pretrained, GRPO without.
- With several processes the others than the main one load the policy and train; they set up no environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from agentenv.console.output import stderr_as
from agentenv.inference import LLMProxy
from agentenv.report import RunDirectory
from agentenv.rollout import AsyncController
from agentenv.rollout.slot import EpisodeSource
from agentenv_trainers.grpo import GRPOConfig, GRPOTrainer
from agentenv_trainers.recipe.arguments import Parsed, RecipeArguments, parse
from agentenv_trainers.recipe.experiment import Experiment
from agentenv_trainers.recipe.hub import take_hub_target
from agentenv_trainers.recipe.sandboxes import Sandboxes
from agentenv_trainers.recipe.sources import (
    Policy,
    find_environment,
    fit_context,
    load_policy,
)
from agentenv_trainers.sao import SAOConfig, SAOTrainer

__all__ = ["OWN_MODEL", "PRESET_FIELDS", "Recipe", "Setup", "other_environment", "split_setup"]

OWN_MODEL: Final[Mapping[str, Any]] = {
    "max_steps": 500,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 32,
    "logged_trajectories": 8,
    "save_steps": 20,
    "save_total_limit": 2,
}
"""For a model of the user's; ``--preset`` sets batch, context, turns and clip bounds of the paper instead."""

PRESET_FIELDS: Final = (
    "gradient_accumulation_steps",
    "max_turns",
    "max_tokens_per_episode",
    "clip_low",
    "clip_high",
)
"""What ``--preset`` sets, and a recipe's defaults then leave alone."""


@dataclass(frozen=True)
class Setup:
    """What a recipe found for its input.

    Args:
        train_env: makes the environment to train on, or the slots that play in its place.
        eval_env: makes that of the evaluations.
        eval_tasks: a sentence for the report: what the evaluations play, and whether training sees it.
        sandboxes: closed and counted at the end; None where the environment has none.
        before_start: done when policy and input are known to be good, and before anything is written; may take long.
        env: name of the environment, for the model card.
    """

    train_env: EpisodeSource
    eval_env: EpisodeSource
    eval_tasks: str
    sandboxes: Sandboxes | None = None
    before_start: Callable[[], None] | None = None
    env: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What one recipe has of its own.

    Args:
        name: in reports; output directories are called so, with the time.
        arguments: its options, a ``RecipeArguments``.
        config: of its trainer, ``SAOConfig`` or ``GRPOConfig`` or a class derived from one.
        embedded_policy: folder of what ``--model embedded`` stands for.
        set_up: finds the environments; called on the main process alone.
        embedded: settings below what the user set, for the embedded policy.
        own_model: those for any other model.
        smoke: sizes of ``--smoke``, over all others.
        over: of what the user set, more settings over ``embedded`` or ``own_model``.
        description: first part of ``--help``.
    """

    name: str
    arguments: type[RecipeArguments]
    config: type[SAOConfig] | type[GRPOConfig]
    embedded_policy: Path
    set_up: Callable[[Parsed[Any, Any]], Setup]
    _: KW_ONLY
    embedded: Mapping[str, Any]
    smoke: Mapping[str, Any]
    own_model: Mapping[str, Any] = field(default_factory=lambda: OWN_MODEL)
    over: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    description: str | None = None

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the recipe; returns the exit code.

        Args:
            argv: arguments without the program's name; those of the process by default.

        Raises:
            UsageError: bad input; nothing was written.
            RolloutError: the run had to stop.
        """
        parsed = self.parse(argv)
        with stderr_as(quiet=parsed.arguments.quiet, log_format=parsed.arguments.log_format):
            return self._run(parsed)

    def _run(self, parsed: Parsed[Any, Any]) -> int:
        arguments, config = parsed.arguments, parsed.config
        hub = take_hub_target(config)
        if not parsed.is_main_process:
            along = Experiment(self.name, parsed, None, eval_env=None, eval_tasks="")
            return _run_stages(along, parsed, self._load(parsed), None)
        RunDirectory.check(config.output_dir, resume=arguments.resume)
        arguments.check_engine()
        setup = self.set_up(parsed)
        policy = self._load(parsed)
        if hub is not None:
            hub.prepare()
        if setup.before_start is not None:
            setup.before_start()
        engines = arguments.open_engines(policy, config, parsed.chosen, peft_config=arguments.peft_config)
        trace = arguments.new_trace()
        controller = AsyncController(
            setup.train_env,
            LLMProxy(engines, trace=trace),
            policy.tokenizer,
            config.rollout_config(),
            seed=config.seed,
        )
        experiment = Experiment(
            self.name,
            parsed,
            controller,
            eval_env=setup.eval_env,
            eval_tasks=setup.eval_tasks,
            sandboxes=setup.sandboxes,
            trace=trace,
            env=setup.env,
        )
        exit_code = _run_stages(experiment, parsed, policy, setup.train_env)
        if hub is not None and exit_code == 0:
            hub.push(Path(config.output_dir).parent)
        return exit_code

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that stand below what the user set, ``given``."""
        settings = dict(self.embedded if given.get("model", "embedded") == "embedded" else self.own_model)
        if given.get("env") is not None:
            settings.pop("max_turns", None)  # the environment advises its own
        if self.over is not None:
            settings |= self.over(given)
        if "preset" in given:
            settings = {key: value for key, value in settings.items() if key not in PRESET_FIELDS}
        if given.get("smoke"):
            settings |= self.smoke
        return settings | {"output_dir": time.strftime(f"runs/{self.name}-%Y%m%d-%H%M%S")}

    def parse(self, argv: Sequence[str] | None = None) -> Parsed[Any, Any]:
        """Read the options.

        Raises:
            UsageError: any mistake in them.
        """
        return parse(
            self.arguments,
            self.config,
            argv,
            defaults=self.defaults,
            description=self.description or "",
            several_processes=True,
        )

    def _load(self, parsed: Parsed[Any, Any]) -> Policy:
        """The policy; the episodes' length is fitted to it."""
        arguments, config = parsed.arguments, parsed.config
        if arguments.model == "embedded" and "OMP_NUM_THREADS" not in os.environ:
            # More make its small matrices slower, several times so on a busy machine.
            torch.set_num_threads(1)
        policy = load_policy(
            arguments.model, embedded=self.embedded_policy, model_options=config.model_init_kwargs
        )
        config.model_init_kwargs = None
        arguments.check_layers(policy.model)
        fit_context(config, policy, parsed.given)
        return policy


def other_environment(arguments: RecipeArguments, env_id: str) -> Setup:
    """The set-up of a run on ``--env``, which gets none of the recipe's own arguments.

    Raises:
        UsageError: the environment cannot be made.
    """
    return Setup(
        find_environment(env_id, arguments.env_options),
        find_environment(env_id, arguments.eval_env_options),
        "Tasks from seeds that training never uses.",
        env=env_id,
    )


def split_setup(
    parsed: Parsed[Any, Any],
    env_id: str,
    eval_tasks: str,
    *,
    train: Mapping[str, Any] | None = None,
    held_out: Mapping[str, Any] | None = None,
    several_turns: bool = True,
    sandboxes: Sandboxes | None = None,
    before_start: Callable[[], None] | None = None,
) -> Setup:
    """The set-up of a recipe whose environment needs nothing but its splits; ``--env`` takes another environment.

    Args:
        parsed: options of the run.
        env_id: the recipe's own environment.
        eval_tasks: see :class:`Setup`; of the recipe's own environment.
        train: its arguments for training, over ``{"split": "train"}``.
        held_out: its arguments for evaluation over those for training and ``{"split": "heldout"}``.
        several_turns: it has a limit of turns of its own, which follows ``--max_turns``.
        sandboxes: see :class:`Setup`, as the next.
        before_start: likewise.

    Raises:
        UsageError: the environment cannot be made.
    """
    arguments = parsed.arguments
    if arguments.env is not None:
        return other_environment(arguments, arguments.env)
    options = {"split": "train", **(train or {})}
    if several_turns and parsed.config.max_turns is not None:
        options["max_turns"] = parsed.config.max_turns
    eval_options = {**options, "split": "heldout", **(held_out or {})}
    return Setup(
        find_environment(env_id, options | arguments.env_options),
        find_environment(env_id, eval_options | arguments.eval_env_options),
        eval_tasks,
        sandboxes,
        before_start,
        env_id,
    )


def _run_stages(
    experiment: Experiment, parsed: Parsed[Any, Any], policy: Policy, train_env: EpisodeSource | None
) -> int:
    """Evaluate, train, evaluate; returns the exit code."""
    arguments, config = parsed.arguments, parsed.config
    with experiment:
        trainer: SAOTrainer | GRPOTrainer
        if isinstance(config, SAOConfig):
            trainer = SAOTrainer(
                policy.model,
                config,
                experiment.rollouts,
                policy.tokenizer,
                peft_config=arguments.peft_config,
                critic_peft_config=arguments.critic_peft_config,
            )
        else:
            trainer = GRPOTrainer(
                policy.model,
                config,
                experiment.rollouts,
                policy.tokenizer,
                peft_config=arguments.peft_config,
            )
        experiment.evaluate("before")
        if isinstance(config, SAOConfig):
            experiment.pretrain_critic(trainer, train_env)
        experiment.train(trainer)
        experiment.evaluate("after")
    return experiment.exit_code
