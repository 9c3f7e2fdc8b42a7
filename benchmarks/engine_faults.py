"""Does a training run with vLLM survive the death of its server, and the death of its trainer?

    python benchmarks/engine_faults.py --json engine_faults.json --check
    python benchmarks/engine_faults.py --vllm_python /opt/vllm/bin/python --sandbox local-unisolated

`recipes/swe_sao.py --engine vllm --model DIR` as a user starts it, with small batches, in a process of its own:

1. The vLLM server is killed by SIGKILL while requests are at it. Measured from there until the next server has sampled
   a token of a turn; it must stay below the recipe's `--vllm_start_timeout_s`.
2. The trainer is killed by SIGKILL. Measured from there until no process of the run is left.
3. The run is resumed, in a new process with a new server, and ends.

Then the run's files are read. A fresh run of so many steps trains on the tasks g0, g1, ... of its ledger, each once; so
must this one: "lost" are tasks of those that no step trained on, "twice" those beyond the first time, "others" those
that are none of them. An episode that failed would be replaced, and its task with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.bars import Bar, conclude
from agentenv_envs.swe.sandbox.engine import connect
from agentenv_envs.swe.sandbox.labels import OWNER, SANDBOX

REPOSITORY = Path(__file__).resolve().parent.parent
EMBEDDED = REPOSITORY / "envs/agentenv_envs/swe/policy"
SHARED_MEMORY = Path("/dev/shm")
MARK = "AGENTENV_ENGINE_FAULTS"
"""Variable that all processes of the run inherit, and are found by."""
LEFT_WAIT_S = 60.0
"""How long processes may take to go."""
PROBE_TOKENS = 1
"""What a new server samples before it is given turns: the probe's request needs a token."""


class Run:
    """A run of the recipe, in processes that bear a mark.

    Args:
        folder: the run's; its log lies beside it.
        arguments: of the recipe.
        patience_s: for each thing that is waited for.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], patience_s: float) -> None:
        self.folder, self._arguments, self._patience_s = folder, arguments, patience_s
        self.log = folder.with_name(f"{folder.name}.log")
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start the recipe."""
        command = [sys.executable, str(REPOSITORY / "recipes/swe_sao.py"), "--output_dir", str(self.folder)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    @property
    def environment(self) -> dict[str, str]:
        """For processes that belong to the run."""
        return os.environ | {MARK: self._mark}

    @property
    def trainer(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    def steps(self) -> list[int]:
        """Training steps that are written down."""
        return [line["step"] for line in read_lines(self.folder / "metrics.jsonl")]

    def processes(self) -> dict[int, list[str]]:
        """Command lines of all processes of the run, by id."""
        mark, found = f"{MARK}={self._mark}".encode(), {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it has ended, or is another user's
        return found

    def server(self) -> tuple[int, str] | None:
        """Id and address of the vLLM server."""
        for pid, command in self.processes().items():
            # Its guard's command line ends with the server's.
            if command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
                return pid, f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        return None

    def wait(self, what: str, condition: Callable[[], Any], pause_s: float = 0.1) -> float:
        """Seconds until a condition holds.

        Raises:
            SystemExit: the trainer ended, or it took too long.
        """
        began = time.monotonic()
        while not condition():
            if self.trainer.poll() not in (None, -signal.SIGKILL):
                raise SystemExit(f"the recipe ended with {self.trainer.returncode} before {what}: {self.log}")
            if time.monotonic() - began > self._patience_s:
                raise SystemExit(f"not within {self._patience_s:g} s: {what}; log: {self.log}")
            time.sleep(pause_s)
        return time.monotonic() - began

    def kill_all(self) -> None:
        """End whatever is left."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSONL file; none where there is no file."""
    try:
        lines = path.read_text("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def metric(url: str, name: str) -> float:
    """A metric of a vLLM server; nan where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
    except OSError:
        return float("nan")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


def kill_server(run: Run, deadline_s: float) -> dict[str, Any]:
    """Kill the server with requests at it; how long until a turn is sampled again."""
    found = run.server()
    if found is None:
        raise SystemExit(f"no vLLM server runs; log: {run.log}")
    pid, url = found
    running = 0.0

    def busy() -> bool:
        nonlocal running
        running = metric(url, "num_requests_running")
        return running > 0

    run.wait("requests are at the server", busy, 0.01)
    os.kill(pid, signal.SIGKILL)
    step = len(run.steps())

    def samples() -> bool:
        again = run.server()
        return again is not None and again[0] != pid and metric(url, "generation_tokens_total") > PROBE_TOKENS

    seconds = run.wait("a token from the next server", samples)
    return {"after_step": step, "requests_at_it": running, "recovery_s": seconds, "deadline_s": deadline_s}


def kill_trainer(run: Run) -> dict[str, Any]:
    """Kill the trainer; how long until nothing of the run is left."""
    step = len(run.steps())
    run.trainer.kill()
    run.trainer.wait()
    began = time.monotonic()
    while run.processes() and time.monotonic() - began < LEFT_WAIT_S:
        time.sleep(0.1)
    return {
        "after_step": step,
        "gone_s": time.monotonic() - began,
        "processes_left": len(run.processes()),
        "pid": run.trainer.pid,
    }


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """All of it."""
    weights_before = set(SHARED_MEMORY.glob("agentenv-weights-*"))
    began = time.monotonic()
    run.start()
    run.wait(
        f"{args.kill_server_after} steps are done", lambda: len(run.steps()) >= args.kill_server_after, 0.02
    )
    server = kill_server(run, args.deadline_s)
    run.wait(f"{args.kill_trainer_after} steps are done", lambda: len(run.steps()) >= args.kill_trainer_after)
    trainer = kill_trainer(run)
    run.start("--resume")
    run.wait("the resumed run ends", lambda: run.trainer.poll() is not None)
    deadline = time.monotonic() + LEFT_WAIT_S
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        "wall_s": time.monotonic() - began,
        "server": server,
        "trainer": trainer,
        "processes_left": len(run.processes()),
        "weights_left": len(set(SHARED_MEMORY.glob("agentenv-weights-*")) - weights_before),
        **read_run(run.folder, args.steps, args.batch_size),
        "containers_left": containers_of({trainer["pid"], run.trainer.pid}),
    }


def containers_of(trainers: set[int]) -> int:
    """Sandboxes in Docker that processes of these ids left; 0 where there is no Docker."""
    try:
        client = connect()
    except UsageError:
        return 0
    try:
        found = client.api.containers(all=True, filters={"label": SANDBOX})
    finally:
        client.close()
    return sum(item["Labels"].get(OWNER, "").split(" ")[0] in map(str, trainers) for item in found)


def read_run(folder: Path, steps: int, batch_size: int) -> dict[str, Any]:
    """What the files of a finished run say of its steps and episodes."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    counted = Counter(line["step"] for line in read_lines(folder / "metrics.jsonl"))
    trained = [line for line in read_lines(folder / "trajectories.jsonl") if line["phase"] == "train"]
    tasks, wanted = (
        Counter(line["group_id"] for line in trained),
        {f"g{n}" for n in range(steps * batch_size)},
    )
    episodes = summary["episodes"]
    return {
        "status": summary["status"],
        "steps_wrong": sum(abs(counted[n] - 1) for n in range(1, steps + 1))
        + sum(number for step, number in counted.items() if not 1 <= step <= steps),
        "tasks_lost": len(wanted - set(tasks)),
        "tasks_twice": sum(number - 1 for number in tasks.values()),
        "tasks_others": len(set(tasks) - wanted),
        "episodes": episodes,
        "episodes_unaccounted": episodes["produced"]
        - episodes["consumed"]
        - episodes["buffered"]
        - sum(episodes["discarded"].values()),
        "episodes_failed": sum(1 for line in trained if line["end_reason"] not in ("terminated", "truncated"))
        + sum(episodes["discarded"].values()),
    }


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """What must hold."""
    server, trainer = figures["server"], figures["trainer"]
    return [
        Bar("the run finished", float(figures["status"] == "finished"), "==", 1),
        Bar("steps missing, twice or beyond the last", figures["steps_wrong"], "==", 0),
        Bar("tasks lost", figures["tasks_lost"], "==", 0),
        Bar("tasks trained on twice", figures["tasks_twice"], "==", 0),
        Bar("tasks that are none of the first", figures["tasks_others"], "==", 0),
        Bar("episodes without exactly one end", abs(figures["episodes_unaccounted"]), "==", 0),
        Bar("episodes failed or discarded", figures["episodes_failed"], "==", 0),
        Bar("requests at the server when it was killed", server["requests_at_it"], ">=", 1),
        Bar(
            "from the server's death to the next token", server["recovery_s"], "<=", server["deadline_s"], "s"
        ),
        Bar("processes left by the killed trainer", trainer["processes_left"], "==", 0),
        Bar("processes left in the end", figures["processes_left"], "==", 0),
        Bar("containers left in the end", figures["containers_left"], "==", 0),
        Bar("folders of weights left in shared memory", figures["weights_left"], "==", 0),
    ]


def recipe_arguments(args: argparse.Namespace) -> list[str]:
    """How the recipe is started."""
    options = {
        "engine": "vllm",
        "model": args.model,
        "vllm_start_timeout_s": args.deadline_s,
        "sandbox": args.sandbox,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": 1,
        "num_envs": args.num_envs,
        "max_turns": 6,
        "max_tokens_per_turn": 48,
        "max_tokens_per_episode": 640,
        "eval_episodes": 4,
        "value_pretrain_episodes": 4,
        "value_pretrain_steps": 2,
        "learning_rate": 8e-5,
        "save_steps": args.save_steps,
        "logged_trajectories": args.batch_size,
    }
    if args.vllm_python:
        options["vllm_python"] = args.vllm_python
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(EMBEDDED), help="folder, or name on the hub")
    parser.add_argument("--vllm_python", help="interpreter that has vLLM; unset: this one")
    parser.add_argument("--sandbox", default="docker", choices=("docker", "local-unisolated"))
    parser.add_argument("--steps", type=int, default=20, help="of the run")
    parser.add_argument("--batch_size", type=int, default=4, help="episodes of a step")
    parser.add_argument("--num_envs", type=int, default=8, help="episodes side by side")
    parser.add_argument("--save_steps", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--kill_server_after", type=int, default=6, metavar="STEP")
    parser.add_argument("--kill_trainer_after", type=int, default=13, metavar="STEP")
    parser.add_argument("--deadline_s", type=float, default=600.0, help="for a new server to come back")
    parser.add_argument("--patience_s", type=float, default=1200.0, help="for anything at all")
    parser.add_argument("--work_dir", type=Path, help="keep the run's folder and log there")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    if not 1 <= args.kill_server_after < args.kill_trainer_after < args.steps:
        parser.error("must be: 1 <= --kill_server_after < --kill_trainer_after < --steps")
    with TemporaryDirectory(prefix="agentenv-faults-") as temporary:
        work_dir = args.work_dir or Path(temporary)
        work_dir.mkdir(parents=True, exist_ok=True)
        run = Run(work_dir / "run", recipe_arguments(args), args.patience_s)
        try:
            figures = measure(args, run)
        finally:
            run.kill_all()
    assumed = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        **{
            name: str(value)
            for name, value in vars(args).items()
            if name not in ("json", "check", "work_dir")
        },
    }
    server, trainer = figures["server"], figures["trainer"]
    print(
        f"server killed after step {server['after_step']} with {server['requests_at_it']:.0f} requests at it, next "
        f"token {server['recovery_s']:.1f} s later; trainer killed after step {trainer['after_step']}, all its "
        f"processes gone {trainer['gone_s']:.1f} s later; {args.steps} steps in {figures['wall_s']:.0f} s"
    )
    return conclude(bars_of(figures), assumed=assumed, figures=figures, json_file=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
