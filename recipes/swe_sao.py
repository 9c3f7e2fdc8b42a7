"""Train an agent that repairs code, by SAO: single rollouts, asynchronous, with a critic (arXiv 2607.07508).

    python recipes/swe_sao.py                             the embedded policy, on 2 cores, in minutes
    python recipes/swe_sao.py --env my_env.py             your own environment
    python recipes/swe_sao.py --output_dir DIR --resume   go on after Ctrl-C or a crash
    python recipes/swe_sao.py --model Qwen/Qwen3-0.6B --dataset tasks.jsonl --preset swe   your own, on a GPU
    python recipes/swe_sao.py --model Qwen/Qwen3-0.6B --agent mini-swe-agent   an agent program as it is released
    accelerate launch --multi_gpu --num_processes 2 recipes/swe_sao.py   the same in two processes, or on two GPUs

The agent writes one bash command a turn, in a sandbox, and ends with `submit`; hidden tests then say 1 or 0. An agent
program with a loop of its own brings its own habits: docs/agents-as-they-are.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from agentenv.agents import AgentRunner
from agentenv.errors import UsageError
from agentenv_envs.swe.sandbox import open_backend, reap_in_background

if __name__ == "__main__":
    reap_in_background()  # what a killed run left need not wait for the imports below: they take seconds

from agentenv_envs import swe
from agentenv_envs.swe.agents import Launcher, SWEAgentPrograms, command_line, mini_swe_agent, openhands
from agentenv_envs.swe.sandbox.images import ensure_base_image
from agentenv_trainers.recipe import (
    OWN_MODEL,
    Parsed,
    Recipe,
    RecipeArguments,
    Sandboxes,
    Setup,
    other_environment,
    run_recipe,
    show_lines,
    split_setup,
)
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.sao import SAOConfig

EMBEDDED: dict[str, Any] = {
    "max_steps": 90,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_envs": 16,
    "asynchrony": 1.0,
    "max_turns": 12,
    "max_tokens_per_turn": 48,
    "max_tokens_per_episode": 640,
    "learning_rate": 8e-5,
    "critic_learning_rate": 1e-3,
    "value_pretrain_episodes": 256,
    "value_pretrain_steps": 16,
    "save_steps": 30,
    "save_total_limit": 2,
}
"""Settings for the embedded policy, half a million parameters: those of the paper are made for billions."""

DATA_SET: dict[str, Any] = {
    "reset_timeout_s": 1800.0,
    "step_timeout_s": 2400.0,
    "episode_timeout_s": 7200.0,
    "max_tokens_per_episode": 8192,
}
"""For real repositories, over the above: a first reset may build an image, the last step runs a test suite."""

AGENT: dict[str, Any] = {"num_envs": 16, "max_tokens_per_turn": 1024, "max_tokens_per_episode": 16384}
"""For agent programs with a model of the user's, over the above: their prompts are long, and each is a process."""

SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "eval_episodes": 4,
    "value_pretrain_episodes": 4,
    "value_pretrain_steps": 2,
    "save_steps": 1,
}
"""Sizes for ``--smoke``."""


@dataclass
class SWEArguments(RecipeArguments):
    """The recipe's own options."""

    dataset: str = setting(
        "embedded",
        "embedded (tasks generated from a seed), a local JSONL or Parquet file, or a name on the hub.",
    )
    sandbox: Literal["auto", "docker", "local-unisolated"] = setting(
        "auto",
        "Where commands run. auto: Docker where an engine answers, else without isolation, said loudly.",
    )
    sandbox_url: str | None = setting(
        None,
        "Take the sandboxes from a service, or several with commas between, or from those of a Ray cluster (ray): "
        "docs/sandbox-service.md, docs/several-machines.md.",
    )
    allow_unisolated: bool = setting(False, "Run the code of a data set without isolation too.")
    agent: Literal["none", "mini-swe-agent", "openhands"] = setting(
        "none",
        "Train an agent program as it is released, on the same tasks; it has to be installed. Others: --agent_command.",
    )
    agent_command: str | None = setting(
        None,
        "Command line of any agent program that takes OPENAI_BASE_URL, with {issue_file}, {workdir}, {docker} and "
        "{model} filled in; of --agent mini-swe-agent its command, where `mini` is not on the PATH; of "
        "--agent openhands the python that has it.",
    )
    agent_config: str | None = setting(
        None,
        "Configuration of mini-swe-agent, and more of its -c options with spaces between: 'mini_textbased.yaml "
        "agent.step_limit=20'. Unset: mini.yaml.",
    )

    def launcher(self) -> Launcher | None:
        """What starts the agent program; None: there is none, the environment is played.

        Raises:
            UsageError: it cannot be started, or options do not go together.
        """
        if self.agent == "none" and self.agent_command is None:
            if self.agent_config is not None:
                raise UsageError("--agent_config is for --agent mini-swe-agent")
            return None
        if self.env is not None:
            raise UsageError(
                "--env names an environment to play; an agent program plays the recipe's own tasks"
            )
        if self.agent != "mini-swe-agent" and self.agent_config is not None:
            which = "--agent_command alone" if self.agent == "none" else f"--agent {self.agent}"
            raise UsageError(f"--agent_config is for --agent mini-swe-agent, not for {which}")
        if self.agent == "none":
            assert self.agent_command is not None
            return command_line(self.agent_command)
        if self.model == "embedded":
            raise UsageError(
                f"--agent {self.agent} needs --model: its prompts are too long for the embedded policy"
            )
        if self.agent == "openhands":
            if self.agent_command is None:
                raise UsageError("--agent openhands needs --agent_command: the python of its environment")
            return openhands(self.agent_command)
        config, *options = (self.agent_config or "").split() or ["mini.yaml"]
        return mini_swe_agent(self.agent_command or "mini", config=config, options=options)


def more_settings(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings for the rows of a data set and for agent programs, where the user named them."""
    settings: dict[str, Any] = {}
    if given.get("env") is None and given.get("dataset", "embedded") != "embedded":
        settings |= DATA_SET
    has_agent = given.get("agent", "none") != "none" or given.get("agent_command") is not None
    if has_agent and given.get("model", "embedded") != "embedded":
        settings |= AGENT
    return settings


def make_base_image(client: Any) -> None:
    """Make the image of the sandboxes where the engine lacks it, with progress: episodes would not wait that long."""
    show_lines(
        "making the image of the sandboxes, once a machine",
        lambda show: ensure_base_image(client, progress=show),
    )


def set_up(parsed: Parsed[SWEArguments, SAOConfig]) -> Setup:
    """Find the environments; their pool of sandboxes is held open for the whole run, so that they share it."""
    arguments = parsed.arguments
    launcher = arguments.launcher()
    if arguments.env is not None:
        return other_environment(arguments, arguments.env)
    sandboxes = open_backend(arguments.sandbox, url=arguments.sandbox_url)
    train: dict[str, Any] = {"sandbox": sandboxes.kind, "allow_unisolated": arguments.allow_unisolated}
    if arguments.sandbox_url is not None:
        train["sandbox_url"] = arguments.sandbox_url
    client = getattr(sandboxes.backend, "client", None)
    if arguments.dataset == "embedded":
        tasks = "Generated tasks that training never sees."
    else:
        tasks = "One row in five, never trained on; a data set of fewer than ten rows is not split."
        train["dataset"] = arguments.dataset
    needs_image = client is not None and arguments.dataset == "embedded"
    before_start = partial(make_base_image, client) if needs_image else None
    if launcher is not None:
        return agent_setup(parsed, launcher, tasks, train, sandboxes, before_start)
    return split_setup(parsed, "SWE-v0", tasks, train=train, sandboxes=sandboxes, before_start=before_start)


class AgentSandboxes:
    """The run's sandboxes, and who plays in them: those hold the pool open between evaluations."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self.kind = sandboxes.kind
        self.players: list[SWEAgentPrograms] = []

    def left(self) -> int:
        """How many still exist."""
        return self._sandboxes.left()

    def close(self) -> None:
        """Remove all of them."""
        for player in self.players:
            player.close()
        self._sandboxes.close()


def agent_setup(
    parsed: Parsed[SWEArguments, SAOConfig],
    launcher: Launcher,
    tasks: str,
    options: Mapping[str, Any],
    sandboxes: Sandboxes,
    before_start: Callable[[], None] | None,
) -> Setup:
    """Agent programs in the environment's place.

    Raises:
        UsageError: a setting or an argument of ``--env_kwargs`` is wrong.
    """
    held = AgentSandboxes(sandboxes)
    runners = []
    try:
        AgentRunner.check(parsed.config.rollout_config())
        arguments = parsed.arguments
        for split, more in (("train", arguments.env_options), ("heldout", arguments.eval_env_options)):
            try:
                held.players.append(SWEAgentPrograms(launcher, **{"split": split, **options, **more}))
            except TypeError as error:
                raise UsageError(f"--env_kwargs: {error}") from None
            runners.append(AgentRunner(held.players[-1]))
    except BaseException:
        held.close()
        raise
    return Setup(*runners, tasks, held, before_start, "SWE-v0")


RECIPE = Recipe(
    "swe_sao",
    SWEArguments,
    SAOConfig,
    Path(swe.__file__).parent / "policy",
    set_up,
    embedded=EMBEDDED,
    own_model={**OWN_MODEL, "value_pretrain_episodes": 256},
    over=more_settings,
    smoke=SMOKE,
    description=__doc__,
)
main = RECIPE.main

if __name__ == "__main__":
    sys.exit(run_recipe(main))
