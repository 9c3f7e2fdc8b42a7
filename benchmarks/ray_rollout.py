"""What does an environment step cost over Ray, beside the same step in process workers?

    python benchmarks/ray_rollout.py --json ray.json --check

A Ray cluster of three nodes on this machine, the production controller and worker kinds, and an environment in a
process of its own that answers at once with a paragraph; the policy's replies are written down. The same episodes are
played with `worker="process"` and with `worker="ray"`, by turns, at several numbers of environments.

The figure is CPU time of all processes (the rollout's, Ray's servers, actors, fork servers and environments) over the
steps played, from the end of the first batch on; its median over repeats is compared. "calls a step" are calls of
actors, which carry the messages of many environments; bytes are those of a pickled message there and back. From the CPU
time of the thread that runs the controller's loop follows how many environments it can serve until it is busy for 80 %
of the time, where a step takes so long as stated.
"""

import argparse
import functools
import os
import pickle
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from agentenv import BaseEnv
from agentenv.cluster import host_pool
from agentenv.inference import LLMProxy
from agentenv.inference.protocol import GenerationRequest
from agentenv.report.bars import Bar, conclude
from agentenv.report.progress import Progress
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel

BAR, BAR_FROM = 3.0, 64
"""Most CPU time a step over Ray, in that of process workers, with so many environments or more."""
SIZES = (1, 8, 64)
BUSY = 0.8
STEP_S = (1.0, 10.0, 30.0)
NODE_MEMORY = 100 * 2**20
KINDS = ("process", "ray")


class Paragraphs(BaseEnv):
    """Answers at once.

    Args:
        turns: of an episode.
        characters: of an observation.
    """

    worker = "process"

    def __init__(self, turns: int, characters: int) -> None:
        self.max_turns = turns
        self._text = "x" * characters
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The first paragraph."""
        self._turn = 0
        return self._text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The next one."""
        self._turn += 1
        return self._text, 1.0, self._turn == self.max_turns, False, {}


class Counted(ScriptedModel):
    """Notes turns, and the CPU time of the loop's thread as of the last one."""

    def __init__(self) -> None:
        super().__init__(["look there"], repeat=True)
        self.turns, self.loop_s = 0, 0.0
        self.calls = 0

    async def generate(self, request: GenerationRequest) -> Any:
        """The same reply each time."""
        self.turns += 1
        self.loop_s = time.thread_time()
        self.calls = sum(host.channel.num_calls for pool in host_pool.pools() for host in pool.live)
        self.requests.clear()
        return await super().generate(request)


def all_cpu_s() -> float:
    """CPU time of this process and of all that it or Ray's cluster started, since they began."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(kind: str, num_envs: int, args: argparse.Namespace, address: str) -> dict[str, float]:
    """CPU time a step, in microseconds, and calls of actors."""
    model = Counted()
    steps = max(args.steps, num_envs * args.turns)
    config = RolloutConfig(
        batch_size=num_envs,
        num_envs=num_envs,
        worker=kind,
        ray_address=address,
        ray_envs_per_actor=args.envs_per_actor,
        max_tokens_per_turn=64,
        max_tokens_per_episode=10**6,
    )
    env_fn = functools.partial(Paragraphs, args.turns, args.characters)
    with AsyncController(
        env_fn, LLMProxy([model]), ByteTokenizer(), config, task_seeds=iter(range(10**9))
    ) as run:
        run.get_batch(0)
        run.sync_weights({}, 1)
        began, cpu_s, turns, loop_s, calls = (
            time.monotonic(),
            all_cpu_s(),
            model.turns,
            model.loop_s,
            model.calls,
        )
        step = 1
        while model.turns - turns < steps:
            run.get_batch(step)
            run.sync_weights({}, step + 1)
            step += 1
        played = model.turns - turns
        return {
            "cpu_us": 1e6 * (all_cpu_s() - cpu_s) / played,
            "loop_us": 1e6 * (model.loop_s - loop_s) / played,
            "calls_a_step": (model.calls - calls) / played,
            "steps_per_s": played / (time.monotonic() - began),
        }


def measure_all(args: argparse.Namespace) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Both kinds at every size, by turns."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": NODE_MEMORY}
    )
    measured: dict[int, dict[str, list[dict[str, float]]]] = {
        size: {kind: [] for kind in KINDS} for size in args.num_envs
    }
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=16, object_store_memory=NODE_MEMORY)
        with Progress() as progress:
            progress.stage("measuring", unit="run", total=args.repeats * len(args.num_envs) * len(KINDS))
            done = 0
            for _ in range(args.repeats):
                for size in args.num_envs:
                    for kind in KINDS:
                        measured[size][kind].append(measure(kind, size, args, cluster.address))
                        done += 1
                        progress.update(done)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return measured


def summarise(
    measured: Mapping[int, Mapping[str, Sequence[Mapping[str, float]]]],
) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Medians, ratios and what follows from them."""
    rows = []
    for size, kinds in measured.items():
        medians = {
            kind: {key: statistics.median(item[key] for item in repeats) for key in repeats[0]}
            for kind, repeats in kinds.items()
        }
        ratios = [
            ray["cpu_us"] / process["cpu_us"]
            for process, ray in zip(kinds["process"], kinds["ray"], strict=True)
        ]
        rows.append(
            {
                "environments": size,
                **medians,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "environments_at_80_percent": {
                    f"{step_s:g}": round(BUSY * step_s * 1e6 / medians["ray"]["loop_us"], -2)
                    for step_s in STEP_S
                },
            }
        )
    bars = [
        Bar(
            f"CPU time a step over Ray, {row['environments']} environments",
            row["ratio"],
            "<=",
            BAR,
            "x of process workers",
        )
        for row in rows
        if row["environments"] >= BAR_FROM
    ]
    return rows, bars


def assumptions(args: argparse.Namespace) -> dict[str, object]:
    """Sizes, versions, machine."""
    step = ("call", 10**6, "step", (1000, "look there", 119.9))
    answer = ("done", 10**6, True, ("x" * args.characters, 1.0, False, False, {}))
    return {
        "turns of an episode": args.turns,
        "characters of an observation": args.characters,
        "environments an actor": args.envs_per_actor,
        "bytes of a message there and back": len(pickle.dumps(step, 5)) + len(pickle.dumps(answer, 5)),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "load at the end": round(os.getloadavg()[0], 1),
    }


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows."""
    print(
        f"\n{'':13} {'process':>9} {'Ray':>9} {'':>7} {'calls':>8} {'loop':>7}  environments at 80 %, steps of"
    )
    print(
        f"{'environments':>13} {'us a step':>9} {'us a step':>9} {'ratio':>7} {'a step':>8} {'us':>7}  "
        + " ".join(f"{s:>7g} s" for s in STEP_S)
    )
    for row in rows:
        served = " ".join(f"{number:>9,.0f}" for number in row["environments_at_80_percent"].values())
        process, over_ray = row["process"], row["ray"]
        print(
            f"{row['environments']:>13} {process['cpu_us']:>9.0f} {over_ray['cpu_us']:>9.0f} {row['ratio']:>7.2f} "
            f"{over_ray['calls_a_step']:>8.2f} {over_ray['loop_us']:>7.0f}  {served}"
        )
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument(
        "--num_envs", type=int, nargs="+", default=list(SIZES), help="sizes, the greatest last"
    )
    parser.add_argument("--envs_per_actor", type=int, default=32)
    parser.add_argument("--turns", type=int, default=10, help="of an episode")
    parser.add_argument("--characters", type=int, default=400, help="of an observation")
    parser.add_argument("--steps", type=int, default=2000, help="least number of a run")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    for name in ("envs_per_actor", "turns", "characters", "steps", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")
    if min(args.num_envs) < 1:
        parser.error(f"--num_envs is {args.num_envs}, each must be at least 1")
    rows, bars = summarise(measure_all(args))
    report(rows)
    return conclude(bars, assumed=assumptions(args), figures=rows, json_file=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
