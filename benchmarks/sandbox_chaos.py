"""Does anything get lost or left behind when sandboxes, their engine and the trainer fail all the time?

    python benchmarks/sandbox_chaos.py --json sandbox_chaos.json --check

Real containers and `SWEEnv` on embedded tasks, several episodes at once. A scripted agent repairs its task (or submits
without work), and each episode has one fault, drawn from a fixed table with the type in which it must end:

- solved: reward 1 after the agent's repair was graded, whatever happened on the way (memory run out, a fork bomb, a
  command that hangs, a killed driver, 300 MB of output, `rm -rf /`);
- unsolved: reward 0, where nothing was repaired;
- infrastructure: a `SandboxError`, where the container was removed under a command, or the engine failed (requests to
  it go through a client that fails on demand: refused, broken off and timed out).

An episode ends once: after its end the environment refuses a further step. "Wrong" counts episodes that ended in
another type, twice or not at all.

Then the trainer: a process of its own plays the same episodes and is killed by SIGKILL while they run; another process
opens its backend, as a restarted trainer does.

Left over are containers with the labels of these processes, processes on this machine that belong to a container of the
run, or have the run's mark in their environment, and volumes and networks that were not there before. Others that use
the engine at the same time can make volumes and networks too: their names are printed.
"""

import argparse
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_episodes import (
    COMMAND_TIMEOUT_S,
    KINDS,
    REAL_CONNECT,
    FaultyApi,
    connect_faulty,
    expected,
    run_episodes,
    wrong_ends,
)

from agentenv.errors import UsageError
from agentenv.report.bars import Bar, print_bars
from agentenv.report.progress import Progress
from agentenv_envs.swe.sandbox import docker_backend
from agentenv_envs.swe.sandbox.labels import OWNER, SANDBOX

MARK = "AGENTENV_SANDBOX_CHAOS"
"""Variable that all processes of the run inherit, and are found by."""
LEFT_WAIT_S = 10.0
"""How long processes of removed containers may take to go."""


def containers_of(client: Any, owners: set[int]) -> list[str]:
    """Ids of containers whose label names one of these processes."""
    found = client.api.containers(all=True, filters={"label": SANDBOX})
    return [item["Id"] for item in found if item["Labels"].get(OWNER, "").split(" ")[0] in map(str, owners)]


def processes_of(container_ids: Sequence[str]) -> list[int]:
    """Processes on this machine that belong to one of these containers, or have the run's mark."""
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    ids = [item.encode() for item in container_ids]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cgroup").read_bytes() + (entry / "cmdline").read_bytes()
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if marked or any(item in text for item in ids):
            found.append(int(entry.name))
    return found


def volumes_and_networks(client: Any) -> tuple[set[str], set[str]]:
    """Names of all that the engine has."""
    volumes = {item["Name"] for item in client.api.volumes()["Volumes"] or []}
    return volumes, {item["Name"] for item in client.api.networks()}


def left_over(client: Any, owners: set[int], container_ids: Sequence[str]) -> tuple[int, int]:
    """(containers, processes) that do not go away."""
    deadline = time.monotonic() + LEFT_WAIT_S
    while True:
        left = len(containers_of(client, owners)), len(processes_of(container_ids))
        if left == (0, 0) or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def killed_trainer(client: Any, args: argparse.Namespace) -> dict[str, Any]:
    """A trainer dies while its episodes run, and is started again."""
    this = [sys.executable, str(Path(__file__).resolve())]
    victim = subprocess.Popen(
        [*this, "--victim", "--threads", str(args.threads), "--seed", str(args.seed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    try:
        while len(containers_of(client, {victim.pid})) < args.threads and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2.0)  # commands are under way
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    abandoned = containers_of(client, {victim.pid})
    began = time.monotonic()
    again = subprocess.run([*this, "--restart"], capture_output=True, text=True, check=False)
    restart_s = time.monotonic() - began
    if again.returncode != 0:
        raise RuntimeError(f"the restarted trainer failed: {again.stderr.strip()[-500:]}")
    containers, processes = left_over(client, {victim.pid}, abandoned)
    return {
        "abandoned": len(abandoned),
        "restart_s": restart_s,
        "containers": containers,
        "processes": processes,
    }


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All of it."""
    client = REAL_CONNECT()
    try:
        before = volumes_and_networks(client)
        progress.stage("episodes with faults", unit="episode", total=args.episodes)
        done: Counter[str] = Counter()

        def told(kind: str, end: str) -> None:
            done[end] += 1
            progress.update(done.total(), {name: str(number) for name, number in done.most_common(3)})

        began = time.monotonic()
        ends = run_episodes(args.episodes, args.threads, args.seed, told)
        wall_s = time.monotonic() - began
        containers, processes = left_over(client, {os.getpid()}, FaultyApi.made)
        progress.stage("trainer killed", unit="trainer", total=1)
        killed = killed_trainer(client, args)
        after = volumes_and_networks(client)
    finally:
        client.close()
    return {
        "ends": {
            kind: dict(Counter(end for fault, end in ends if fault == kind).most_common()) for kind in KINDS
        },
        "wrong": dict(wrong_ends(ends, args.episodes)),
        "wall_s": wall_s,
        "containers_made": len(FaultyApi.made),
        "containers_left": containers,
        "processes_left": processes,
        "volumes_new": sorted(after[0] - before[0]),
        "networks_new": sorted(after[1] - before[1]),
        "killed": killed,
    }


def bars_of(figures: Mapping[str, Any]) -> list[Bar]:
    """What must hold."""
    killed = figures["killed"]
    return [
        Bar("episodes with a wrong end, or not exactly one", sum(figures["wrong"].values()), "==", 0),
        Bar("containers left after the run", figures["containers_left"], "==", 0),
        Bar("processes left after the run", figures["processes_left"], "==", 0),
        Bar("containers that the killed trainer abandoned", killed["abandoned"], ">=", 1),
        Bar("containers left after a SIGKILL and a restart", killed["containers"], "==", 0),
        Bar("processes left after a SIGKILL and a restart", killed["processes"], "==", 0),
        Bar("volumes left", len(figures["volumes_new"]), "==", 0),
        Bar("networks left", len(figures["networks_new"]), "==", 0),
    ]


def report(results: dict[str, Any]) -> bool:
    """Print table and bars; whether all held."""
    figures = results["figures"]
    for kind, ends in figures["ends"].items():
        texts = ", ".join(f"{end} {number}" for end, number in ends.items())
        print(f"{kind:<36} must be {expected(kind):<15} was {texts or 'not played'}")
    print(
        f"{sum(sum(ends.values()) for ends in figures['ends'].values())} episodes in {figures['wall_s']:.0f} s, "
        f"{figures['containers_made']} containers made; restart after the SIGKILL with "
        f"{figures['killed']['abandoned']} containers left: {figures['killed']['restart_s']:.1f} s"
    )
    for name in ("wrong", "volumes_new", "networks_new"):
        if figures[name]:
            print(f"{name}: {figures[name]}")
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in results["assumed"].items()))
    bars = bars_of(figures)
    results["bars"] = [bar.as_dict() for bar in bars]
    return print_bars(bars)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=500, help="at least 1")
    parser.add_argument("--threads", type=int, default=8, help="episodes at once, at least 1")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults")
    parser.add_argument("--smoke", action="store_true", help="one episode of each kind, 4 at once")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--victim", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--restart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.smoke:
        args.episodes, args.threads = len(KINDS), 4
    for name in ("episodes", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")
    # Failures are the purpose here.
    logging.getLogger("agentenv_envs").setLevel(logging.CRITICAL)
    if args.restart:
        docker_backend.DockerBackend().close()
        return 0
    docker_backend.connect = connect_faulty
    if args.victim:
        run_episodes(1_000_000, args.threads, args.seed)
        return 0
    os.environ[MARK] = uuid.uuid4().hex
    load = os.getloadavg()[0]
    try:
        with Progress() as progress:
            figures = measure(args, progress)
    except UsageError as error:
        parser.error(str(error))
    finally:
        docker_backend.connect = REAL_CONNECT
    results: dict[str, Any] = {
        "assumed": {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load before": round(load, 2),
            "threads": args.threads,
            "command_timeout_s": COMMAND_TIMEOUT_S,
            "seed": args.seed,
        },
        "figures": figures,
    }
    held = report(results)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
