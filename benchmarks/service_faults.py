"""Does a run over several sandbox services and engines survive the death of one of each?

    python benchmarks/service_faults.py --json service_faults.json --check
    python benchmarks/service_faults.py --engines 0 --check                 services alone, no vLLM
    python benchmarks/service_faults.py --vllm_python /opt/vllm/bin/python --check
    python benchmarks/service_faults.py --steps 200 --engine_down_s 1 --check   the engine comes back

Three `agentenv sandbox serve` and two vLLM servers are started as docs/sandbox-service.md and docs/engines.md say, and
serve one `python recipes/swe_sao.py --smoke`, with more steps so that there is a middle of the run:

1. The service with the most leases is killed by SIGKILL, and started again on its port some seconds later.
2. An engine is killed by SIGKILL while requests are at it, with all its processes. It stays away, or with
   --engine_down_s is started again on its port and must sample again before the run ends.

Then the run's files are read. A run of so many steps trains on the tasks g0, g1, ... of its ledger, each once; so must
this one. Failed episodes must be those that had a sandbox of the killed service, and none may be trained on.

Rewards: the learning rate is 0, so that the weights never change, though they are sent after each step. The held-out
episodes, whose seeds are fixed, must then earn after the kills what they earned before them, one by one. Training
episodes can't be compared so: a sampling seed counts the run's episodes, and one that is played again takes a number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_faults import (
    EMBEDDED,
    LEFT_WAIT_S,
    SHARED_MEMORY,
    Run,
    containers_of,
    metric,
    read_lines,
    read_run,
)
from sandbox_service import address_of

from agentenv.errors import UsageError
from agentenv.inference.model_skeleton import ModelSkeleton
from agentenv.inference.policy import load_policy
from agentenv.inference.vllm.opening import checkpoint_of
from agentenv.inference.vllm.server_process import find_vllm
from agentenv.report.bars import Bar, conclude

LONGEST_EPISODE = 640
"""Tokens, of the recipe's default."""
SERVICE_STOP_S = 60.0


class Services:
    """`agentenv sandbox serve`, several times, as processes of a run.

    Args:
        number: of them.
        run: that they belong to.
        folder: for their tokens and logs.
    """

    def __init__(self, number: int, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._token = secrets.token_hex(24)
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"trainer {self._token}\n")
        self.processes: list[subprocess.Popen[bytes]] = []
        """All that were ever started."""
        self._alive: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(number):
                self.start(0)
        except BaseException:
            self.kill_all()
            raise

    @property
    def urls(self) -> list[str]:
        """Of those that run."""
        return list(self._alive)

    def start(self, port: int) -> str:
        """Start one, wait until it listens; returns its URL."""
        log = self._folder / f"service-{len(self.processes)}.log"
        command = [sys.executable, "-m", "agentenv", "sandbox", "serve", "--port", str(port)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--token-file", str(self.tokens)], stderr=stream, env=self._run.environment
            )
        self.processes.append(process)
        url = address_of(process, log)
        self._alive[url] = process
        return url

    def leases(self, url: str) -> int:
        """How many it has given to the run."""
        request = urllib.request.Request(
            f"{url}/v1/sandboxes", headers={"authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return len(json.load(answer)["ids"])

    def kill(self, url: str) -> None:
        """By SIGKILL."""
        process = self._alive.pop(url)
        process.kill()
        process.wait()

    def stop(self) -> list[int]:
        """Drain all that run; their exit codes."""
        for process in self._alive.values():
            process.send_signal(signal.SIGTERM)
        return [process.wait(SERVICE_STOP_S) for process in self._alive.values()]

    def kill_all(self) -> None:
        """End whatever runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


class Engines:
    """vLLM servers of the embedded policy, each with its processes in a group of its own.

    Args:
        number: of them.
        run: that they belong to.
        folder: for their logs.
        model: folder that vLLM can load.
        python: that has vLLM; None: this one.
    """

    def __init__(self, number: int, run: Run, folder: Path, model: str, python: str | None) -> None:
        interpreter, on_processor = find_vllm(python)
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        environment = {
            name: value for name, value in run.environment.items() if name != "PYTHONPATH"
        } | settings
        self._folder, self._environment = folder, environment
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for _ in range(number):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
            command += ["--dtype", "float32", "--max-model-len", str(LONGEST_EPISODE), "--port", str(port)]
            command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
            command += ["--enforce-eager", "--no-enable-chunked-prefill"] if on_processor else []
            self._commands[f"http://127.0.0.1:{port}"] = command
            self.start(f"http://127.0.0.1:{port}")

    @property
    def urls(self) -> list[str]:
        """Of those that run."""
        return list(self._processes)

    def start(self, url: str) -> None:
        """Start one, at first or again."""
        with (self._folder / f"engine-{list(self._commands).index(url)}.log").open("ab") as log:
            self._processes[url] = subprocess.Popen(
                self._commands[url], stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def wait(self, patience_s: float) -> None:
        """Until all answer.

        Raises:
            SystemExit: one has ended, or it took too long.
        """
        deadline = time.monotonic() + patience_s
        for url, process in self._processes.items():
            while metric(url, "num_requests_running") != 0:  # not a number, while it does not answer
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the engine {url} does not start: see its log beside the run's")
                time.sleep(0.5)

    def kill(self, url: str) -> None:
        """By SIGKILL, with all its processes."""
        process = self._processes.pop(url)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        """End whatever runs."""
        for url in self.urls:
            self.kill(url)


def kill_service(run: Run, services: Services, down_s: float) -> dict[str, Any]:
    """Kill the one with the most leases, start it again; what it held."""
    held: dict[str, int] = {}

    def busy() -> bool:
        held.update({url: services.leases(url) for url in services.urls})
        return max(held.values()) > 0

    run.wait("a sandbox is lent", busy, 0.02)
    victim = max(held, key=lambda url: held[url])
    services.kill(victim)
    step = len(run.steps())
    time.sleep(down_s)
    services.start(int(victim.rpartition(":")[2]))
    return {"url": victim, "after_step": step, "leases": held[victim], "all_leases": sorted(held.values())}


def kill_engine(run: Run, engines: Engines, down_s: float | None) -> dict[str, Any]:
    """Kill the first that has requests, and start it again where ``down_s`` says when."""
    found: list[tuple[str, float]] = []

    def busy() -> bool:
        running = [(url, metric(url, "num_requests_running")) for url in engines.urls]
        found[:] = [(url, number) for url, number in running if number > 0]
        return bool(found)

    run.wait("requests are at an engine", busy, 0.01)
    url, requests = found[0]
    engines.kill(url)
    step = len(run.steps())
    if down_s is not None:
        time.sleep(down_s)
        engines.start(url)
    return {"url": url, "after_step": step, "requests_at_it": requests}


@contextmanager
def servers(
    args: argparse.Namespace, run: Run, folder: Path
) -> Iterator[tuple[Services, Engines | None, list[str]]]:
    """Services, engines, and the recipe's options for them; nothing of them is left afterwards."""
    with ExitStack() as stack:
        services = Services(args.services, run, folder)
        stack.callback(services.kill_all)
        options = ["--sandbox_url", ",".join(services.urls)]
        engines = None
        if args.engines:
            policy = load_policy(str(EMBEDDED))
            _, on_processor = find_vllm(args.vllm_python)
            model, made = checkpoint_of(policy, ModelSkeleton(policy.model), on_processor=on_processor)
            if made is not None:
                stack.callback(made.cleanup)
            engines = Engines(args.engines, run, folder, model, args.vllm_python)
            stack.callback(engines.kill_all)
            engines.wait(args.patience_s)
            options += ["--engine", "vllm", "--vllm_url", ",".join(engines.urls)]
        yield services, engines, options


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    run = Run(folder / "run", recipe_arguments(args), args.patience_s)
    weights_before = set(SHARED_MEMORY.glob("agentenv-weights-*"))
    try:
        with servers(args, run, folder) as (services, engines, options):
            os.environ["AGENTENV_SANDBOX_TOKEN_FILE"] = str(services.tokens)
            began = time.monotonic()
            run.start(*options)
            after = args.kill_service_after
            run.wait(f"{after} steps are done", lambda: len(run.steps()) >= after, 0.02)
            service = kill_service(run, services, args.down_s)
            engine = None
            if engines is not None and args.kill_engine_after:
                after = args.kill_engine_after
                run.wait(f"{after} steps are done", lambda: len(run.steps()) >= after, 0.02)
                engine = kill_engine(run, engines, args.engine_down_s)
            used_again, sampled_again = 0, 0.0

            def ended() -> bool:
                nonlocal used_again, sampled_again
                used_again = max(used_again, services.leases(service["url"]))
                if engine is not None and args.engine_down_s is not None:
                    # Its probe after each update samples a token, too.
                    sampled = metric(engine["url"], "generation_tokens_total") - args.steps
                    sampled_again = max(sampled_again, sampled)
                return run.trainer.poll() is not None

            run.wait("the run ends", ended)
            wall_s = time.monotonic() - began
            codes = services.stop()
        deadline = time.monotonic() + LEFT_WAIT_S
        while run.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = len(run.processes())
    finally:
        run.kill_all()
    owners = {process.pid for process in (*services.processes, run.trainer)}
    return {
        "wall_s": wall_s,
        "exit_code": run.trainer.returncode,
        "service": service | {"leases_again": used_again},
        "engine": None
        if engine is None
        else engine | {"is_back": args.engine_down_s is not None, "tokens_again": sampled_again},
        "engines": args.engines,
        "services_not_drained": sum(code != 0 for code in codes),
        "processes_left": left,
        "containers_left": containers_of(owners),
        "weights_left": len(set(SHARED_MEMORY.glob("agentenv-weights-*")) - weights_before),
        **read_run(run.folder, args.steps, args.batch_size),
        **rewards(run.folder),
        **{
            name: read_lines(run.folder / "metrics.jsonl")[-1][name]
            for name in ("engine_losses", "moved_turns", "restarted_tokens", "engines_in_service")
        },
    }


def rewards(folder: Path) -> dict[str, Any]:
    """Held-out episodes before and after, and what was trained on though it had failed."""
    lines = read_lines(folder / "trajectories.jsonl")
    before, after = (
        {line["seed"]: line["reward"] for line in lines if line["phase"] == phase}
        for phase in ("before", "after")
    )
    ends = ("terminated", "truncated")
    return {
        "heldout": len(before),
        "heldout_reward": sum(before.values()) / max(1, len(before)),
        "heldout_different": sum(before.get(seed) != after.get(seed) for seed in before | after),
        "trained_on_failed": sum(
            line["end_reason"] not in ends for line in lines if line["phase"] == "train"
        ),
    }


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """What must hold."""
    service, engine = figures["service"], figures["engine"]
    reasons: dict[str, int] = figures["episodes"]["discarded"]
    lost = sum(number for reason, number in reasons.items() if reason.endswith("SandboxLostError"))
    bars = [
        Bar("exit code of the run", figures["exit_code"], "==", 0),
        Bar("steps missing, twice or beyond the last", figures["steps_wrong"], "==", 0),
        Bar("tasks lost", figures["tasks_lost"], "==", 0),
        Bar("tasks trained on twice", figures["tasks_twice"], "==", 0),
        Bar("tasks that are none of the first", figures["tasks_others"], "==", 0),
        Bar("episodes without exactly one end", abs(figures["episodes_unaccounted"]), "==", 0),
        Bar("leases of the service when it was killed", service["leases"], ">=", 1),
        Bar("episodes lost with it", lost, "<=", service["leases"]),
        Bar("episodes failed for any other reason", sum(reasons.values()) - lost, "==", 0),
        Bar("failed episodes that were trained on", figures["trained_on_failed"], "==", 0),
        Bar("leases of the service after it came back", service["leases_again"], ">=", 1),
        Bar("held-out episodes", figures["heldout"], ">=", 1),
        Bar("held-out episodes with another reward after the kills", figures["heldout_different"], "==", 0),
        Bar("services that did not drain", figures["services_not_drained"], "==", 0),
        Bar("processes left", figures["processes_left"], "==", 0),
        Bar("containers left", figures["containers_left"], "==", 0),
        Bar("folders of weights left in shared memory", figures["weights_left"], "==", 0),
    ]
    if engine is not None:
        bars += [
            Bar("requests at the engine when it was killed", engine["requests_at_it"], ">=", 1),
            Bar("engines that the run counts as lost", figures["engine_losses"], "==", 1),
            Bar("turns that went on at the other engine", figures["moved_turns"], ">=", 1),
        ]
    if engine is not None and engine["is_back"]:
        bars += [
            Bar("engines in service at the end", figures["engines_in_service"], "==", figures["engines"]),
            Bar("tokens of the engine after it came back", engine["tokens_again"], ">=", 1),
        ]
    return bars


def recipe_arguments(args: argparse.Namespace) -> list[str]:
    """How the recipe is started, besides its servers."""
    options = {
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "num_envs": args.num_envs,
        "eval_episodes": args.heldout,
        "logged_trajectories": max(args.batch_size, args.heldout),
        "learning_rate": 0.0,
    }
    return ["--smoke", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--services", type=int, default=3, help="sandbox services, at least 2")
    parser.add_argument("--engines", type=int, default=2, help="vLLM servers, at least 2; 0: no vLLM")
    parser.add_argument("--vllm_python", help="interpreter that has vLLM; unset: this one")
    parser.add_argument("--steps", type=int, default=16, help="of the run")
    parser.add_argument("--batch_size", type=int, default=4, help="episodes of a step")
    parser.add_argument("--num_envs", type=int, default=6, help="episodes side by side")
    parser.add_argument("--heldout", type=int, default=16, help="episodes before and after training")
    parser.add_argument("--kill_service_after", type=int, default=4, metavar="STEP")
    parser.add_argument("--kill_engine_after", type=int, default=8, metavar="STEP", help="0: never")
    parser.add_argument("--down_s", type=float, default=3.0, help="until the service is started again")
    parser.add_argument("--engine_down_s", type=float, help="until the engine is started again; unset: never")
    parser.add_argument("--patience_s", type=float, default=900.0, help="for anything at all")
    parser.add_argument("--work_dir", type=Path, help="keep the run's folder and the logs there")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    for name in ("kill_service_after", "kill_engine_after"):
        if not (0 if "engine" in name else 1) <= getattr(args, name) < args.steps:
            parser.error(
                f"--{name} {getattr(args, name)}: a step before the last of --steps {args.steps} is needed"
            )
    if args.services < 2 or args.engines == 1 or args.engines < 0:
        parser.error("must be: --services at least 2, --engines 0 or at least 2")
    with TemporaryDirectory(prefix="agentenv-service-faults-") as temporary:
        folder = args.work_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            figures = measure(args, folder)
        except UsageError as error:
            parser.error(str(error))
    told = ("services", "engines", "steps", "batch_size", "num_envs", "heldout", "down_s", "engine_down_s")
    assumed = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "learning_rate": 0,
        **{name: getattr(args, name) for name in told},
    }
    service, engine = figures["service"], figures["engine"]
    print(
        f"service killed after step {service['after_step']} with {service['leases']} leases (all: "
        f"{service['all_leases']}), back {args.down_s:g} s later; "
        + (
            f"engine killed after step {engine['after_step']} with {engine['requests_at_it']:.0f} requests, "
            f"{figures['moved_turns']:.0f} turns moved, {engine['tokens_again']:.0f} tokens after it came back; "
            if engine
            else ""
        )
        + f"discarded: {figures['episodes']['discarded']}; mean held-out reward {figures['heldout_reward']:.2f}; "
        f"{figures['wall_s']:.0f} s"
    )
    return conclude(bars_of(figures), assumed=assumed, figures=figures, json_file=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
