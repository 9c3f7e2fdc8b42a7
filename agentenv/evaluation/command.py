"""`agentenv eval`: how often a policy solves an environment's tasks.

Invariants:

* Bad input is one error before anything is played or written.
* The API key is written nowhere.
* The same command goes on where a killed one stopped; another command does not touch what that one has kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from agentenv.errors import RolloutError, UsageError
from agentenv.evaluation.options import (
    add_environment_options,
    add_model_sources,
    add_sampling_options,
    environment_options,
    make_player,
    read_system_prompt,
    whole,
)

__all__ = ["add_parser"]

_EXIT_FAILED: Final = 1

_EPILOG: Final = """\
examples:
  agentenv eval KeyDoor-v0 --policy random --split heldout --episodes 200
  agentenv eval KeyDoor-v0 --model envs/agentenv_envs/text/policy_all --split heldout --json keydoor.json
  OPENAI_API_KEY=... agentenv eval SWE-v0 --url https://HOST/v1 --model-name NAME --env-option levels=[1,2,3]

With --json FILE each episode is kept in FILE's name with the ending .episodes.jsonl; a killed run goes on with the
same command. docs/evaluation.md describes the report."""


def add_parser(subparsers: Any) -> None:
    """Add the command to a parser; loads nothing heavy."""
    parser = subparsers.add_parser(
        "eval",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_environment_options(parser)
    who = parser.add_mutually_exclusive_group(required=True)
    add_model_sources(who)
    who.add_argument("--policy", metavar="NAME", help="a baseline: random, oracle, scripted, or module:Class")
    parser.add_argument("--episodes", type=whole(1), default=100, metavar="N", help="default: 100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, and keep the episodes")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where FILE's episodes are there")
    parser.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="S",
        help="chooses the tasks and repeats the sampling (default: 0, the tasks of the recipes' evaluations)",
    )
    parser.add_argument("--num-envs", type=whole(1), default=8, metavar="N", help="side by side; default: 8")
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code.

    Raises:
        UsageError: bad input, or a server that nobody can reach.
    """
    from agentenv.environment_source import find_environment
    from agentenv.evaluation.records import EpisodeLog
    from agentenv.evaluation.report import make_report, report_text
    from agentenv.evaluation.run import play_episodes

    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    if args.json is not None:
        _check_report_file(args.json)
    if args.model_name is not None and args.url is None:
        raise UsageError("--model-name goes with --url")
    read_system_prompt(args)
    options = environment_options(args)
    env_fn = find_environment(args.env, options, option="environment")
    settings: dict[str, Any] = {
        "environment": args.env,
        "split": args.split,
        "env_options": {name: value for name, value in options.items() if name != "split"},
        "episodes": args.episodes,
        "seed": args.seed,
        "max_turns": args.max_turns,
        "system_prompt": args.system_prompt,
    }
    make, who, server = make_player(args, env_fn)
    settings |= who
    log_path = None if args.json is None else episodes_path(args.json)
    with EpisodeLog(log_path, settings, overwrite=args.overwrite) as log:
        if len(log.records) < args.episodes:
            player = make()
            try:
                play_episodes(player, log, args.episodes, args.seed)
            except RolloutError as error:
                return _stopped(error, getattr(player.engine, "error", None), log.records, args)
            except KeyboardInterrupt:
                _say(_kept(log.records, args))
                raise
        extra = {"fields_left_out": server.unknown_fields} if server is not None else {}
        report = make_report(log.records.values(), settings, extra)
    if args.json is not None:
        _write_report(args.json, report)
    sys.stdout.write(f"{report_text(report)}\n")
    sys.stdout.flush()
    if not report["episodes"]:
        example = next((record.error for record in log.records.values() if record.error), "")
        _say(
            f"agentenv: error: infrastructure ended every episode: there is no result; for example: {example}"
        )
        return _EXIT_FAILED
    return 0


def _check_report_file(path: Path) -> None:
    """The report takes the place of what has its name: that must not be a device, a pipe or a link.

    Raises:
        UsageError: it is.
    """
    if not path.name or path.is_dir():
        raise UsageError(f"--json {path}: is a folder; name a file")
    if path.is_symlink():
        raise UsageError(f"--json {path}: is a link; name the file itself")
    if path.exists() and not path.is_file():
        raise UsageError(f"--json {path}: is no regular file; name one, or a new one")


def episodes_path(report: Path) -> Path:
    """Where the episodes of a report are kept."""
    return report.with_name(f"{report.name.removesuffix('.json')}.episodes.jsonl")


def _write_report(path: Path, report: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(
            f"{json.dumps(report, indent=1, ensure_ascii=False)}\n",
            encoding="utf-8",
            errors="backslashreplace",
        )
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"--json: {path} cannot be written: {error.strerror}") from error


def _stopped(
    error: RolloutError, of_engine: BaseException | None, records: Any, args: argparse.Namespace
) -> int:
    """The evaluation could not go on: what to say of it."""
    kept = _kept(records, args)
    if of_engine is not None:
        from agentenv.inference.chat_server import ServerGoneError

        if isinstance(of_engine, ServerGoneError):
            raise UsageError(f"{of_engine}{f' ({kept})' if kept else ''}") from error
    _say(f"agentenv: error: {error}")
    if kept:
        _say(kept)
    return _EXIT_FAILED


def _kept(records: Any, args: argparse.Namespace) -> str:
    ended = sum(not record.failed for record in records.values())
    if args.json is None or not ended:
        return ""
    return f"{ended} of {args.episodes} episodes are kept; the same command goes on"


def _say(text: str) -> None:
    if text:
        sys.stderr.write(f"{text}\n")
