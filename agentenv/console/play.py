"""`agentenv play`: act in an environment by hand, or watch a baseline or a model act.

Invariants:
- Whatever the end is (the task's, /quit, the end of the input, Ctrl-C, an error), the environment is closed, and the
  transcript that was asked for is written.
- A policy is played by the rollout that evaluates and trains; a person by gymnasium's own loop.
- Nothing runs without isolation that was not asked to.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from agentenv.console.keyboard import Keyboard
from agentenv.console.screen import Screen
from agentenv.console.stage import Stage
from agentenv.environment_source import EnvFactory, find_environment
from agentenv.errors import AgentEnvError, EnvError, UsageError
from agentenv.evaluation.options import (
    add_environment_options,
    add_model_sources,
    add_sampling_options,
    environment_options,
    make_player,
    read_system_prompt,
    whole,
)
from agentenv.evaluation.run import Player
from agentenv.inference import LLMProxy
from agentenv.report.run_directory import write_json
from agentenv.rollout import AsyncController
from agentenv.rollout.workers import worker_kind

__all__ = ["add_parser"]

_UNISOLATED: Final = "local-unisolated"
_MAX_PACE_S: Final = 10.0
_DEFAULT_PACE_S: Final = 0.5

_EPILOG: Final = """\
examples:
  agentenv play KeyDoor-v0
  agentenv play GuessNumber-v0 --seed 7 --policy oracle
  agentenv play KeyDoor-v0 --policy envs/agentenv_envs/text/policy_all --temperature 0 --json episode.json
  agentenv play ToolArithmetic-v0 --url http://127.0.0.1:8000/v1
  printf '50\\n25\\n' | agentenv play GuessNumber-v0 --seed 7

docs/console.md tells more."""


def add_parser(subparsers: Any) -> None:
    """Add `play`."""
    parser = subparsers.add_parser(
        "play", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_environment_options(parser)
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--policy",
        metavar="NAME",
        help="watch a baseline (random, oracle, scripted, module:Class), or a model by its folder or its owner/name "
        "on the hub (default: you act)",
    )
    add_model_sources(who)
    parser.add_argument("--seed", type=whole(0), metavar="S", help="of the task (default: drawn, and shown)")
    parser.add_argument(
        "--pace",
        type=_pace,
        metavar="S",
        help=f"seconds between the turns of a policy (default: {_DEFAULT_PACE_S} on a terminal, else 0)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the transcript")
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play one episode; returns the exit code.

    Raises:
        UsageError: bad input.
        AgentEnvError: the environment or the policy broke.
    """
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise UsageError(f"--json {args.json}: must be a file in a folder that exists")
    read_system_prompt(args)
    if args.policy is not None and ("/" in args.policy or Path(args.policy).is_dir()):
        args.model, args.policy = args.policy, None
    by_hand = args.policy is None and args.model is None and args.url is None
    screen = Screen()
    keyboard = Keyboard(screen)
    env_fn, options = _environment(args, screen, keyboard)
    # The sampling follows from it too: the same command shows the same episode.
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    args.num_envs = 1
    pace_s = args.pace if args.pace is not None else _DEFAULT_PACE_S if screen.is_terminal else 0.0
    typed = by_hand and keyboard.is_terminal
    stages: list[Stage] = []

    def staged() -> Stage:
        stages.append(Stage(env_fn(), screen, pace_s=pace_s, shows_actions=not typed))
        return stages[-1]

    staged.worker = "inline" if worker_kind(env_fn) == "inline" else "thread"  # type: ignore[attr-defined]
    play = partial(_by_hand, staged, keyboard, args) if by_hand else _watch(_player(args, staged), args)
    screen.title(f"{args.env}, seed {args.seed}" + (" (/help tells how to act)" if typed else ""))
    reason, error = "interrupted", ""
    try:
        reason, error = play()
    except AgentEnvError as broken:
        reason, error = "broken", str(broken)
        raise
    finally:
        if stages:
            _end(stages[-1], screen, args, options, reason, error)
    if error:
        raise EnvError(error)
    if screen.is_left:
        raise BrokenPipeError
    return 0


def _environment(
    args: argparse.Namespace, screen: Screen, keyboard: Keyboard
) -> tuple[EnvFactory, dict[str, Any]]:
    """What makes the environment, with its arguments; asks before anything would run without isolation.

    Raises:
        UsageError: there is no such environment, or it would run without isolation and nobody said that it may.
    """
    options = environment_options(args)
    env_fn = find_environment(args.env, options, option="environment")
    env = env_fn()
    kind = getattr(env.unwrapped, "sandbox_kind", None)
    env.close()
    if kind == _UNISOLATED and options.get("sandbox") != _UNISOLATED:
        if not keyboard.is_terminal:
            raise UsageError(
                f"{args.env} would run commands on this machine without isolation (no Docker engine answers); start "
                f"Docker, or allow it: --env-option sandbox={_UNISOLATED}"
            )
        if not keyboard.agrees(
            "No Docker engine answers. Run the commands on this machine, as you, without isolation?"
        ):
            raise UsageError("not played: start Docker, and `agentenv doctor` says whether it is found")
        options["sandbox"] = _UNISOLATED
        env_fn = find_environment(args.env, options, option="environment")
    if kind is not None:
        screen.note(
            f"sandbox: {kind}" + (", commands run on this machine as you" if kind == _UNISOLATED else "")
        )
    return env_fn, options


def _player(args: argparse.Namespace, staged: Callable[[], Stage]) -> Callable[[], Player]:
    """What makes the policy.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        make: Callable[[], Player] = make_player(args, staged)[0]
        return make
    except UsageError as error:
        if args.policy is None or ":" in args.policy:
            raise
        raise UsageError(f"{error}; a model is named by its folder, by owner/name, or by --model") from error


def _by_hand(staged: Callable[[], Stage], keyboard: Keyboard, args: argparse.Namespace) -> tuple[str, str]:
    """Have a person act; returns why the episode ended, and no error.

    Raises:
        EnvError: the environment raised.
    """
    env = staged()
    max_turns = args.max_turns or env.max_turns
    with asyncio.Runner() as loop:
        _settled(loop, lambda: env.reset(seed=args.seed))
        while not env.end_reason:
            if max_turns is not None and env.turns >= max_turns:
                return "max_turns", ""
            action = keyboard.action(env.turns + 1, env.observation)
            if action is None:
                return "left", ""
            _settled(loop, partial(env.step, action))
    return env.end_reason, ""


def _settled(loop: asyncio.Runner, call: Callable[[], Any]) -> None:
    """Make a call of the environment, whose methods may be coroutines.

    Raises:
        EnvError: the environment raised.
    """

    async def wait(result: Awaitable[Any]) -> None:
        await result

    try:
        result = call()
        if inspect.isawaitable(result):
            loop.run(wait(result))
    except AgentEnvError:
        raise
    except Exception as error:
        raise EnvError(f"the environment raised {type(error).__name__}: {error}") from error


def _watch(make: Callable[[], Player], args: argparse.Namespace) -> Callable[[], tuple[str, str]]:
    """What has a policy act, and returns why the episode ended, and what broke it, or an empty text."""

    def play() -> tuple[str, str]:
        player = make()
        proxy = LLMProxy([player.engine])
        with AsyncController(
            player.env_fn, proxy, player.tokenizer, player.config, seed=args.seed
        ) as controller:
            (episode,) = controller.evaluate(None, [args.seed], num_envs=1, sampling_seed=args.seed)
        return episode.end_reason, str(episode.info["error"]) if episode.failed else ""

    return play


def _end(
    stage: Stage, screen: Screen, args: argparse.Namespace, options: dict[str, Any], reason: str, error: str
) -> None:
    """Close the environment, say how the episode ended, and write the transcript."""
    try:
        stage.close()
    finally:
        record = stage.record(args.seed, reason, error)
        turns = f"{record.steps} turn{'' if record.steps == 1 else 's'}"
        if error or reason in ("interrupted", "left"):
            screen.title(f"{reason} after {turns}, reward so far {record.reward:g}")
        else:
            outcome = "solved" if record.success else "not solved"
            screen.title(f"{outcome} after {turns}, reward {record.reward:g} ({reason})")
        if args.json is not None:
            who = {name: getattr(args, name) for name in ("policy", "model", "url") if getattr(args, name)}
            settings = {"environment": args.env, "env_options": options, **(who or {"policy": "by hand"})}
            write_json(args.json, {"settings": settings, **asdict(record)})


def _pace(text: str) -> float:
    seconds = float(text)
    if not 0.0 <= seconds <= _MAX_PACE_S:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to {_MAX_PACE_S:g}")
    return seconds
