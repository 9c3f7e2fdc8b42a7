"""What does a command in a sandbox cost? The driver channel beside `docker exec`, by command line and by SDK.

    python benchmarks/sandbox.py --json sandbox.json --check

Real containers of the production backend, embedded tasks' specification (read-only root, network none).

- alone: one sandbox, nothing else running in any. Each round asks for the same command over the channel, by the SDK's
  `exec_run` and by `docker exec`, in an order that turns from round to round; the figure is the median of each.
- ready: `--containers` threads ask a new backend for a sandbox at once and run a command in it. "First" is when the
  first command has its answer, "all" when the last has.
- busy: all of these containers have an episode, which runs a command, waits as for a turn of the policy, and goes on.
  Every command's latency counts. Both ways of `docker exec` are then measured under the same load: the same episodes
  with the same waits. `--turn_s 0` has no wait: then the processors set every figure, and the channel's is what a
  command costs times the containers over the processors.
- pooled: a release with its reset, and a warm sandbox's acquisition with the first command.
- mini-swe-agent's Docker environment and SWE-ReX's Docker deployment, where they are installed beside this, run the
  same command in a container of their own. SWE-ReX needs an image with its server (`--rex_image`), which it installs
  from the network otherwise, and a published port. What is absent, or does not run, is said.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.bars import Bar, print_bars
from agentenv.report.progress import Progress
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox

COMMAND = "echo hello"
ANSWER = "hello\n"
SPEC = SandboxSpec(read_only=True)
TIMES_FASTER = 5.0
BUSY_MS = 50.0
FIRST_S = 3.0
PEERS = {"swe-rex": "swerex", "mini-swe-agent": "minisweagent"}
"""Name -> module that is there when it is installed."""

Ask = Callable[[DockerSandbox], str]


def by_channel(sandbox: DockerSandbox) -> str:
    """The command over the driver channel."""
    return sandbox.run(COMMAND).output


def by_sdk(client: Any) -> Ask:
    """The command by the SDK's `exec_run`, which has no time limit and no cap on output either."""

    def ask(sandbox: DockerSandbox) -> str:
        created = client.api.exec_create(sandbox.container_id, ["bash", "-c", COMMAND])
        text: bytes = client.api.exec_start(created["Id"])
        client.api.exec_inspect(created["Id"])  # as exec_run does, for the exit code
        return text.decode()

    return ask


def by_cli(sandbox: DockerSandbox) -> str:
    """The command by `docker exec`."""
    return subprocess.run(
        ["docker", "exec", sandbox.container_id, "bash", "-c", COMMAND],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def timed(ask: Ask, sandbox: DockerSandbox) -> float:
    """Milliseconds of one command, whose answer must be right."""
    began = time.perf_counter()
    output = ask(sandbox)
    took = (time.perf_counter() - began) * 1e3
    if output != ANSWER:
        raise RuntimeError(f"{ask.__name__} answered {output!r}, not {ANSWER!r}")
    return took


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and number; milliseconds."""
    ordered = sorted(values)
    return {
        "p50_ms": statistics.median(ordered),
        "p95_ms": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "commands": len(ordered),
    }


def alone(backend: DockerBackend, ways: dict[str, Ask], rounds: int) -> dict[str, dict[str, float]]:
    """Each way's figures in one idle sandbox, interleaved."""
    sandbox = backend.acquire(SPEC)
    try:
        taken: dict[str, list[float]] = {name: [] for name in ways}
        order = list(ways)
        for name in order:
            timed(ways[name], sandbox)  # the first of each is not counted
        for _ in range(rounds):
            for name in order:
                taken[name].append(timed(ways[name], sandbox))
            order = [*order[1:], order[0]]
    finally:
        backend.release(sandbox)
    return {name: summary(values) for name, values in taken.items()}


def pooled(backend: DockerBackend, rounds: int) -> dict[str, dict[str, float]]:
    """What a change of episodes costs in a warm sandbox."""
    release, acquire = [], []
    sandbox = backend.acquire(SPEC)
    for _ in range(rounds):
        began = time.perf_counter()
        backend.release(sandbox)
        between = time.perf_counter()
        sandbox = backend.acquire(SPEC)
        sandbox.run(COMMAND)
        release.append((between - began) * 1e3)
        acquire.append((time.perf_counter() - between) * 1e3)
    backend.release(sandbox)
    return {"release": summary(release), "acquire and first command": summary(acquire)}


def ready(backend: DockerBackend, count: int) -> tuple[list[DockerSandbox], dict[str, float]]:
    """So many sandboxes, wanted at once, and when they answered."""
    barrier = threading.Barrier(count + 1)
    answered: list[float] = []

    def one(_: int) -> DockerSandbox:
        barrier.wait()
        sandbox = backend.acquire(SPEC)
        by_channel(sandbox)
        answered.append(time.perf_counter())
        return sandbox

    with ThreadPoolExecutor(count) as threads:
        coming = [threads.submit(one, number) for number in range(count)]
        barrier.wait()
        began = time.perf_counter()
        sandboxes = [item.result() for item in coming]
    return sandboxes, {"first_s": min(answered) - began, "all_s": max(answered) - began}


def busy(sandboxes: Sequence[DockerSandbox], ask: Ask, seconds: float, turn_s: float) -> dict[str, float]:
    """Figures of all commands that as many episodes ask for; they do not start all at the same moment."""
    stop = time.perf_counter() + seconds

    def episode(number: int) -> list[float]:
        time.sleep(turn_s * number / len(sandboxes))
        taken = []
        while time.perf_counter() < stop:
            taken.append(timed(ask, sandboxes[number]))
            time.sleep(turn_s)
        return taken

    with ThreadPoolExecutor(len(sandboxes)) as threads:
        lists = list(threads.map(episode, range(len(sandboxes))))
    return summary([value for values in lists for value in values])


def peers(images: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """What is installed of other projects' sandboxes: figures, or why there are none."""
    found: dict[str, Any] = {}
    for name, module in PEERS.items():
        if importlib.util.find_spec(module) is None:
            found[name] = "absent: not installed"
            continue
        try:
            found[name] = MEASURED[name](images[name], rounds)
        except Exception as error:  # another project's failure is not ours to judge
            found[name] = f"absent: does not run here: {' '.join(str(error).split())[:120]}"
    return found


def mini_swe_agent(image: str, rounds: int) -> dict[str, float]:
    """The Docker environment of mini-swe-agent, one command a time."""
    module: Any = importlib.import_module("minisweagent.environments.docker")
    environment = module.DockerEnvironment(image=image, cwd="/work", run_args=["--rm", "--network=none"])
    try:
        taken = []
        for number in range(rounds + 1):
            began = time.perf_counter()
            try:
                answer = environment.execute({"command": COMMAND})
            except AttributeError:  # before its version 2 it took the text
                answer = environment.execute(COMMAND)
            if number:
                taken.append((time.perf_counter() - began) * 1e3)
            if answer["output"] != ANSWER:
                raise RuntimeError(f"it answered {answer!r}")
    finally:
        environment.cleanup()
    return summary(taken)


def swe_rex(image: str, rounds: int) -> dict[str, float]:
    """A session of SWE-ReX's Docker deployment."""
    import asyncio

    deployment: Any = importlib.import_module("swerex.deployment.docker")
    runtime: Any = importlib.import_module("swerex.runtime.abstract")

    async def play() -> list[float]:
        there = deployment.DockerDeployment(image=image, pull="never", startup_timeout=30)
        await there.start()
        try:
            await there.runtime.create_session(runtime.CreateBashSessionRequest())
            taken = []
            for number in range(rounds + 1):
                began = time.perf_counter()
                await there.runtime.run_in_session(runtime.BashAction(command=COMMAND))
                if number:
                    taken.append((time.perf_counter() - began) * 1e3)
            return taken
        finally:
            await there.stop()

    return summary(asyncio.run(play()))


MEASURED: dict[str, Callable[[str, int], dict[str, float]]] = {
    "mini-swe-agent": mini_swe_agent,
    "swe-rex": swe_rex,
}


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All of it; every container is removed."""
    backend = DockerBackend()
    try:
        ways = {"channel": by_channel, "docker exec, SDK": by_sdk(backend.client), "docker exec, CLI": by_cli}
        progress.stage("one sandbox", unit="part", total=5)
        figures: dict[str, Any] = {"alone": alone(backend, ways, args.rounds)}
        progress.update(1, {})
        figures["pooled"] = pooled(backend, args.rounds)
        progress.update(2, {})
        image = backend.client.containers.get(_any_container(backend)).image.tags[0]
        images = {"swe-rex": args.rex_image or image, "mini-swe-agent": image}
        figures["peers"] = peers(images, args.rounds)
        progress.update(3, {})
    finally:
        backend.close()
    backend = DockerBackend()
    try:
        sandboxes, figures["ready"] = ready(backend, args.containers)
        progress.update(4, {})
        ways["docker exec, SDK"] = by_sdk(backend.client)
        figures["busy"] = {name: busy(sandboxes, ask, args.busy_s, args.turn_s) for name, ask in ways.items()}
        progress.update(5, {})
        figures["containers"] = backend.left()
    finally:
        backend.close()
    return figures


def _any_container(backend: DockerBackend) -> str:
    sandbox = backend.acquire(SPEC)
    backend.release(sandbox)
    return sandbox.container_id


def bars_of(figures: dict[str, Any], args: argparse.Namespace) -> list[Bar]:
    """What must hold."""
    p50 = {name: row["p50_ms"] for name, row in figures["alone"].items()}
    ours = p50["channel"]
    return [
        Bar("`docker exec` by CLI over the channel", p50["docker exec, CLI"] / ours, ">=", TIMES_FASTER, "x"),
        Bar("`docker exec` by SDK over the channel", p50["docker exec, SDK"] / ours, ">=", TIMES_FASTER, "x"),
        Bar(
            f"p50 of a command, {args.containers} busy",
            figures["busy"]["channel"]["p50_ms"],
            "<=",
            BUSY_MS,
            "ms",
        ),
        Bar(f"first of {args.containers} sandboxes in use", figures["ready"]["first_s"], "<=", FIRST_S, "s"),
    ]


def report(results: dict[str, Any], args: argparse.Namespace) -> bool:
    """Print tables and bars; whether all held."""
    figures = results["figures"]
    for part in ("alone", "pooled", "busy"):
        for name, row in figures[part].items():
            print(
                f"{part:<7} {name:<28} p50 {row['p50_ms']:9,.1f} ms  p95 {row['p95_ms']:9,.1f} ms"
                f"  of {row['commands']:,}"
            )
    for name, row in figures["peers"].items():
        text = row if isinstance(row, str) else f"p50 {row['p50_ms']:9,.1f} ms  p95 {row['p95_ms']:9,.1f} ms"
        print(f"{'peer':<7} {name:<28} {text}")
    print(
        f"ready   {figures['containers']} sandboxes: first after {figures['ready']['first_s']:.2f} s, "
        f"all after {figures['ready']['all_s']:.2f} s"
    )
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in results["assumed"].items()))
    bars = bars_of(figures, args)
    results["bars"] = [bar.as_dict() for bar in bars]
    return print_bars(bars)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--containers", type=int, default=32, help="at once, at least 1")
    parser.add_argument(
        "--rounds", type=int, default=60, help="commands of each kind in one sandbox, at least 1"
    )
    parser.add_argument("--busy_s", type=float, default=20.0, help="seconds under load, for each way")
    parser.add_argument(
        "--turn_s", type=float, default=1.0, help="seconds of a policy's turn under load, at least 0"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="4 containers, 5 rounds, 1 s: whether it runs at all"
    )
    parser.add_argument("--rex_image", help="image that holds SWE-ReX's server; default: the base image")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    if args.smoke:
        args.containers, args.rounds, args.busy_s, args.turn_s = 4, 5, 1.0, 0.2
    for name, least in (("containers", 1), ("rounds", 1), ("turn_s", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least {least}")
    if args.busy_s <= 0:
        parser.error(f"--busy_s is {args.busy_s}, must be above 0")
    try:
        with Progress() as progress:
            load = os.getloadavg()[0]
            figures = measure(args, progress)
    except UsageError as error:
        parser.error(str(error))
    results: dict[str, Any] = {
        "assumed": {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load before": round(load, 2),
            "containers": args.containers,
            "turn_s": args.turn_s,
            "busy_s": args.busy_s,
            "command": COMMAND,
        },
        "figures": figures,
    }
    held = report(results, args)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
