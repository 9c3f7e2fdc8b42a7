"""`agentenv proxy`: a model served to agent programs, whose episodes are opened, rewarded and kept over HTTP.

Invariants:

* The address, once the service listens, and the log go to stderr; nothing goes to stdout.
* SIGINT and SIGTERM end it with exit code 0; open episodes are discarded.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.errors import MissingExtraError, UsageError
from agentenv.listening import listen

if TYPE_CHECKING:
    from agentenv.agents.endpoint import EpisodeSettings
    from agentenv.inference.proxy import LLMProxy

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add `proxy`; loads nothing heavy.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "proxy",
        help="serve a model to agent programs and record their episodes",
        description="An OpenAI-compatible endpoint that records token ids and log-probs: "
        "docs/agents-as-they-are.md.",
    )
    parser.add_argument(
        "--model", required=True, help="folder or hub name of a causal language model with a chat template"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        required=True,
        metavar="F",
        help="one line with the token of who opens and ends episodes; agents get a key for each",
    )
    parser.add_argument(
        "--output", type=Path, metavar="F", help="append the trajectories to this file, one a line of JSON"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8800, help="port; 0 is any (default: %(default)s)")
    parser.add_argument("--served-name", default="policy", help="name of the model (default: %(default)s)")
    parser.add_argument("--max-batch", type=int, default=16, help="turns at a time (default: %(default)s)")
    parser.add_argument(
        "--max-context", type=int, default=32_768, help="tokens of prompt and answer (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=2048, help="of an answer (default: %(default)s)")
    parser.add_argument("--max-turns", type=int, help="answers of an episode (default: no limit)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of every answer (default: %(default)s)"
    )
    parser.add_argument(
        "--ttl-s", type=float, default=3600.0, help="idle episodes are discarded (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        UsageError: bad input.
    """
    from agentenv.agents.desk import read_token
    from agentenv.agents.endpoint import EpisodeSettings
    from agentenv.inference import LLMProxy, SamplingParams

    for name in ("max_batch", "max_context", "max_tokens", "ttl_s"):
        if getattr(args, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: more than 0 is needed")
    if args.max_turns is not None and args.max_turns < 1:
        raise UsageError(f"--max-turns {args.max_turns}: at least 1 is needed")
    try:
        sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    except ValueError as error:
        raise UsageError(str(error)) from None
    token = read_token(args.token_file)
    if args.output is not None and not args.output.parent.is_dir():
        raise UsageError(f"--output {args.output}: there is no folder {args.output.parent}")
    try:
        import agentenv.agents.server  # noqa: F401 - what is missing shows before the model is loaded
    except ImportError as error:
        raise MissingExtraError(str(error.name), "service") from error
    listener = listen(args.host, args.port)
    try:
        try:
            from agentenv.inference.policy import load_policy, open_engine
        except ImportError as error:
            raise MissingExtraError(str(error.name), "train") from error
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        policy = load_policy(args.model)
        limit = getattr(policy.model.config, "max_position_embeddings", None) or args.max_context
        context = min(args.max_context, limit)
        engine = open_engine(policy, max_batch=args.max_batch, max_length=context)
        settings = EpisodeSettings(sampling=sampling, max_turns=args.max_turns, max_context=context)
        asyncio.run(_serve(args, listener, LLMProxy([engine]), policy.tokenizer, token, settings))
    finally:
        listener.close()
    return 0


async def _serve(
    args: argparse.Namespace,
    listener: socket.socket,
    proxy: LLMProxy,
    tokenizer: Any,
    token: str,
    settings: EpisodeSettings,
) -> None:
    from agentenv.agents.desk import EpisodeDesk
    from agentenv.agents.endpoint import AgentEndpoint
    from agentenv.agents.server import AgentServer

    try:
        endpoint = AgentEndpoint(proxy, tokenizer, model=args.served_name)
        desk = EpisodeDesk(endpoint, proxy, token, settings, output=args.output, ttl_s=args.ttl_s)
        server = AgentServer(endpoint, listener, desk)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await server.start()
        sys.stderr.write(f"agentenv proxy: {server.url}\n")
        sys.stderr.flush()
        await ended.wait()
        await server.stop()
    finally:
        await proxy.close()
