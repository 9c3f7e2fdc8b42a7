"""Commands of the console script: `agentenv sandbox serve`.

Invariants:
- Nothing goes to stdout; the log, and the address once the service listens, go to stderr.
- Exit code 0 after a drain; 2: bad input, or no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, SandboxError, UsageError
from agentenv.listening import listen, url_of

__all__ = ["add_commands"]


def add_commands(subparsers: Any) -> None:
    """Add `sandbox` and its commands.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    sandbox = subparsers.add_parser("sandbox")
    commands = sandbox.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = commands.add_parser(
        "serve",
        help="lend sandboxes of this machine's Docker engine to trainers elsewhere",
        description="Lend sandboxes over HTTP. Put a proxy with TLS in front where the network is not yours.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="port; 0 is any (default: %(default)s)")
    parser.add_argument(
        "--token-file",
        type=Path,
        required=True,
        metavar="F",
        help="one line 'CLIENT TOKEN' for each client, or one line with one token",
    )
    parser.add_argument(
        "--max-sandboxes",
        type=int,
        default=32,
        metavar="N",
        help="containers at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--per-client", type=int, metavar="N", help="sandboxes of one client at a time (default: all)"
    )
    parser.add_argument(
        "--allow-image",
        action="append",
        default=[],
        metavar="PATTERN",
        help="images that clients may use besides the base image, such as 'swebench/*'; may be repeated",
    )
    parser.add_argument(
        "--pull",
        action="append",
        default=[],
        metavar="IMAGE",
        help="pull this image before leases are given, and let clients use it; may be repeated",
    )
    parser.add_argument(
        "--allow-packages",
        action="store_true",
        help="build images of package rows: their build scripts then run beside the engine's socket",
    )
    parser.add_argument(
        "--max-memory-mb", type=int, default=8192, metavar="N", help="of one sandbox (default: %(default)s)"
    )
    parser.add_argument(
        "--max-cpus", type=float, default=4.0, metavar="N", help="of one sandbox (default: %(default)s)"
    )
    parser.add_argument(
        "--max-pids", type=int, default=1024, metavar="N", help="of one sandbox (default: %(default)s)"
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that leases have after SIGTERM (default: %(default)s)",
    )
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    try:
        from .serving import Service
    except ImportError as error:
        raise MissingExtraError(str(error.name), "service") from error
    from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
    from agentenv_envs.swe.sandbox.images import ensure_base_image, ensure_pulled

    from .limits import IMAGE_NAME, ServiceLimits, Tokens

    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tokens = Tokens.read(args.token_file)
    limits = ServiceLimits(
        max_sandboxes=args.max_sandboxes,
        per_client=args.max_sandboxes if args.per_client is None else args.per_client,
        images=(*args.allow_image, *dict.fromkeys(args.pull)),
        packages=args.allow_packages,
        memory_mb=args.max_memory_mb,
        cpus=args.max_cpus,
        pids=args.max_pids,
    )
    for image in args.pull:
        if not IMAGE_NAME.fullmatch(image):
            raise UsageError(f"--pull {image!r}: not the name of an image, such as swebench/NAME:TAG")
    listener = listen(args.host, args.port)
    backend = None
    try:
        backend = DockerBackend()
        ensure_base_image(backend.client, progress=_say)
        for image in dict.fromkeys(args.pull):
            ensure_pulled(backend.client, image, progress=_say)
        service = Service(backend, tokens, limits, drain_s=args.drain_s)
        listener.listen(512)
        _say(f"sandbox service: {url_of(listener)}")
        asyncio.run(service.serve(listener))
    except SandboxError as error:
        raise UsageError(str(error)) from error
    finally:
        listener.close()
        if backend is not None:
            backend.close()
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
