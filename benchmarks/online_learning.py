"""Who follows a user whose wish changes? SAO against the mean of the last 128 rewards (arXiv 2607.07508, section 4.5).

    python benchmarks/online_learning.py --json online.json --check

Runs recipes/online_learning.py by both methods over --seeds: the same questions in the same order for both methods of a
seed, the wanted style changes twice, reward = quality x style. Written to --output_dir: curves.csv (reward, quality and
share of each style, per step of every run), online_learning.svg, and a table on stdout.

Runs are processes of one thread, --workers side by side, each with a folder in --output_dir/runs. A finished run is not
run again and one that was cut off goes on from its checkpoint: the same command goes on after an interruption.

    python benchmarks/online_learning.py --tune

chooses the settings that the recipe calls TUNED, by seeds that are never reported.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from online_learning_results import (
    BEGIN,
    METHODS,
    Result,
    Results,
    draw,
    markdown,
    read_run,
    tuning_table,
    write_csv,
    write_docs,
)

from agentenv.errors import UsageError
from agentenv.report.bars import print_bars
from agentenv.report.progress import Progress, format_seconds
from agentenv.report.run_directory import read_json, write_json

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "online_learning.py"
POLICY = ROOT / "envs" / "agentenv_envs" / "text" / "policy"
SEEDS = 3
TUNING_SEEDS = (1000, 1001, 1002, 1003)
"""Of the runs that settings are chosen by; no reported run has them."""
TUNING = {"learning_rate": (3e-4, 1e-3, 3e-3, 1e-2), "beta": (0.0, 0.03, 0.1)}
"""Candidates, all combinations of them for each method. The critic's learning rate is five times the policy's."""
CRITIC_RATE = 5.0
NOTICE_S = 0.5


@dataclass(frozen=True)
class Run:
    """One command of the recipe.

    Args:
        method: a name in METHODS, the recipe's ``--advantage``.
        seed: of tasks and sampling.
        options: further options.
    """

    method: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its folder."""
        changes = "".join(f"-{name}{value:g}" for name, value in self.options.items() if name in TUNING)
        return f"{self.method}-seed{self.seed}{changes}"

    def command(self, folder: Path) -> list[str]:
        """What starts it, or goes on with it."""
        options = {"advantage": self.method, "seed": self.seed, "output_dir": folder, **self.options}
        argv = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        resume = ["--resume"] if (folder / "run.json").exists() else []
        return [sys.executable, str(RECIPE), *argv, *resume]


class RunningRun:
    """A run and its process.

    The process writes to a pipe of this one: should this one end in whatever way, the next line ends the run.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self._folder = run, folder
        self.began = time.monotonic()
        # A session of its own: Ctrl-C is for this process, which then ends the runs once.
        self._process = subprocess.Popen(
            run.command(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        self._last: deque[str] = deque(maxlen=1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line.strip())

    @property
    def steps(self) -> int:
        """Training steps done."""
        try:
            return (self._folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def said(self) -> str:
        """The last line of an ended process."""
        self._reader.join()
        return self._last[-1] if self._last else f"exit code {self._process.returncode}"

    def end(self) -> None:
        """Have it end after its training step, with a checkpoint."""
        self._process.send_signal(signal.SIGTERM)

    def join(self) -> None:
        """Wait for its end."""
        self._process.wait()
        self._reader.join()


def is_finished(folder: Path) -> bool:
    """Whether a run came to its end there."""
    path = folder / "summary.json"
    return path.exists() and read_json(path)["status"] == "finished"


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C is raised where the given function is called: never while a process is being started, which nobody would
    know of then.
    """
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))

    def check() -> None:
        if arrived:
            raise KeyboardInterrupt

    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ended(running: Sequence[RunningRun]) -> Iterator[None]:
    """However the block is left, what still runs then is ended and waited for."""
    try:
        yield
    finally:
        for item in running:
            item.end()
        for item in running:
            item.join()


def run_all(runs: Sequence[Run], directory: Path, *, workers: int, progress: Progress) -> list[Result]:
    """What came of all runs; those that failed are not among it.

    Args:
        runs: in the order in which they are started.
        directory: of their folders.
        workers: most runs at a time.
        progress: shows what is going on, and a line for every run that ended.
    """
    waiting = deque(run for run in runs if not is_finished(directory / run.name))
    ended = len(runs) - len(waiting)
    if ended:
        progress.note(f"{ended} of {len(runs)} runs are finished already")
    progress.stage("online learning", unit="run", total=len(runs), done=ended)
    running: list[RunningRun] = []
    with deferred_interrupt() as check_interrupt, _ended(running):
        while waiting or running:
            check_interrupt()
            while waiting and len(running) < workers:
                run = waiting.popleft()
                running.append(RunningRun(run, directory / run.name))
            time.sleep(NOTICE_S)
            for item in [item for item in running if item.ended()]:
                running.remove(item)
                ended += 1
                said = item.said()
                if is_finished(directory / item.run.name):
                    said = f"finished in {format_seconds(time.monotonic() - item.began)}"
                progress.note(f"{item.run.name}: {said}")
            now = ", ".join(f"{item.run.name} {item.steps}" for item in running)
            progress.update(ended, {"now": now} if now else {})
    return [read_run(directory / run.name) for run in runs if is_finished(directory / run.name)]


def grid(seeds: int, options: Mapping[str, Any]) -> list[Run]:
    """The runs that are reported, seed by seed: whatever is finished when it is stopped is balanced."""
    return [Run(method, seed, options) for seed in range(seeds) for method in METHODS]


def tuning(options: Mapping[str, Any]) -> list[Run]:
    """The runs that settings are chosen by, as many for each method."""
    runs = []
    for seed, method in product(TUNING_SEEDS, METHODS):
        for values in product(*TUNING.values()):
            chosen = dict(zip(TUNING, values, strict=True))
            if method == "gae":
                chosen["critic_learning_rate"] = CRITIC_RATE * chosen["learning_rate"]
            runs.append(Run(method, seed, {**chosen, **options}))
    return runs


def same_experiment(directory: Path, assumed: Mapping[str, Any]) -> None:
    """Note what all runs in a directory have in common.

    Raises:
        UsageError: the runs that are there have something else in common.
    """
    path, told = directory / "experiment.json", json.loads(json.dumps(dict(assumed)))
    before = read_json(path) if path.exists() else told
    different = sorted(name for name in {*before, *told} if before.get(name) != told.get(name))
    if different:
        raise UsageError(
            f"--output_dir {directory}: its runs are of another experiment ({', '.join(different)}): give another"
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(path, told)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/online_learning"), help="of the runs")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, at least 1")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="per method, at least 1")
    parser.add_argument("--tune", action="store_true", help="choose settings instead")
    parser.add_argument("--smoke", action="store_true", help="tiny runs, two seeds")
    parser.add_argument(
        "--docs", type=Path, help="page to put the table into, with the figure in its images/"
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    for name in ("workers", "seeds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")
    if args.docs is not None and BEGIN not in args.docs.read_text(encoding="utf-8"):
        parser.error(f"--docs {args.docs} has no line {BEGIN}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the figures, print them against their bars."""
    args = parse(argv)
    options: dict[str, Any] = {"logged_trajectories": 8}
    if args.smoke:
        options |= {"smoke": True, "logged_trajectories": 4}
        args.seeds = min(args.seeds, 2)
    assumed = {
        "policy": hashlib.blake2b((POLICY / "model.safetensors").read_bytes(), digest_size=6).hexdigest(),
        "options": options,
    }
    wanted = tuning(options) if args.tune else grid(args.seeds, options)
    directory = args.output_dir / ("tuning" if args.tune else "runs")
    try:
        same_experiment(directory, assumed)
        with Progress() as progress:
            found = run_all(wanted, directory, workers=args.workers, progress=progress)
        results = Results(found if not args.tune else [], wanted=len(wanted))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    if args.tune:
        print(tuning_table(found))
        print(f"\n{len(wanted) - len(found)} of {len(wanted)} runs are missing")
        return 1 if args.check and len(found) < len(wanted) else 0

    write_csv(results, args.output_dir / "curves.csv")
    draw(results, args.output_dir / "online_learning.svg")
    table = markdown(results)
    print(table)
    if args.docs is not None:
        write_docs(args.docs, table)
        draw(results, args.docs.parent / "images" / "online_learning.svg")
    bars = results.bars()
    held = print_bars(bars)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"assumed": {**assumed, "seeds": args.seeds, "cpus": os.cpu_count()}, **results.as_dict()}
        args.json.write_text(
            json.dumps({**content, "bars": [bar.as_dict() for bar in bars]}, indent=1) + "\n"
        )
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
