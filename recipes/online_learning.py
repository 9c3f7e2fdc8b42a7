"""Train a policy online while what is wanted of it changes: SAO and a running mean (arXiv 2607.07508, section 4.5).

    python recipes/online_learning.py                    both, one after the other, on one core, in a minute or two
    python recipes/online_learning.py --advantage gae    SAO alone; running_mean: the baseline alone
    python recipes/online_learning.py --output_dir DIR --resume   go on after Ctrl-C or a crash
    python recipes/online_learning.py --model Qwen/Qwen3-0.6B --env my_env.py --styles short long   your own, on a GPU

The policy answers questions, each once. A judge pays 1 for a right answer in the wanted style, else 0. It never says
which style that is, and wants another one after every --phase_steps steps. Any environment will do whose episodes end
with `quality` (1: right) and `style` in their info.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from agentenv.errors import RewardError, UsageError
from agentenv.inference import LLMProxy
from agentenv.report import Progress, RunDirectory
from agentenv.report.charts import Series, line_chart, smooth, standalone
from agentenv.report.run_directory import read_json, read_lines, write_text
from agentenv.rollout import AsyncController
from agentenv.trajectory import Trajectory
from agentenv_envs import text
from agentenv_envs.text.styled_reply import STYLES
from agentenv_trainers.recipe import (
    EnvFactory,
    Experiment,
    Parsed,
    Policy,
    RecipeArguments,
    find_environment,
    fit_context,
    load_policy,
    parse,
    run_recipe,
)
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.sao import SAOConfig, SAOTrainer

METHODS = {"gae": "SAO", "running_mean": "mean of the last 128 rewards"}
"""Advantages that are compared, with their names; the objective is the same, DIS."""

EMBEDDED_POLICY = Path(text.__file__).parent / "policy"

EMBEDDED: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_envs": 32,
    "max_tokens_per_turn": 12,
    "max_tokens_per_episode": 64,
    "critic_only_steps": 10,
    "save_steps": 50,
    "save_total_limit": 2,
}
"""Settings for the embedded policy, a hundred thousand parameters."""

TUNED: dict[str, dict[str, Any]] = {
    "gae": {"learning_rate": 3e-3, "critic_learning_rate": 1.5e-2, "beta": 0.1},
    "running_mean": {"learning_rate": 1e-3, "beta": 0.1},
}
"""For the embedded policy, chosen by `python benchmarks/online_learning.py --tune`, with the same effort for each. The
critic's rate is not tuned: it is five times that of the policy, as in the paper."""

OWN_MODEL: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 32,
    "max_tokens_per_turn": 256,
    "max_tokens_per_episode": 2048,
    "critic_only_steps": 10,
    "logged_trajectories": 8,
    "save_steps": 20,
    "save_total_limit": 2,
}
"""Settings for a model of yours. Learning rates are the paper's, those of the config."""

SMOKE: dict[str, Any] = {
    "phase_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "critic_only_steps": 1,
    "eval_episodes": 4,
    "save_steps": 2,
}
"""Sizes for ``--smoke``."""

WINDOW = 9
"""Steps that a point of the figure averages over, never across a change of the wanted style."""
LAST_STEPS = 20
"""Steps at the end of a phase over which the summary says what was learned."""


@dataclass
class OnlineArguments(RecipeArguments):
    """The recipe's own options."""

    styles: list[str] = field(
        default_factory=lambda: list(STYLES),
        metadata={"help": "What is wanted, in this order; one phase each."},
    )
    phase_steps: int = setting(
        150, "Versions of the policy until the next style is wanted. The paper: about 150."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phase_steps < 1:
            raise UsageError(f"--phase_steps is {self.phase_steps}, must be at least 1")
        if not self.styles:
            raise UsageError("--styles is empty, must name what is wanted")
        unknown = [style for style in self.styles if style not in STYLES]
        if self.env is None and unknown:
            raise UsageError(f"--styles: {unknown[0]!r} is none of StyledReply-v0's: {', '.join(STYLES)}")


class Judge:
    """The user, by rule: reward = quality x style, with a style that is wanted for a while and never named.

    What is wanted depends on nothing but the version of the policy that began the episode.

    Args:
        styles: wanted one after the other.
        phase_steps: for how many versions each; the last one for ever.
    """

    def __init__(self, styles: Sequence[str], phase_steps: int) -> None:
        self.styles, self.phase_steps = tuple(styles), phase_steps

    def wanted(self, version: int) -> str:
        """The style that replies begun by this version of the policy should have."""
        return self.styles[min(version // self.phase_steps, len(self.styles) - 1)]

    async def reward(self, trajectory: Trajectory) -> tuple[float, dict[str, Any]]:
        """1.0 for a right answer in the wanted style, else 0.0; in place of the environment's own reward.

        Raises:
            RewardError: the environment does not say how good the reply is, or which style it has.
        """
        missing = [name for name in ("quality", "style") if name not in trajectory.info]
        if missing:
            raise RewardError(f"the environment's info has no {missing[0]!r}, by which replies are judged")
        wanted = self.wanted(trajectory.start_version)
        right = trajectory.info["quality"] == 1 and trajectory.info["style"] == wanted
        return float(right), {"wanted": wanted, "success": right}


class JudgedRollouts(AsyncController):
    """A controller that adds quality and the share of each style to the numbers of a step."""

    def __init__(self, *args: Any, judge: Judge, **options: Any) -> None:
        super().__init__(*args, reward_fn=judge.reward, **options)
        self._styles = dict.fromkeys(judge.styles)
        self._shares: dict[str, float] = {}

    def get_batch(self, step: int) -> list[Trajectory]:
        """The episodes of a training step; their shares go to :meth:`metrics`."""
        batch = super().get_batch(step)
        said = [trajectory.info for trajectory in batch]
        self._shares = {
            f"style_{style}": sum(info["style"] == style for info in said) / len(said)
            for style in self._styles
        }
        self._shares["quality"] = sum(info["quality"] == 1 for info in said) / len(said)
        return batch

    def metrics(self) -> dict[str, float]:
        """Those of the controller, and the shares."""
        return {**super().metrics(), **self._shares}


@dataclass
class Parts:
    """What a run is made of."""

    train_env: EnvFactory
    eval_env: EnvFactory
    policy: Policy
    judge: Judge


def defaults(given: Mapping[str, Any], *, advantage: str, output_dir: str) -> dict[str, Any]:
    """The settings that stand below what the user set."""
    advantage = given.get("advantage", advantage)
    if given.get("model", "embedded") == "embedded":
        settings = EMBEDDED | TUNED.get(advantage, TUNED["running_mean"])
    else:
        settings = dict(OWN_MODEL)
        if "preset" in given:
            del (
                settings["gradient_accumulation_steps"],
                settings["max_tokens_per_episode"],
            )  # it sets the paper's
    if given.get("smoke"):
        settings |= SMOKE
    phase_steps = {"phase_steps": OnlineArguments.phase_steps, **settings, **given}["phase_steps"]
    settings["max_steps"] = phase_steps * len(given.get("styles", STYLES))
    return settings | {"advantage": advantage, "output_dir": output_dir}


def prepare(parsed: Parsed[OnlineArguments, SAOConfig]) -> Parts:
    """Find and check everything that the input names; writes nothing."""
    arguments, config = parsed.arguments, parsed.config
    arguments.check_engine()
    if arguments.model == "embedded" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more make its small matrices slower
    name, train, held_out = arguments.env, arguments.env_options, arguments.eval_env_options
    if name is None:
        name, train, held_out = "StyledReply-v0", {"split": "train"} | train, {"split": "heldout"} | held_out
    train_env, eval_env = find_environment(name, train), find_environment(name, held_out)
    policy = load_policy(arguments.model, embedded=EMBEDDED_POLICY, model_options=config.model_init_kwargs)
    config.model_init_kwargs = None
    arguments.check_layers(policy.model)
    fit_context(config, policy, parsed.given)
    return Parts(train_env, eval_env, policy, Judge(arguments.styles, arguments.phase_steps))


def train(parsed: Parsed[OnlineArguments, SAOConfig], parts: Parts) -> int:
    """One policy by one method; returns the exit code."""
    config, policy = parsed.config, parts.policy
    engines = parsed.arguments.open_engines(policy, config, parsed.chosen)
    trace = parsed.arguments.new_trace()
    controller = JudgedRollouts(
        parts.train_env,
        LLMProxy(engines, trace=trace),
        policy.tokenizer,
        config.rollout_config(),
        seed=config.seed,
        judge=parts.judge,
    )
    with Experiment(
        "online_learning",
        parsed,
        controller,
        eval_env=parts.eval_env,
        eval_tasks="Questions that training never asks, judged by what is wanted at that time.",
        trace=trace,
    ) as experiment:
        trainer = SAOTrainer(
            policy.model,
            config,
            experiment.rollouts,
            policy.tokenizer,
            peft_config=parsed.arguments.peft_config,
            critic_peft_config=parsed.arguments.critic_peft_config,
        )
        experiment.evaluate("before")
        experiment.pretrain_critic(trainer, parts.train_env)
        experiment.train(trainer)
        experiment.evaluate("after")
    return experiment.exit_code


def compare(runs: Mapping[str, Parsed[OnlineArguments, SAOConfig]], folder: Path) -> int:
    """Every method from the same start on the same questions, each in a folder of its own; returns the exit code."""
    first = next(iter(runs.values()))
    parts = prepare(first)
    if first.arguments.resume:
        directory = RunDirectory.resume(folder)
    else:
        given = {name: value for name, value in first.given.items() if name != "output_dir"}
        directory = RunDirectory.create(folder, {"given": given, "runs": list(runs)})
    try:
        for method, parsed in runs.items():
            place = folder / method
            if finished(place, parsed.config.max_steps):
                continue
            parsed.given["advantage"] = method  # so that the run can be resumed by itself, too
            parsed.config.output_dir = str(place)
            parsed.arguments.resume = (place / "run.json").is_file()
            exit_code = train(parsed, parts if parsed is first else prepare(parsed))
            if exit_code != 0:
                return exit_code
    finally:
        directory.close()
    show(folder, {METHODS[method]: folder / method for method in runs}, parts.judge)
    return 0


def finished(folder: Path, steps: int) -> bool:
    """Whether a run of that many steps came to its end there."""
    path = folder / "summary.json"
    summary = read_json(path) if path.exists() else {}
    return summary.get("status") == "finished" and summary.get("steps") == steps


def show(folder: Path, runs: Mapping[str, Path], judge: Judge) -> None:
    """Draw the reward of runs against the step, and say what it was in each phase.

    Args:
        folder: where online_learning.svg goes.
        runs: their folders, by the name of what was run.
        judge: whose wishes are the phases.
    """
    lines = {name: list(read_lines(run / "metrics.jsonl")) for name, run in runs.items()}
    steps = judge.phase_steps
    starts = [number * steps for number in range(len(judge.styles))]
    series = []
    with Progress() as progress:
        for name, logged in lines.items():
            ends = [*starts[1:], len(logged)]
            phases = [
                [line["reward"] for line in logged[start:end]]
                for start, end in zip(starts, ends, strict=True)
            ]
            ys = [value for phase in phases for value in smooth(phase, WINDOW)]
            series.append(Series(name, [line["step"] for line in logged], ys))
            said = [
                f"{style} {mean(phase[-LAST_STEPS:]):.2f}" if phase else f"{style} not reached"
                for style, phase in zip(judge.styles, phases, strict=True)
            ]
            progress.note(f"{name}: reward at the end of each phase: {', '.join(said)}")
        title = "Reward while what is wanted changes"
        chart = line_chart(
            series,
            x_label=f"training step; means of {WINDOW} steps",
            y_range=(0.0, 1.0),
            window=1,
            marks=[(start + 1, style) for start, style in zip(starts, judge.styles, strict=True)],
            label=title,
        )
        write_text(folder / "online_learning.svg", standalone(chart, title=title))
        progress.note(f"figure: {folder / 'online_learning.svg'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe; returns the exit code."""
    folder = time.strftime("runs/online_learning-%Y%m%d-%H%M%S")
    runs = {
        method: parse(
            OnlineArguments,
            SAOConfig,
            argv,
            defaults=partial(defaults, advantage=method, output_dir=folder),
            description=__doc__ or "",
        )
        for method in METHODS
    }
    first = runs["gae"]
    RunDirectory.check(first.config.output_dir, resume=first.arguments.resume)
    output_dir = Path(first.config.output_dir)
    if "advantage" not in first.given:
        return compare(runs, output_dir)
    parts, advantage = prepare(first), first.config.advantage
    exit_code = train(first, parts)
    if exit_code == 0:
        name = METHODS.get(advantage, advantage)
        if advantage == "running_mean":
            name = f"mean of the last {first.config.baseline_window} rewards"
        show(output_dir, {name: output_dir}, parts.judge)
    return exit_code


if __name__ == "__main__":
    sys.exit(run_recipe(main))
