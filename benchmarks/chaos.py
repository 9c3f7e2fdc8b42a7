"""Does the rollout lose, mix up or leave anything behind when environments fail all the time?

    python benchmarks/chaos.py --json chaos.json --check

Real clock, production classes: AsyncController over environments in processes, alpha 1, groups. An episode takes a
stated time per call of the environment and of the engine, as real ones do. A fifth of the episodes have a fault
(`FaultyEnv`, all kinds in equal shares): slow, hang, error, exit, malformed return. Every environment has a child
process of its own, which must not outlive it. The same without faults, in the same run, is the control.

- lost: episodes that ended, less those in the batches that came, those in the buffer and those discarded under a
  reason; counted after every batch and after the stop.
- stale: samples in a batch for step n that were started by a version before n - alpha.
- orphans: processes of the run that are there a second after the stop, however they are related to this one.
- memory: resident set of this process after a garbage collection, mean of the last tenth of the episodes over that of
  the second tenth.
- healthy: samples in batches per second, with faults over without.
"""

import argparse
import functools
import gc
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import uuid
from asyncio import sleep
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentenv import BaseEnv
from agentenv.inference.passive_engine import PassiveEngine
from agentenv.inference.protocol import Generation, GenerationRequest
from agentenv.inference.proxy import LLMProxy
from agentenv.report.bars import Bar, print_bars
from agentenv.report.progress import Progress
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, FaultyEnv

KINDS = ("slow", "hang", "error", "exit", "malformed")
TURNS = 8
ENV_S = (0.02, 0.04)
"""Least and greatest time of a reset or step, drawn evenly."""
ENGINE_S = 0.02
"""Time of a turn of the policy."""
TRAIN_S = 0.05
"""Time of a training step."""
SLOW_S = 0.5
AT_RESET = 1 / (TURNS + 1)
"""Share of the faults at reset: any call of the environment is as likely to fail as any other."""
STEP_TIMEOUT_S = 1.0
RESET_TIMEOUT_S = 2.0
ORPHAN_WAIT_S = 1.0
MARK = "AGENTENV_CHAOS"
"""Variable that all processes of the run inherit, and are found by."""
TOKENIZER = ByteTokenizer()


class TimedEnv(BaseEnv):
    """Takes its time, and has a child process."""

    max_turns = TURNS

    def __init__(self) -> None:
        self._child = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        self._random = random.Random()
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Begin."""
        time.sleep(self._random.uniform(*ENV_S))
        self._turn = 0
        return "Begin.", {"task_id": f"task-{seed}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The last turn ends with a reward by chance."""
        time.sleep(self._random.uniform(*ENV_S))
        self._turn += 1
        last = self._turn == TURNS
        return "Go on.", float(last and self._random.random() < 0.5), last, False, {}

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()


class TimedEngine(PassiveEngine):
    """Gives the same reply after the same time."""

    def __init__(self) -> None:
        self._ids = [*TOKENIZER.encode("go on"), int(TOKENIZER.eos_token_id or 0)]

    async def generate(self, request: GenerationRequest) -> Generation:
        """The one reply."""
        await sleep(ENGINE_S)
        count = len(self._ids)
        return Generation(list(self._ids), [-1.0] * count, [self.version] * count, "stop")


@dataclass
class Outcome:
    """What was seen of a run."""

    fault_rate: float
    batches: int = 0
    produced: int = 0
    consumed: int = 0
    lost: int = 0
    """Largest over all batches and the stop."""
    stale: int = 0
    twice: int = 0
    """Samples that came twice, or whose group came in an earlier batch already."""
    wall_s: float = 0.0
    discarded: dict[str, int] = field(default_factory=dict)
    workers_replaced: int = 0
    orphans: int = 0
    stop_s: float = 0.0
    rss_mb: list[float] = field(default_factory=list)
    """Mean resident set in each tenth of the episodes."""

    @property
    def healthy_per_s(self) -> float:
        """Samples in batches per second."""
        return self.consumed / self.wall_s


def play(args: argparse.Namespace, fault_rate: float, progress: Progress) -> Outcome:
    """One run, until `--episodes` episodes have ended."""
    rates = dict.fromkeys(KINDS, fault_rate / len(KINDS))
    env_fn = functools.partial(
        FaultyEnv, TimedEnv, **rates, slow_s=SLOW_S, at_reset=AT_RESET, max_turn=TURNS, seed=args.seed
    )
    config = RolloutConfig(
        batch_size=args.batch_size,
        group_size=args.group_size,
        num_envs=args.num_envs,
        asynchrony=args.asynchrony,
        step_timeout_s=STEP_TIMEOUT_S,
        reset_timeout_s=RESET_TIMEOUT_S,
        batch_timeout_s=120.0,
        failure_window=failure_window(args),
    )
    outcome = Outcome(fault_rate)
    seen: set[str] = set()
    rss: list[tuple[int, float]] = []
    controller = AsyncController(env_fn, LLMProxy([TimedEngine()]), TOKENIZER, config, seed=args.seed)
    progress.stage("with faults" if fault_rate else "without faults", unit="episode", total=args.episodes)
    began = time.perf_counter()
    try:
        while outcome.produced < args.episodes:
            step = outcome.batches
            batch = controller.get_batch(step)
            outcome.wall_s = time.perf_counter() - began
            outcome.batches += 1
            outcome.consumed += len(batch)
            outcome.stale += sum(sample.start_version < step - args.asynchrony for sample in batch)
            outcome.twice += len(batch) - len(
                {sample.episode_id for sample in batch if sample.group_id not in seen}
            )
            seen.update(sample.group_id for sample in batch)
            del batch
            account(outcome, controller)
            gc.collect()
            rss.append((outcome.produced, resident_mb()))
            progress.update(
                min(outcome.produced, args.episodes),
                {"healthy": f"{outcome.healthy_per_s:.0f}/s", "memory": f"{rss[-1][1]:.0f} MB"},
            )
            time.sleep(TRAIN_S)
            controller.sync_weights({}, outcome.batches)
        outcome.workers_replaced = int(controller.metrics()["workers_replaced"])
    finally:
        before = time.perf_counter()
        controller.stop()
        outcome.stop_s = time.perf_counter() - before
    account(outcome, controller)
    outcome.orphans = orphans()
    outcome.rss_mb = deciles(rss, args.episodes)
    return outcome


def failure_window(args: argparse.Namespace) -> int:
    """No fewer ends than slots may stop the run: the first ones are mostly failures, which take less time."""
    return int(max(RolloutConfig().failure_window, 4 * args.num_envs))


def account(outcome: Outcome, controller: AsyncController) -> None:
    """Where all episodes are; `consumed` is counted here, by the batches that came."""
    counts = controller.counts()
    outcome.produced = counts["produced"]
    outcome.discarded = counts["discarded"]
    missing = outcome.produced - outcome.consumed - counts["buffered"] - sum(outcome.discarded.values())
    outcome.lost = max(outcome.lost, abs(missing))


def resident_mb() -> float:
    """Resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def deciles(samples: Sequence[tuple[int, float]], total: int) -> list[float]:
    """Mean value in each tenth of `total`; a tenth without a sample has that of the one before."""
    means: list[float] = []
    for tenth in range(10):
        low, high = tenth * total / 10, (tenth + 1) * total / 10
        # What ended after the last wanted one counts as the last tenth.
        inside = [value for count, value in samples if low < count and (count <= high or tenth == 9)]
        means.append(statistics.fmean(inside) if inside else (means[-1] if means else samples[0][1]))
    return means


def orphans() -> int:
    """Processes with the run's mark that do not go away."""
    deadline = time.monotonic() + ORPHAN_WAIT_S
    while (left := marked()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(left)


def marked() -> list[int]:
    """All processes that have the mark, this one excepted."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is another user's
    return found


def bars_of(faulty: Outcome, control: Outcome) -> list[Bar]:
    """What must hold."""
    both = (faulty, control)
    return [
        Bar("episodes lost", max(run.lost for run in both), "==", 0),
        Bar("episodes consumed twice", sum(run.twice for run in both), "==", 0),
        Bar("stale samples consumed", sum(run.stale for run in both), "==", 0),
        Bar("processes left after the stop", sum(run.orphans for run in both), "==", 0),
        Bar("memory, last tenth over second", faulty.rss_mb[9] / faulty.rss_mb[1], "<=", 1.05),
        Bar(
            "healthy episodes per second over fault-free",
            faulty.healthy_per_s / control.healthy_per_s,
            ">=",
            0.5,
        ),
    ]


def assumptions(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpus": os.cpu_count(),
        "num_envs": args.num_envs,
        "batch_size": args.batch_size,
        "group_size": args.group_size,
        "asynchrony": args.asynchrony,
        "turns": TURNS,
        "env_s_per_call": list(ENV_S),
        "engine_s_per_turn": ENGINE_S,
        "train_s_per_step": TRAIN_S,
        "faults": {kind: args.fault_rate / len(KINDS) for kind in KINDS},
        "faults_at_reset": AT_RESET,
        "slow_s": SLOW_S,
        "step_timeout_s": STEP_TIMEOUT_S,
        "reset_timeout_s": RESET_TIMEOUT_S,
        "orphan_wait_s": ORPHAN_WAIT_S,
        "failure_window": failure_window(args),
        "max_failure_rate": RolloutConfig().max_failure_rate,
        "max_retries": RolloutConfig().max_retries,
        "reset_retries": RolloutConfig().reset_retries,
        "seed": args.seed,
    }


def report(results: dict[str, Any], faulty: Outcome, control: Outcome) -> bool:
    """Print table, assumptions and bars; whether all held."""
    columns = ("produced", "consumed", "batches", "workers_replaced", "wall_s", "healthy_per_s", "stop_s")
    print(f"{'faults':>8} " + " ".join(f"{name:>16}" for name in columns))
    for run in (faulty, control):
        cells = [getattr(run, name) for name in columns]
        texts = [f"{cell:16,.2f}" if isinstance(cell, float) else f"{cell:16,}" for cell in cells]
        print(f"{run.fault_rate:8.0%} " + " ".join(texts))
    for run in (faulty, control):
        reasons = sorted(run.discarded.items(), key=lambda item: -item[1])
        print(
            f"discarded at {run.fault_rate:.0%}: "
            + (", ".join(f"{n} {count}" for n, count in reasons) or "none")
        )
    print("memory by tenth, MB: " + " ".join(f"{value:.1f}" for value in faulty.rss_mb))
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in results["assumed"].items()))
    bars = bars_of(faulty, control)
    results["bars"] = [bar.as_dict() for bar in bars]
    return print_bars(bars)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000, help="that end, per run; at least 10")
    parser.add_argument(
        "--fault_rate", type=float, default=0.2, help="share of episodes with a fault, 0 to 1"
    )
    parser.add_argument("--num_envs", type=int, default=64, help="environments at once, at least 1")
    parser.add_argument("--batch_size", type=int, default=256, help="samples per training step")
    parser.add_argument("--group_size", type=int, default=4, help="episodes per task")
    parser.add_argument("--asynchrony", type=float, default=1.0, help="alpha, at least 0")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and faults")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    if args.episodes < 10:
        parser.error(f"--episodes is {args.episodes}, must be at least 10")
    if not 0.0 <= args.fault_rate <= 1.0:
        parser.error(f"--fault_rate is {args.fault_rate}, must be between 0 and 1")
    try:
        RolloutConfig(
            batch_size=args.batch_size,
            group_size=args.group_size,
            num_envs=args.num_envs,
            asynchrony=args.asynchrony,
        )
    except ValueError as error:
        parser.error(str(error))

    # Thousands of failed episodes are the purpose here.
    logging.getLogger("agentenv").setLevel(logging.ERROR)
    os.environ[MARK] = uuid.uuid4().hex
    with Progress() as progress:
        faulty = play(args, args.fault_rate, progress)
        control = play(args, 0.0, progress)
    results: dict[str, Any] = {
        "assumed": assumptions(args),
        "runs": [{**asdict(run), "healthy_per_s": run.healthy_per_s} for run in (faulty, control)],
    }
    held = report(results, faulty, control)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
