"""`agentenv eval`: how often a policy solves an environment's tasks.

Invariants:

* Bad input is one error before anything is played or written.
* The API key comes from the environment variable OPENAI_API_KEY alone and is written nowhere.
* The same command goes on where a killed one stopped; another command does not touch what that one has kept.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agentenv.errors import MissingExtraError, RolloutError, UsageError

__all__ = ["add_parser"]

KEY_VARIABLE: Final = "OPENAI_API_KEY"
_EXIT_FAILED: Final = 1
_EDGE_BYTES: Final = 1 << 16

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
    parser.add_argument(
        "env", metavar="ENV_ID", help="a registered id, module:Class, file.py or file.py:Class"
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", metavar="PATH", help="a model's folder, or its name on the hub; runs here")
    who.add_argument("--url", help=f"a server with OpenAI's chat API; its key is in {KEY_VARIABLE}")
    who.add_argument("--policy", metavar="NAME", help="a baseline: random, oracle, scripted, or module:Class")
    parser.add_argument("--split", help="of the tasks (default: the environment's own, often train)")
    parser.add_argument("--episodes", type=_whole(1), default=100, metavar="N", help="default: 100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, and keep the episodes")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where FILE's episodes are there")
    parser.add_argument(
        "--env-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the environment, as JSON where it is such; may be repeated",
    )
    parser.add_argument(
        "--seed",
        type=_whole(0),
        default=0,
        metavar="S",
        help="chooses the tasks and repeats the sampling (default: 0, the tasks of the recipes' evaluations)",
    )
    parser.add_argument("--num-envs", type=_whole(1), default=8, metavar="N", help="side by side; default: 8")
    parser.add_argument("--temperature", type=_number(0.0), default=1.0, help="default: 1; 0 is greedy")
    parser.add_argument(
        "--max-tokens", type=_whole(1), default=1024, metavar="N", help="of a turn; default: 1024"
    )
    parser.add_argument(
        "--max-turns", type=_whole(1), metavar="N", help="of an episode (default: the environment's)"
    )
    parser.add_argument(
        "--max-context",
        type=_whole(16),
        default=16384,
        metavar="N",
        help="tokens of an episode, with --model (default: 16384, or the model's positions if fewer)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights, with --model (default: on a GPU the model's own, else float32)",
    )
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="put before the first observation; @FILE reads it from there"
    )
    parser.add_argument("--model-name", metavar="NAME", help="with --url: the model to ask for")
    parser.add_argument(
        "--timeout",
        type=_number(0.001),
        default=300.0,
        metavar="S",
        help="seconds for one answer of the server, which is then asked again; default: 300",
    )
    parser.add_argument(
        "--retries", type=_whole(0), default=6, metavar="N", help="of a request to the server; default: 6"
    )
    parser.add_argument(
        "--episode-timeout", type=_number(0.001), default=7200.0, metavar="S", help="seconds; default: 7200"
    )
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
    args.system_prompt = _system_prompt(args.system_prompt)
    options = _env_options(args.env_option, args.split)
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
    make_player, who, server = _player(args, env_fn)
    settings |= who
    log_path = None if args.json is None else episodes_path(args.json)
    with EpisodeLog(log_path, settings, overwrite=args.overwrite) as log:
        if len(log.records) < args.episodes:
            player = make_player()
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


def _player(args: argparse.Namespace, env_fn: Any) -> tuple[Callable[[], Any], dict[str, Any], Any]:
    """What makes the player, the settings that it adds, and the server where there is one; cheap."""
    from agentenv.evaluation import run as playing

    if args.policy is not None:
        from agentenv.baselines import load_baseline

        env = env_fn()
        try:
            load_baseline(env, args.policy)
        finally:
            env.close()
        make = lambda: playing.baseline_player(env_fn, args.policy, args.seed, args)  # noqa: E731
        return make, {"policy": args.policy}, None
    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    if args.url is not None:
        from agentenv.inference.chat_server import ChatServer

        server = ChatServer(
            args.url,
            model=args.model_name,
            api_key=os.environ.get(KEY_VARIABLE),
            timeout_s=args.timeout,
            retries=args.retries,
        )
        name = server.choose_model()
        who = {"url": server.base, "model_name": name, **sampling}
        return lambda: playing.server_player(env_fn, server, args), who, server
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "train")
    who = {"model": args.model, "model_digest": _digest(Path(args.model)), **sampling}
    who |= {"max_context": args.max_context, "dtype": args.dtype}
    return lambda: playing.model_player(env_fn, args.model, args), who, None


def _env_options(given: list[str], split: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--env-option {text!r} must be KEY=VALUE, such as size=5 or levels=[1,2]")
        if name in options:
            raise UsageError(f"--env-option {name} is given twice")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    if split is not None:
        if "split" in options:
            raise UsageError("the split is given twice: --split and --env-option split=")
        options["split"] = split
    return options


def _system_prompt(text: str | None) -> str | None:
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--system-prompt {text}: cannot be read: {error}") from error


def _digest(folder: Path) -> str | None:
    """Tells weights that were trained on from those of before; None for a model of the hub.

    Of large files the size, head and tail count: training changes all of a file of weights.
    """
    if not folder.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin", ".jinja", ".model") and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()


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


def _whole(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
        return value

    return whole_number


def _number(least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"{text} must be a finite number of at least {least:g}")
        return value

    return number
