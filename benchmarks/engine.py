"""What do rollouts cost beside the vLLM that they sample from?

    python benchmarks/engine.py --json engine.json --check
    python benchmarks/engine.py --url http://127.0.0.1:8000 --model DIR      a server that runs already

Episodes of an environment that takes no time are played with 64 slots through everything that training uses: the
episode managers, LLMProxy, the engine, and log-probs and versions of all tokens. Then a plain client sends the same
requests to the same server: the same prompts, the same lengths, each episode's turns one after another, 64 episodes
side by side, and only counts what comes back. The two alternate, in either order by turns, with an empty prefix cache
each time; the figure is the ratio of their throughputs within a round, so that a machine that is busy with other work
slows both. The bar is the median over the rounds.

The model is by default one with the layers of SmolLM2-135M and the embedded policy's small vocabulary, with weights
drawn at random: in earnest a token costs the server far more than it costs HTTP and the client, as it does here. With
`--model embedded`, half a million parameters, what is measured is mostly vLLM's own HTTP layer, which has more to write
for rollouts: they ask for token ids and log-probs, the plain client for text alone.

Beside it stands what either side costs in processor time, of this process and of the server that it started: tokens per
second of all of it. That figure does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agentenv
from agentenv.errors import AgentEnvError
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.inference.policy import load_policy
from agentenv.inference.vllm.json_http import JsonHttp
from agentenv.inference.vllm.opening import VLLMOptions, open_vllm
from agentenv.report.bars import Bar, print_bars
from agentenv.rollout import AsyncController, RolloutConfig

LEAST_RATIO = 0.9
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Of SmolLM2-135M, from its config.json."""
EMBEDDED = Path(__file__).resolve().parent.parent / "envs/agentenv_envs/swe/policy"


class Turns(agentenv.BaseEnv):
    """Answers every action with the same line, a number of times."""

    worker = "inline"

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = self._turns
        return f"Task {seed}: go on until the end.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return "ok, what next?", 0.0, self._left == 0, False, {}


class Recorded:
    """An engine's requests, kept by episode."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.requests: dict[str, list[tuple[list[int], int]]] = {}
        self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation: Generation = await self._engine.generate(request)
        asked = self.requests.setdefault(request.episode_id, [])
        asked.append((list(request.prompt_ids), len(generation.token_ids)))
        self.tokens += len(generation.token_ids)
        return generation


def make_model(folder: Path) -> None:
    """Write a model of SHAPE with the tokenizer of the embedded policy."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **SHAPE
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Meter:
    """Tokens per second of the clock, and of the processors' time that this process and its children took."""

    def __init__(self) -> None:
        self._clock, self._own, self._theirs = time.perf_counter(), time.process_time(), children_cpu_s()

    def read(self, tokens: int) -> dict[str, float]:
        """The figures since it was made."""
        client_s, server_s = time.process_time() - self._own, children_cpu_s() - self._theirs
        return {
            "tokens_per_s": tokens / (time.perf_counter() - self._clock),
            "tokens_per_cpu_s": tokens / (client_s + server_s),
            "client_cpu_s": client_s,
            "server_cpu_s": server_s,
        }


def children_cpu_s() -> float:
    """Processor time of all processes below this one."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields:
            parents[int(entry.name)], used[int(entry.name)] = (
                int(fields[1]),
                int(fields[11]) + int(fields[12]),
            )
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
        below |= more
    return sum(used[pid] for pid in below - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def play(controller: AsyncController, engine: Recorded, episodes: int, slots: int) -> dict[str, float]:
    """Episodes played as training plays them."""
    engine.requests.clear()
    engine.tokens = 0
    meter = Meter()
    trajectories = controller.evaluate(None, list(range(episodes)), num_envs=slots)
    figures = meter.read(engine.tokens)
    failed = [trajectory for trajectory in trajectories if trajectory.failed]
    if failed:
        raise SystemExit(f"{len(failed)} episodes failed: {failed[0].info.get('error')}")
    return figures


def send(
    url: str, model: str, episodes: Sequence[list[tuple[list[int], int]]], slots: int
) -> dict[str, float]:
    """The same requests, sent plainly."""

    async def all_of_them() -> dict[str, float]:
        http, waiting, tokens = JsonHttp(url), list(reversed(episodes)), 0

        async def slot() -> None:
            nonlocal tokens
            while waiting:
                for prompt, length in waiting.pop():
                    body = {
                        "model": model,
                        "prompt": prompt,
                        "max_tokens": length,
                        "temperature": 1.0,
                        "ignore_eos": True,
                    }
                    answer = (await http.post("/v1/completions", body, timeout_s=600.0)).json()
                    tokens += answer["usage"]["completion_tokens"]

        meter = Meter()
        await asyncio.gather(*(slot() for _ in range(slots)))
        figures = meter.read(tokens)
        await http.close()
        return figures

    return asyncio.run(all_of_them())


def empty_cache(url: str) -> None:
    """Forget the prompts of the side before."""

    async def ask() -> None:
        http = JsonHttp(url)
        await http.post("/reset_prefix_cache", timeout_s=60.0)
        await http.close()

    asyncio.run(ask())


def served_model(url: str) -> str:
    """Its name."""

    async def ask() -> str:
        http = JsonHttp(url)
        answer = await http.get("/v1/models", timeout_s=60.0)
        await http.close()
        return str(answer.json()["data"][0]["id"])

    return asyncio.run(ask())


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, make the model where it is to be made, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="embedded, a folder, or a name on the hub; unset: one made here")
    parser.add_argument("--url", help="of a vLLM server that serves it; unset: one is started")
    parser.add_argument("--vllm_python", help="interpreter that has vLLM; unset: this one")
    parser.add_argument("--slots", type=int, default=64, help="episodes side by side")
    parser.add_argument("--episodes", type=int, default=128, help="of a side, in each round")
    parser.add_argument("--turns", type=int, default=4, help="of an episode")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--check", action="store_true", help="exit 1 where the figure misses its bar")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="agentenv-benchmark-") as folder:
        if options.model is None:
            options.model = str(Path(folder) / "model")
            make_model(Path(options.model))
        elif options.model == "embedded":
            options.model = str(EMBEDDED)
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """All of it; returns the exit code."""
    policy = load_policy(options.model)
    policy.tokenizer.eos_token = None  # all turns have one length
    length = options.turns * (options.tokens + 40) + 80
    servers = VLLMOptions(urls=(options.url,) if options.url else (), python=options.vllm_python)
    try:
        (engine,) = open_vllm(policy, servers, max_batch=options.slots, max_length=length, note=print)
    except AgentEnvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    recorded = Recorded(engine)
    controller = AsyncController(
        lambda: Turns(options.turns),
        LLMProxy([recorded]),
        policy.tokenizer,
        RolloutConfig(
            batch_size=options.slots,
            num_envs=options.slots,
            max_turns=options.turns,
            max_tokens_per_turn=options.tokens,
            max_tokens_per_episode=length,
        ),
    )
    url = engine.name
    model, rounds = served_model(url), []
    try:
        play(
            controller, recorded, options.slots, options.slots
        )  # warms up, and gives the requests of the first round
        episodes = list(recorded.requests.values())
        for number in range(options.rounds):
            figures: dict[str, Any] = {}
            for side in ("rollouts", "raw") if number % 2 == 0 else ("raw", "rollouts"):
                empty_cache(url)
                if side == "rollouts":
                    figures[side] = play(controller, recorded, options.episodes, options.slots)
                    episodes = list(recorded.requests.values())
                else:
                    repeated = [episodes[n % len(episodes)] for n in range(options.episodes)]
                    figures[side] = send(url, model, repeated, options.slots)
            rollouts, raw = figures["rollouts"], figures["raw"]
            figures["ratio"] = rollouts["tokens_per_s"] / raw["tokens_per_s"]
            figures["cpu_ratio"] = rollouts["tokens_per_cpu_s"] / raw["tokens_per_cpu_s"]
            rounds.append(figures)
            print(
                f"round {number + 1}: rollouts {rollouts['tokens_per_s']:.0f} tokens/s, raw {raw['tokens_per_s']:.0f}, "
                f"ratio {figures['ratio']:.3f}; per second of processors {rollouts['tokens_per_cpu_s']:.0f} and "
                f"{raw['tokens_per_cpu_s']:.0f}, ratio {figures['cpu_ratio']:.3f}",
                flush=True,
            )
    finally:
        controller.stop()
    ratio = statistics.median(figures["ratio"] for figures in rounds)
    cpu_ratio = statistics.median(figures["cpu_ratio"] for figures in rounds)
    print(
        f"of processor time: {cpu_ratio:.3f} (median), on {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    )
    bar = Bar(
        f"rollouts through LLMProxy against raw vLLM at {options.slots} requests", ratio, ">=", LEAST_RATIO
    )
    held = print_bars([bar])
    if options.json:
        results = {
            "settings": vars(options),
            "machine": {"platform": platform.platform(), "python": platform.python_version()},
            "rounds": rounds,
            "cpu_ratio": cpu_ratio,
            "bars": [bar.as_dict()],
        }
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if held or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
