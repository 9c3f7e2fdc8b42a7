"""Are sandboxes of a service as good as local ones? The same rewards, and what a command costs over HTTP.

    python benchmarks/sandbox_service.py --json service.json --check
    python benchmarks/sandbox_service.py --url http://sandbox:8700 --check

Without --url it starts `agentenv sandbox serve` on this machine. With it, the service's token is in
AGENTENV_SANDBOX_TOKEN or AGENTENV_SANDBOX_TOKEN_FILE, and this machine needs an engine too, to compare with.

- rewards: embedded tasks from seeds, one in three with its gold module, one with the buggy one, one with a module that
  is none; several at once. Each grade, with its reason, must be the local one. --break_gold spoils the gold modules of
  the service's side, so that --check can be seen to fail.
- command: one sandbox each way; every round runs `true` in both, in an order that turns. Medians.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.bars import Bar, print_bars
from agentenv_envs.swe.embedded.tasks import MODULE
from agentenv_envs.swe.sandbox import SandboxBackend, SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
from agentenv_envs.swe.sandbox.service.addresses import service_urls
from agentenv_envs.swe.sandbox.service.client import RemoteBackend
from agentenv_envs.swe.workspace import EmbeddedTasks

AT_ONCE = 4
COMMAND_MS = 50.0
"""Most that a command may cost through a service: what a busy machine is allowed locally."""
START_S = 300.0


@contextmanager
def own_service() -> Iterator[RemoteBackend]:
    """A service of this machine on a free port, and a client of it."""
    token = secrets.token_hex(24)
    with tempfile.TemporaryDirectory() as folder:
        tokens, log = Path(folder, "tokens"), Path(folder, "log")
        tokens.write_text(f"benchmark {token}\n")
        command = [sys.executable, "-m", "agentenv.cli", "sandbox", "serve", "--port", "0"]
        with log.open("w") as stream:
            process = subprocess.Popen([*command, "--token-file", str(tokens)], stderr=stream)
        try:
            backend = RemoteBackend([address_of(process, log)], token)
            try:
                yield backend
            finally:
                backend.close()
        finally:
            process.terminate()
            process.wait(90)


def address_of(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where a service that has just been started listens.

    Raises:
        UsageError: it ends, or does not listen in time.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("sandbox service: "):
                return line.split()[-1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise UsageError(f"the service does not start: {log.read_text().strip()[-500:]}")


def grades(backend: SandboxBackend, count: int, *, break_gold: bool = False) -> list[dict[str, Any]]:
    """What each task's module is worth."""
    tasks = EmbeddedTasks("train", (1, 2), None)

    def play(seed: int) -> dict[str, Any]:
        workspace = tasks.open(seed, backend)
        try:
            module = (workspace.task.gold, None, "def f(:\n")[seed % 3]
            if module is not None:
                text = "def f(:\n" if break_gold else module
                workspace.sandbox.write_files({MODULE: text})
            return {"task": workspace.task_id, **workspace.grade()}
        finally:
            workspace.close()

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(play, range(count)))


def command_ms(backends: Sequence[SandboxBackend], rounds: int) -> list[float]:
    """Median time of a command in a sandbox of each backend."""
    sandboxes = [backend.acquire(SandboxSpec(read_only=True)) for backend in backends]
    times: list[list[float]] = [[] for _ in sandboxes]
    for number in range(rounds):
        order = range(len(sandboxes)) if number % 2 else reversed(range(len(sandboxes)))
        for index in order:
            started = time.perf_counter()
            sandboxes[index].run("true")
            times[index].append(1000 * (time.perf_counter() - started))
    for backend, sandbox in zip(backends, sandboxes, strict=True):
        backend.release(sandbox)
    return [statistics.median(series) for series in times]


def measure(remote: SandboxBackend, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    local = DockerBackend()
    try:
        through = grades(remote, args.tasks, break_gold=args.break_gold)
        here = grades(local, args.tasks)
        remote_ms, local_ms = command_ms((remote, local), args.rounds)
        return {
            "tasks": args.tasks,
            "resolved": sum(grade["resolved"] for grade in here),
            "same": sum(one == other for one, other in zip(through, here, strict=True)),
            "command_ms": round(remote_ms, 2),
            "local_command_ms": round(local_ms, 2),
            "left": remote.left(),
        }
    finally:
        local.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url", help="of a service that runs, or several with commas; default: one of its own"
    )
    parser.add_argument("--tasks", type=int, default=50, help="at least 1")
    parser.add_argument("--rounds", type=int, default=100, help="commands each way, at least 1")
    parser.add_argument("--break_gold", action="store_true", help="spoil the service's side")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    for name in ("tasks", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")
    try:
        if args.url is None:
            with own_service() as remote:
                figures = measure(remote, args)
        else:
            remote = RemoteBackend(service_urls(args.url))
            try:
                figures = measure(remote, args)
            finally:
                remote.close()
    except UsageError as error:
        parser.error(str(error))
    held = print_bars(
        [
            Bar("tasks graded as locally", figures["same"], "==", figures["tasks"]),
            Bar("gold modules that earn 1", figures["resolved"], "==", (figures["tasks"] + 2) // 3),
            Bar("a command through the service, p50", figures["command_ms"], "<=", COMMAND_MS, "ms"),
            Bar("sandboxes left", figures["left"], "==", 0),
        ]
    )
    print(f"        a local command, p50: {figures['local_command_ms']} ms; load {os.getloadavg()[0]:.1f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
