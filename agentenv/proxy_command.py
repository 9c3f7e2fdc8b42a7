"""`agentenv proxy`: a model served to agent programs, whose episodes are opened, rewarded and kept over HTTP.

Invariants:

* The address, once the service listens, and the log go to stderr; nothing goes to stdout.
* SIGINT and SIGTERM end it with exit code 0; open episodes are discarded.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.cluster.services import resolve_urls
from agentenv.errors import MissingExtraError, UsageError
from agentenv.listening import listen

if TYPE_CHECKING:
    from agentenv.agents.endpoint import EpisodeSettings
    from agentenv.inference.policy import Policy
    from agentenv.inference.protocol import Engine
    from agentenv.inference.proxy import LLMProxy
    from agentenv.inference.vllm.opening import VLLMOptions

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add `proxy`; loads nothing heavy.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "proxy",
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
    _add_engine_options(parser)
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


def _add_engine_options(parser: Any) -> None:
    """Those of the recipes; messages about them write them with underscores, as recipes do, and so may the user."""

    def add(name: str, help_text: str, **more: Any) -> None:
        spellings = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        parser.add_argument(*spellings, help=help_text, **more)

    add(
        "--engine",
        "what samples: transformers in this process, a vLLM server (started here unless --vllm-url names running "
        "ones), or vLLM in this process (default: %(default)s)",
        choices=("transformers", "vllm", "vllm-in-process"),
        default="transformers",
    )
    add(
        "--vllm-url",
        "running vLLM servers of the model, several with commas between, or ray: those of a Ray cluster",
        metavar="URL",
    )
    add("--vllm-python", "Python that has vLLM, for the server started here", metavar="F")
    add("--vllm-args", "more arguments of that server; of vllm-in-process as JSON", metavar="ARGS")
    add("--vllm-devices", "GPUs of that server, as CUDA_VISIBLE_DEVICES has them", metavar="N,...")
    add(
        "--vllm-dtype",
        "type that vLLM computes in (default: the policy's)",
        choices=("float32", "bfloat16", "float16"),
    )
    add(
        "--vllm-start-timeout-s",
        "how long a server may take to start (default: %(default)g)",
        type=float,
        default=900.0,
        metavar="S",
    )


def _vllm_options(args: argparse.Namespace) -> VLLMOptions | None:
    """None: the engine is transformers.

    Raises:
        UsageError: options that contradict, or vLLM that is not there.
    """
    if args.engine == "transformers":
        for name in ("url", "python", "args", "devices", "dtype"):
            if getattr(args, f"vllm_{name}") is not None:
                raise UsageError(f"--vllm-{name} is for --engine vllm")
        return None
    from agentenv.inference.vllm.opening import VLLMOptions, check_vllm

    given = resolve_urls(args.vllm_url or "", "engine")
    urls = tuple(url.strip() for url in given.split(",") if url.strip())
    options = VLLMOptions(
        urls=urls,
        python=args.vllm_python,
        arguments=args.vllm_args or "",
        devices=args.vllm_devices,
        dtype=args.vllm_dtype,
        start_timeout_s=args.vllm_start_timeout_s,
        in_process=args.engine == "vllm-in-process",
    )
    check_vllm(options)
    return options


def open_engines(
    policy: Policy, options: VLLMOptions | None, *, max_batch: int, max_length: int
) -> Sequence[Engine]:
    """Engines of the policy: transformers, or vLLM where there are options for it.

    Raises:
        UsageError: they cannot be opened.
    """
    if options is None:
        from agentenv.inference.policy import open_engine

        return [open_engine(policy, max_batch=max_batch, max_length=max_length)]
    from agentenv.inference.vllm.opening import open_vllm

    return open_vllm(policy, options, max_batch=max_batch, max_length=max_length, note=_note)


def _note(line: str) -> None:
    sys.stderr.write(f"agentenv proxy: {line}\n")
    sys.stderr.flush()


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
    if args.output is not None:
        try:
            args.output.open("a").close()
        except OSError as error:
            raise UsageError(f"--output {args.output}: cannot be written ({error.strerror})") from None
    try:
        import agentenv.agents.server  # noqa: F401 - what is missing shows before the model is loaded
    except ImportError as error:
        raise MissingExtraError(str(error.name), "service") from error
    listener = listen(args.host, args.port)
    try:
        try:
            from agentenv.inference.policy import load_policy

            options = _vllm_options(args)
        except ImportError as error:
            raise MissingExtraError(str(error.name), "train") from error
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        policy = load_policy(args.model)
        limit = getattr(policy.model.config, "max_position_embeddings", None) or args.max_context
        context = min(args.max_context, limit)
        engines = open_engines(policy, options, max_batch=args.max_batch, max_length=context)
        settings = EpisodeSettings(sampling=sampling, max_turns=args.max_turns, max_context=context)
        asyncio.run(_serve(args, listener, LLMProxy(engines), policy.tokenizer, token, settings))
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
    from agentenv.serving import serve_until_signal

    try:
        endpoint = AgentEndpoint(proxy, tokenizer, model=args.served_name)
        desk = EpisodeDesk(endpoint, proxy, token, settings, output=args.output, ttl_s=args.ttl_s)
        await serve_until_signal(AgentServer(endpoint, listener, desk), _note)
    finally:
        await proxy.close()
