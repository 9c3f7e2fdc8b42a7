"""What does orchestration cost? CPU time per environment step, beside plain asyncio and beside a public peer.

    python benchmarks/orchestration.py --json orchestration.json --check
    python benchmarks/orchestration.py --peer_python peer/bin/python

Real clock, the production AsyncController with everything below it, and nothing to wait for: the engine awaits once and
gives the same few tokens, the environment awaits once and gives the same sentence. All environments play at once, with
alpha 1, so a slot goes on with the next episode while the trainer takes its batch.

A step is one turn of the policy and one of the environment. CPU time is that of the whole process, garbage collection
included, from the start of the rollouts to the last batch, over the steps played in that time: resets, trajectories,
batches and weight updates are in it, making and ending the controller is not ("setup", once per environment).

The floors are asyncio programs of one task per environment that play the same episodes: one that only awaits, one with
a deadline on every wait, and one that keeps the token sequence with `Conversation` as well. Repeats of all rows are
interleaved; the figure is their median. `orchestration_peer.py` says what is measured of the peer.

A trace costs what "agentenv, with a trace" takes more than "agentenv". Without one the calls that would write it are
made all the same: those of a turn are timed by themselves, since they take far less than repeats differ in.
"""

import argparse
import asyncio
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentenv import AsyncEnv
from agentenv.conversation import Conversation
from agentenv.inference.passive_engine import PassiveEngine
from agentenv.inference.protocol import Generation, GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.report.bars import Bar, print_bars
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer
from agentenv.trace import NO_TRACE, ChromeTrace, NoTrace, slot_track

LIMIT_US = 250.0
"""Bar of the CPU time per environment step, in microseconds."""
TRACE_LIMIT_US, NO_TRACE_LIMIT_US = 25.0, 1.0
"""Bars of what a trace adds to it, written and not written."""
TIMEOUT_S = 600.0
ACTION = "look at that"
OBSERVATION = "Nothing."
PROMPT = "Begin."
TOKENIZER = ByteTokenizer()
TRACED = "agentenv, with a trace"
SMALLER = (1 / 64, 1 / 8)
"""Sizes that show how the cost grows, as shares of `--num_envs`."""
CONTEXTS = (4_000, 16_000)
"""Characters, and so tokens, of the longer first prompts."""


@dataclass(frozen=True)
class Load:
    """What is played."""

    num_envs: int
    turns: int
    """Of the shortest episodes; the longest have four more, so that they do not end all at once."""
    batches: int
    prompt: str = PROMPT

    def turns_of(self, seed: int) -> int:
        """Turns of the task."""
        return self.turns + seed % 5

    @property
    def context(self) -> int:
        """Tokens of a mean episode at its end."""
        talk = Conversation(TOKENIZER)
        talk.start([{"role": "user", "content": self.prompt}])
        ids = action_ids()
        for _ in range(self.turns + 2):
            talk.add_action(ids, [0.0] * len(ids), [0] * len(ids))
            talk.add_observation(OBSERVATION)
        return talk.num_tokens


@dataclass(frozen=True)
class Measurement:
    """One repeat of a row."""

    cpu_s: float
    wall_s: float
    steps: int
    setup_s: float = 0.0

    @property
    def step_us(self) -> float:
        """CPU microseconds per environment step."""
        return 1e6 * self.cpu_s / self.steps


class Counter:
    """Steps of all environments."""

    def __init__(self) -> None:
        self.steps = 0


class NullEnv(AsyncEnv):
    """Awaits once per call."""

    def __init__(self, load: Load, counter: Counter) -> None:
        self._load = load
        self._counter = counter
        self._left = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The seed chooses the number of turns."""
        await asyncio.sleep(0)
        self._left = self._load.turns_of(seed or 0)
        return self._load.prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Count."""
        await asyncio.sleep(0)
        self._counter.steps += 1
        self._left -= 1
        return OBSERVATION, 0.0, self._left == 0, False, {}


class NullEngine(PassiveEngine):
    """Awaits once per request and gives the same tokens."""

    def __init__(self) -> None:
        self._ids = action_ids()
        self._logprobs = [-1.0] * len(self._ids)

    async def generate(self, request: GenerationRequest) -> Generation:
        """The one reply."""
        await asyncio.sleep(0)
        return Generation(list(self._ids), list(self._logprobs), [self.version] * len(self._ids), "stop")


def action_ids() -> list[int]:
    """The reply's tokens, its end of turn included."""
    return [*TOKENIZER.encode(ACTION), int(TOKENIZER.eos_token_id or 0)]


def production(load: Load, *, traced: bool = False) -> Measurement:
    """The AsyncController plays, a trainer that does nothing takes the batches; `traced`: and a trace is written."""
    config = RolloutConfig(
        batch_size=load.num_envs,
        num_envs=load.num_envs,
        asynchrony=1.0,
        max_turns=load.turns + 5,
        max_tokens_per_turn=64,
        max_tokens_per_episode=load.context + 1_000,
        generate_timeout_s=TIMEOUT_S,
        step_timeout_s=TIMEOUT_S,
        reset_timeout_s=TIMEOUT_S,
    )
    counter = Counter()
    before = time.process_time()
    trace = ChromeTrace() if traced else NoTrace()
    controller = AsyncController(
        functools.partial(NullEnv, load, counter), LLMProxy([NullEngine()], trace=trace), TOKENIZER, config
    )
    setup_s = time.process_time() - before
    with tempfile.TemporaryDirectory() as folder, controller:
        trace.open(Path(folder) / "trace.json")
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(load.batches):
            batch = controller.get_batch(step)
            if len(batch) != load.num_envs or any(episode.failed for episode in batch):
                raise RuntimeError(f"batch {step} has {len(batch)} episodes, counts {controller.counts()}")
            controller.sync_weights({}, step + 1)
        cpu, wall, steps = time.process_time() - cpu, time.perf_counter() - wall, counter.steps
        trace.close()
    return Measurement(cpu, wall, steps, setup_s)


def no_trace_us() -> float:
    """The calls of a turn where nothing is written, and the least that they took."""
    track, number = slot_track("slot-0"), 100_000

    def turn() -> None:
        NO_TRACE.span(track, "generate", 0.0, 1.0, tokens=16)
        NO_TRACE.span(track, "step", 1.0, 2.0)

    return 1e6 * min(timeit.repeat(turn, number=number, repeat=5)) / number


def floor(load: Load, *, deadlines: bool, tokens: bool = False) -> Measurement:
    """One asyncio task per environment, and nothing around it."""
    counter = Counter()

    async def play(number: int) -> None:
        env, timeout_s = NullEnv(load, counter), TIMEOUT_S if deadlines else None
        for batch in range(load.batches):
            await episode(env, engine, number + batch, timeout_s, tokens)

    async def run() -> None:
        await asyncio.gather(*(play(number) for number in range(load.num_envs)))

    engine = NullEngine()
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(run())
    return Measurement(time.process_time() - cpu, time.perf_counter() - wall, counter.steps)


async def episode(env: NullEnv, engine: NullEngine, seed: int, timeout_s: float | None, tokens: bool) -> None:
    """The plain loop; with `tokens` it prompts the engine as the rollout does and keeps what it sampled."""
    talk = Conversation(TOKENIZER) if tokens else None
    request = GenerationRequest("plain", [])
    observation, _ = await within(timeout_s, env.reset(seed=seed))
    action, ended = ACTION, False
    while not ended:
        if talk is not None:
            if talk.messages:
                talk.add_observation(observation)
            else:
                talk.start([{"role": "user", "content": observation}])
            request = GenerationRequest("plain", talk.live_prompt_ids, SamplingParams(max_tokens=64))
        reply = await within(timeout_s, engine.generate(request))
        if talk is not None:
            action = talk.add_action(reply.token_ids, reply.logprobs, reply.policy_versions)
        observation, _, ended, _, _ = await within(timeout_s, env.step(action))


async def within(timeout_s: float | None, call: Any) -> Any:
    """Await with a deadline, or without."""
    if timeout_s is None:
        return await call
    async with asyncio.timeout(timeout_s):
        return await call


def peer(python: str, load: Load) -> tuple[str, Measurement | None]:
    """The peer's name and figures; without figures the name says why."""
    turns = [load.turns_of(number) for number in range(load.num_envs)]
    command = [python, str(Path(__file__).with_name("orchestration_peer.py")), "--turns", json.dumps(turns)]
    command += ["--action", ACTION, "--observation", OBSERVATION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        figures = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not installed: {error}", None
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"not installed: {last}", None
    return str(figures.pop("peer")), Measurement(**figures)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    load: Load
    measure: Callable[[Load], Measurement]


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Everything measured in this process; the first row is the figure."""
    main = Load(args.num_envs, args.turns, batches=2)
    small = [max(1, round(share * args.num_envs)) for share in SMALLER]
    # Small loads play more batches, so that a measurement does not end before it has begun.
    sizes = [Load(size, args.turns, batches=max(2, args.num_envs // size // 4)) for size in small]
    longer = [Load(small[-1], args.turns, batches=2, prompt="x" * length) for length in CONTEXTS]
    rows = [
        Row("agentenv", main, production),
        Row("asyncio, awaits only", main, functools.partial(floor, deadlines=False)),
        Row("asyncio, deadlines", main, functools.partial(floor, deadlines=True)),
        Row("asyncio, deadlines, tokens", main, functools.partial(floor, deadlines=True, tokens=True)),
        Row(TRACED, main, functools.partial(production, traced=True)),
    ]
    rows += [Row("agentenv", load, production) for load in sizes]
    rows += [Row("asyncio, deadlines", load, functools.partial(floor, deadlines=True)) for load in sizes]
    rows += [Row("agentenv, longer context", load, production) for load in longer]
    return rows


def summarise(name: str, load: Load, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Median and spread over the repeats."""
    figures = [measurement.step_us for measurement in measured]
    return {
        "name": name,
        "num_envs": load.num_envs,
        "context_tokens": load.context,
        "step_us": statistics.median(figures),
        "step_us_min": min(figures),
        "step_us_max": max(figures),
        "steps": measured[0].steps,
        "setup_us_per_env": 1e6 * statistics.median(m.setup_s for m in measured) / load.num_envs,
        "repeats": [asdict(measurement) for measurement in measured],
    }


def assumptions(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "event_loop": "asyncio's own",
        "repeats": args.repeats,
        "turns_per_episode": f"{args.turns} to {args.turns + 4}",
        "sampled_tokens_per_turn": len(action_ids()),
        "observation_tokens_per_turn": len(TOKENIZER.encode(OBSERVATION)),
        "asynchrony": 1.0,
        "batch_size": "num_envs",
        "gc_thresholds": gc.get_threshold(),
    }


def report(results: dict[str, Any]) -> bool:
    """Print the table, what is assumed, and the bar; whether it held."""
    rows = results["rows"]
    plain = next(row for row in rows if row["name"] == "asyncio, deadlines")["step_us"]
    print("CPU time per environment step, in microseconds: median of the repeats, least, greatest")
    print(f"{'':44} {'envs':>6} {'context':>8} {'median':>8} {'least':>8} {'greatest':>8} {'x floor':>8}")
    for row in rows:
        cells = [f"{row[key]:8.1f}" for key in ("step_us", "step_us_min", "step_us_max")]
        print(
            f"{row['name']:44} {row['num_envs']:6} {row['context_tokens']:8} {' '.join(cells)} "
            f"{row['step_us'] / plain:8.2f}"
        )
    if results["peer"]:
        print(f"{'peer':44} {results['peer']}")
    print(f"setup: {rows[0]['setup_us_per_env']:.0f} us per environment, once")
    print("x floor: over asyncio with deadlines at the most environments")
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in results["assumed"].items()))
    traced = next(row for row in rows if row["name"] == TRACED)["step_us"]
    bars = [
        Bar(f"agentenv at {rows[0]['num_envs']} environments", rows[0]["step_us"], "<=", LIMIT_US, "us"),
        Bar("a trace, more per step", traced - rows[0]["step_us"], "<=", TRACE_LIMIT_US, "us"),
        Bar("its calls where none is written", results["no_trace_us"], "<=", NO_TRACE_LIMIT_US, "us"),
    ]
    results["bars"] = [bar.as_dict() for bar in bars]
    return print_bars(bars)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_envs", type=int, default=4096, help="environments at once, at least 1")
    parser.add_argument("--turns", type=int, default=20, help="turns of the shortest episodes, at least 1")
    parser.add_argument("--repeats", type=int, default=3, help="of every row, at least 1")
    parser.add_argument("--peer_python", help="a Python in which the peer is installed")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    args = parser.parse_args(argv)
    for name in ("num_envs", "turns", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least 1")

    rows = rows_of(args)
    measured: list[list[Measurement]] = [[] for _ in rows]
    of_peer: list[Measurement] = []
    peer_name = "not installed (--peer_python)"
    for _ in range(args.repeats):
        for row, taken in zip(rows, measured, strict=True):
            gc.collect()
            taken.append(row.measure(row.load))
        if args.peer_python:
            peer_name, figures = peer(args.peer_python, rows[0].load)
            of_peer += [figures] if figures is not None else []
    summaries = [summarise(row.name, row.load, taken) for row, taken in zip(rows, measured, strict=True)]
    if of_peer:
        summaries.insert(4, summarise(peer_name, rows[0].load, of_peer))
    results = {
        "assumed": assumptions(args),
        "rows": summaries,
        "no_trace_us": no_trace_us(),
        "peer": None if of_peer else peer_name,
    }
    held = report(results)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
