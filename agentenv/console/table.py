"""The built-in commands of `agentenv`: one line each, which is all that `--help` reads.

A new command is a new line here and a module with `function(subparsers)`, which adds one parser of the command's name
to what `argparse.ArgumentParser.add_subparsers` returned, with `set_defaults(run=callable(args) -> exit code)`.

Invariants:
- A command's module is imported when that command is run, not before.
- Names are unique; the summary is said here alone (the parser takes it as its description if it has none).
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["COMMANDS", "Command", "command"]


class Command(NamedTuple):
    """A command that ships with agentenv."""

    name: str
    """What follows `agentenv`."""

    target: str
    """"module:function", where `function(subparsers)` adds the parser."""

    summary: str
    """One line."""

    def load(self) -> Callable[[Any], None]:
        """Import the function that adds its parser."""
        module, _, function = self.target.partition(":")
        loaded: Callable[[Any], None] = getattr(importlib.import_module(module), function)
        return loaded


COMMANDS: dict[str, tuple[Command, ...]] = {
    "environments": (
        Command("list", "agentenv.console.environments:add_list", "list the registered environments"),
        Command("info", "agentenv.console.environments:add_info", "show one environment"),
        Command("new", "agentenv.console.new:add_parser", "write a package with an environment of your own"),
        Command(
            "play", "agentenv.console.play:add_parser", "act in an environment by hand, or watch a policy act"
        ),
        Command(
            "alfworld", "agentenv_envs.alfworld.commands:add_commands", "household games for ALFWorld-v0"
        ),
        Command("openenv", "agentenv.interop.openenv.command:add_parser", "serve one to OpenEnv's clients"),
        Command("shop", "agentenv_envs.shop.commands:add_commands", "the shop's official files"),
        Command("swe", "agentenv_envs.swe.commands:add_commands", "software-engineering tasks"),
    ),
    "models and runs": (
        Command(
            "eval",
            "agentenv.evaluation.command:add_parser",
            "measure how often a model, a server or a baseline solves an environment's tasks",
        ),
        Command("report", "agentenv.report.command:add_parser", "write the report of a run as one HTML file"),
        Command(
            "push",
            "agentenv.interop.hub:add_parser",
            "put a run's model and its card on the Hugging Face hub",
        ),
        Command(
            "proxy", "agentenv.proxy_command:add_parser", "serve a model to agent programs, record episodes"
        ),
        Command(
            "timeline",
            "agentenv.timeline.command:add_parser",
            "show who was busy when in runs that wrote a trace",
        ),
        Command("view", "agentenv.viewer.command:add_parser", "look at the episodes of a run in a browser"),
    ),
    "machines": (
        Command("cluster", "agentenv.cluster.commands:add_parser", "servers on the nodes of a Ray cluster"),
        Command(
            "completion",
            "agentenv.console.completion:add_parser",
            "write a script that completes commands in a shell",
        ),
        Command(
            "doctor",
            "agentenv_envs.doctor:add_commands",
            "check what this machine has of what environments and training need",
        ),
        Command(
            "plan",
            "agentenv.plan_command:add_parser",
            "estimate a run's GPU memory, and how many GPUs should train",
        ),
        Command(
            "sandbox",
            "agentenv_envs.swe.sandbox.service.commands:add_commands",
            "sandboxes for other machines",
        ),
        Command(
            "simulate",
            "agentenv.simulation.commands:add_parser",
            "reproduce a figure of ROLL Flash in virtual time",
        ),
    ),
}
"""Commands by the heading that `agentenv --help` shows them under."""


def command(name: str) -> Command | None:
    """The built-in command of that name."""
    return next((found for group in COMMANDS.values() for found in group if found.name == name), None)
