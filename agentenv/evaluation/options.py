"""What commands that have a policy play an environment share: their options, and who plays.

Invariants:

* The API key comes from the environment variable OPENAI_API_KEY alone.
* Nothing heavy is loaded before a player is made.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agentenv.errors import MissingExtraError, UsageError

__all__ = [
    "KEY_VARIABLE",
    "add_environment_options",
    "add_model_sources",
    "add_sampling_options",
    "environment_options",
    "finite",
    "make_player",
    "read_system_prompt",
    "whole",
]

KEY_VARIABLE: Final = "OPENAI_API_KEY"
_EDGE_BYTES: Final = 1 << 16


def add_environment_options(parser: argparse.ArgumentParser) -> None:
    """Add what `environment_options` reads: the environment, its split and its arguments."""
    parser.add_argument(
        "env", metavar="ENV_ID", help="a registered id, module:Class, file.py or file.py:Class"
    )
    parser.add_argument("--split", help="of the tasks (default: the environment's own, often train)")
    parser.add_argument(
        "--env-option",
        "--kwargs",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the environment, as JSON where it is such; may be repeated",
    )


def add_model_sources(who: argparse._MutuallyExclusiveGroup) -> None:
    """Add `--model` and `--url` to a group of which one is given."""
    who.add_argument("--model", metavar="PATH", help="a model's folder, or its name on the hub; runs here")
    who.add_argument("--url", help=f"a server with OpenAI's chat API; its key is in {KEY_VARIABLE}")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add what `make_player` and the rollout read besides."""
    parser.add_argument("--temperature", type=finite(0.0), default=1.0, help="default: 1; 0 is greedy")
    parser.add_argument(
        "--max-tokens", type=whole(1), default=1024, metavar="N", help="of a turn; default: 1024"
    )
    parser.add_argument(
        "--max-turns", type=whole(1), metavar="N", help="of an episode (default: the environment's)"
    )
    parser.add_argument(
        "--max-context",
        type=whole(16),
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
        type=finite(0.001),
        default=300.0,
        metavar="S",
        help="seconds for one answer of the server, which is then asked again; default: 300",
    )
    parser.add_argument(
        "--retries", type=whole(0), default=6, metavar="N", help="of a request to the server; default: 6"
    )
    parser.add_argument(
        "--episode-timeout", type=finite(0.001), default=7200.0, metavar="S", help="seconds; default: 7200"
    )


def environment_options(args: argparse.Namespace) -> dict[str, Any]:
    """The environment's arguments that the command line gives.

    Raises:
        UsageError: one is malformed or given twice.
    """
    options: dict[str, Any] = {}
    for text in args.env_option:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--env-option {text!r} must be KEY=VALUE, such as size=5 or levels=[1,2]")
        if name in options:
            raise UsageError(f"--env-option {name} is given twice")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    if args.split is not None:
        if "split" in options:
            raise UsageError("the split is given twice: --split and --env-option split=")
        options["split"] = args.split
    return options


def read_system_prompt(args: argparse.Namespace) -> None:
    """Put the text of a file in the place of `--system-prompt @FILE`.

    Raises:
        UsageError: it cannot be read.
    """
    text = args.system_prompt
    if text is None or not text.startswith("@"):
        return
    try:
        args.system_prompt = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--system-prompt {text}: cannot be read: {error}") from error


def make_player(args: argparse.Namespace, env_fn: Any) -> tuple[Callable[[], Any], dict[str, Any], Any]:
    """What makes the player, the settings that it adds, and the server where there is one; cheap.

    Raises:
        UsageError: there is no such baseline, or the server does not answer.
        MissingExtraError: a model in this process needs packages that are missing.
    """
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


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least that, for argparse."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
        return value

    whole_number.__name__ = "whole number"  # what argparse calls it
    return whole_number


def finite(least: float) -> Callable[[str], float]:
    """Reads a finite number of at least that, for argparse."""

    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"{text} must be a finite number of at least {least:g}")
        return value

    return number
