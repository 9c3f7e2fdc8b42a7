"""What does a turn cost the controller, with its slots beside it and with its slots in shards of a Ray cluster?

    python benchmarks/ray_shards.py --json shards.json --check

A Ray cluster of three nodes on this machine, the production controller, one environment that answers at once with a
paragraph, the tokenizer of the embedded policy. The policy's replies are written down, so that no model's time is in
the figures. Two ways to them: an engine in the controller's process, and an HTTP server with vLLM's interface, in a
process of its own, behind the production's vLLM engine.

The figure is CPU time of the thread that runs the controller's event loop, and of its whole process (Ray's own threads
included), over the turns played; start-up and the first batch are left out. Repeats of all rows are interleaved, and
the figure is their median. From it follows how many environments one controller can serve until its loop is busy for
80 % of the time, where a turn takes so long as stated. All processes share this machine's processors: the rates are no
measure of a cluster, the CPU times are of the controller alone.
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agentenv import AsyncEnv
from agentenv.inference import LLMProxy
from agentenv.inference.passive_engine import PassiveEngine
from agentenv.inference.protocol import Generation, GenerationRequest
from agentenv.inference.vllm.engine import VLLMEngine
from agentenv.inference.vllm.json_http import JsonHttp
from agentenv.inference.vllm.server import ServerBackend
from agentenv.report.bars import Bar, conclude
from agentenv.report.progress import Progress
from agentenv.rollout import AsyncController, RolloutConfig

SERVER_BAR, ENGINE_BAR = 0.75, 1.0
"""Most CPU time of the loop a turn with shards, over that without."""
BUSY = 0.8
TURN_S = (2.0, 10.0, 30.0)
ANSWER_TOKENS = 100
NODE_MEMORY = 100 * 2**20
POLICY = Path(__file__).parent.parent / "envs/agentenv_envs/swe/policy"
TOKENIZER: Any = AutoTokenizer.from_pretrained(POLICY)
REPLY = [*TOKENIZER.encode("a" * ANSWER_TOKENS)[: ANSWER_TOKENS - 1], TOKENIZER.eos_token_id]
ROWS = {
    "slots here, engine here": {"worker": "inline", "ray_shards": 0, "server": False},
    "shards, engine here": {"worker": "ray", "ray_shards": 2, "server": False},
    "slots here, server": {"worker": "inline", "ray_shards": 0, "server": True},
    "shards, server": {"worker": "ray", "ray_shards": 2, "server": True},
}


class Paragraphs(AsyncEnv):
    """Answers at once.

    Args:
        turns: of an episode.
        characters: of an observation.
    """

    def __init__(self, turns: int, characters: int) -> None:
        self.max_turns = turns
        self.text = ("The door is open. " * (1 + characters // 18))[:characters]
        self._turn = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        """The first paragraph."""
        self._turn = 0
        return self.text, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """The next one."""
        self._turn += 1
        return self.text, 1.0, self._turn == self.max_turns, False, {}


class Clock:
    """CPU time of the loop's thread, as of the last request."""

    def __init__(self) -> None:
        self.loop_s = 0.0
        self.turns = 0

    def note(self) -> None:
        """In the loop."""
        self.loop_s = time.thread_time()
        self.turns += 1


class HereEngine(PassiveEngine):
    """Replies at once, in the controller's process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def generate(self, request: GenerationRequest) -> Generation:
        """The same reply each time."""
        self._clock.note()
        await asyncio.sleep(0)
        return Generation(list(REPLY), [-1.0] * len(REPLY), [self.version] * len(REPLY), "stop")


class NoWeights:
    """Stands in for the transfer of weights, which is not measured."""

    publication = None

    async def close(self) -> None:
        """Nothing is held."""


class ServerEngine(VLLMEngine):
    """The production's engine, whose weights are only a number."""

    def __init__(self, url: str, clock: Clock) -> None:
        backend = ServerBackend(JsonHttp(url), model="policy", max_length=10**6)
        super().__init__(backend, NoWeights(), heartbeat_s=60.0)  # type: ignore[arg-type]
        self._clock = clock

    async def generate(self, request: GenerationRequest) -> Generation:
        """As the engine does."""
        self._clock.note()
        return await super().generate(request)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Only the number."""
        self._version = version


def serve(port: int) -> None:
    """The server; runs until its process is ended."""
    from aiohttp import web

    choice = {
        "token_ids": REPLY,
        "logprobs": {"token_logprobs": [-1.0] * len(REPLY)},
        "finish_reason": "stop",
    }
    answer = json.dumps({"choices": [choice]}).encode()

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    application = web.Application(client_max_size=2**30)
    application.router.add_post("/v1/completions", complete)
    application.router.add_get("/health", healthy)
    web.run_app(application, host="127.0.0.1", port=port, print=None)


def measure(row: Mapping[str, Any], args: argparse.Namespace, address: str, url: str) -> dict[str, float]:
    """CPU time a turn, in microseconds: of the loop's thread, and of the process."""
    clock = Clock()
    engine: Any = ServerEngine(url, clock) if row["server"] else HereEngine(clock)
    config = RolloutConfig(
        batch_size=args.num_envs,
        num_envs=args.num_envs,
        worker=row["worker"],
        ray_shards=row["ray_shards"],
        ray_address=address,
        max_tokens_per_turn=ANSWER_TOKENS,
        max_tokens_per_episode=10**6,
    )
    env_fn = functools.partial(Paragraphs, args.turns, args.characters)
    with AsyncController(env_fn, LLMProxy([engine]), TOKENIZER, config, task_seeds=iter(range(10**9))) as run:
        run.get_batch(0)
        run.sync_weights({}, 1)
        loop_s, process_s, turns, began = clock.loop_s, time.process_time(), clock.turns, time.monotonic()
        for step in range(1, args.batches + 1):
            run.get_batch(step)
            run.sync_weights({}, step + 1)
        turns = clock.turns - turns
        return {
            "loop_us": 1e6 * (clock.loop_s - loop_s) / turns,
            "process_us": 1e6 * (time.process_time() - process_s) / turns,
            "turns_per_s": turns / (time.monotonic() - began),
        }


def measure_all(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All rows, interleaved."""
    import ray
    from ray.cluster_utils import Cluster

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": NODE_MEMORY}
    )
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=NODE_MEMORY)
        with Progress() as progress:
            progress.stage("measuring", unit="run", total=args.repeats * len(ROWS))
            for _ in range(args.repeats):
                for name, row in ROWS.items():
                    measured[name].append(measure(row, args, cluster.address, f"http://127.0.0.1:{port}"))
                    progress.update(sum(map(len, measured.values())))
    finally:
        ray.shutdown()
        cluster.shutdown()
        server.terminate()
        server.join()
    return measured


def summarise(
    measured: Mapping[str, Sequence[Mapping[str, float]]],
) -> tuple[dict[str, Any], list[Bar]]:
    """Medians, what follows from them, and bars."""
    rows = {}
    for name, repeats in measured.items():
        medians = {key: statistics.median(item[key] for item in repeats) for key in repeats[0]}
        served = {f"{turn_s:g}": round(BUSY * turn_s * 1e6 / medians["loop_us"], -2) for turn_s in TURN_S}
        rows[name] = {**medians, "environments_at_80_percent": served, "repeats": list(repeats)}
    ratios = {
        engine: rows[f"shards, {engine}"]["loop_us"] / rows[f"slots here, {engine}"]["loop_us"]
        for engine in ("engine here", "server")
    }
    bars = [
        Bar(
            "loop's CPU a turn, shards over slots here; engine here",
            ratios["engine here"],
            "<=",
            ENGINE_BAR,
            "x",
        ),
        Bar("loop's CPU a turn, shards over slots here; server", ratios["server"], "<=", SERVER_BAR, "x"),
    ]
    return rows, bars


def assumptions(args: argparse.Namespace) -> dict[str, object]:
    """Sizes, versions, machine."""
    return {
        "environments": args.num_envs,
        "turns of an episode": args.turns,
        "characters of an observation": args.characters,
        "tokens of an observation": len(TOKENIZER.encode(Paragraphs(1, args.characters).text)),
        "tokens of a reply": len(REPLY),
        "batches": args.batches,
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "load at the end": round(os.getloadavg()[0], 1),
    }


def report(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the rows."""
    print(f"\n{'':26} {'loop, us':>9} {'process, us':>12} {'turns/s':>8}   environments at 80 %, turns of")
    print(f"{'':58} " + " ".join(f"{turn_s:>8g} s" for turn_s in TURN_S))
    for name, row in rows.items():
        served = " ".join(f"{number:>10,.0f}" for number in row["environments_at_80_percent"].values())
        print(
            f"{name:<26} {row['loop_us']:>9.0f} {row['process_us']:>12.0f} {row['turns_per_s']:>8.0f} {served}"
        )
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--num_envs", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10, help="of an episode")
    parser.add_argument("--characters", type=int, default=400, help="of an observation")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    for name in ("num_envs", "turns", "characters", "batches", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")
    rows, bars = summarise(measure_all(args))
    report(rows)
    return conclude(bars, assumed=assumptions(args), figures=rows, json_file=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
