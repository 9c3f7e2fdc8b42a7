"""What does an update cost where vLLM is sent the adapter alone, beside merged weights?

    python benchmarks/lora_sync.py --json lora_sync.json --check

A model with the layers of SmolLM2-135M and weights drawn at random, an adapter on all its linear layers, and a vLLM
server that is started here. In each round the server is given a new version in both ways, the adapter alone and merged
into whole weights, and samples the same requests after each. Told are the bytes that the server reads, the seconds of
an update (from writing to the comparison of the probe, which must hold) and the tokens per second of what is sampled
after it: vLLM adds the adapter to each layer's output, which merged weights need not. The two ways alternate within a
round, so that a machine that is busy with other work slows both. The bar is that of the bytes; times are told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine as engine_benchmark
import torch
from peft import LoraConfig

from agentenv.errors import AgentEnvError
from agentenv.inference import GenerationRequest, SamplingParams
from agentenv.inference.adapters import AdaptedWeights
from agentenv.inference.policy import load_policy
from agentenv.inference.vllm.opening import VLLMOptions, open_vllm
from agentenv.report.bars import Bar, print_bars
from agentenv_trainers.adapters import with_trial_adapter
from agentenv_trainers.policy_weights import full_weights

MOST_BYTES = 0.05
"""Of the merged weights' bytes, at the default rank."""
_LENGTH = 256
"""Tokens of the longest sequence."""


def next_version(model: Any, seed: int) -> AdaptedWeights:
    """The weights with the adapter's matrices drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    weights = full_weights(model)
    assert isinstance(weights, AdaptedWeights)
    return weights


async def sample(engine: Any, requests: int, tokens: int, round_: int) -> float:
    """Tokens per second of requests side by side."""
    started = time.perf_counter()
    generations = await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(
                    f"{engine.version}/{n}",
                    torch.randint(
                        0, 500, (32,), generator=torch.Generator().manual_seed(1000 * round_ + n)
                    ).tolist(),
                    SamplingParams(max_tokens=tokens),
                    seed=n,
                )
            )
            for n in range(requests)
        )
    )
    return sum(len(each.token_ids) for each in generations) / (time.perf_counter() - started)


async def measure(
    engines: dict[str, Any], folders: dict[str, Path], model: Any, base: Any, options: argparse.Namespace
) -> list[dict[str, dict[str, float]]]:
    """Figures of each way, by round."""
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for number in range(options.rounds + 1):
            weights, figures = next_version(model, number), {}
            for way in ("adapter", "merged") if number % 2 == 0 else ("merged", "adapter"):
                engine, started = engines[way], time.perf_counter()
                await engine.update_weights(weights, 2 * number + 1)
                update_s = time.perf_counter() - started
                figures[way] = {
                    "bytes": sum(p.stat().st_size for p in folders[way].rglob("*") if p.is_file()),
                    "update_s": update_s,
                    "tokens_per_s": await sample(engine, options.requests, options.tokens, number),
                }
                if way == "merged":
                    await engine.update_weights(base, 2 * number + 2)  # what the adapter belongs to
            if number == 0:
                continue  # vLLM compiles what it needs for adapters
            rounds.append(figures)
            told = [
                f"{way} {one['bytes'] / 1e6:.2f} MB, {one['update_s']:.2f} s, then {one['tokens_per_s']:.0f} tokens/s"
                for way, one in sorted(figures.items())
            ]
            print(f"round {number}: {'; '.join(told)}", flush=True)
    finally:
        await engines["merged"].close()
        await engines["adapter"].close()
    return rounds


def run(options: argparse.Namespace, parent: Path) -> list[dict[str, dict[str, float]]]:
    """Make the model, start the server, measure."""
    engine_benchmark.make_model(parent / "model")
    policy = load_policy(str(parent / "model"))
    policy.tokenizer.eos_token = None  # all turns have one length
    model = with_trial_adapter(
        policy.model, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    )
    trial, base = full_weights(model), policy.model.state_dict()
    engines: dict[str, Any] = {}
    folders = {way: parent / way for way in ("adapter", "merged")}
    for way, folder in folders.items():
        folder.mkdir()
        servers = VLLMOptions(
            urls=(engines["adapter"].name,) if engines else (),
            python=None if engines else options.vllm_python,
            transfer="filesystem",
            folder=str(folder),
            lora_sync=way,
        )
        sizes = {"max_batch": options.requests, "max_length": _LENGTH}
        (engines[way],) = open_vllm(policy, servers, **sizes, trial=trial, note=print)  # type: ignore[arg-type]
    return asyncio.run(measure(engines, folders, model, base, options))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, measure; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm_python", help="interpreter that has vLLM; unset: this one")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter, on all linear layers")
    parser.add_argument("--requests", type=int, default=4, help="side by side after each update")
    parser.add_argument("--tokens", type=int, default=8, help="of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--check", action="store_true", help="exit 1 where the figure misses its bar")
    options = parser.parse_args(argv)
    # In memory, as weights travel within a machine.
    with tempfile.TemporaryDirectory(prefix="agentenv-benchmark-", dir="/dev/shm") as folder:
        try:
            rounds = run(options, Path(folder))
        except AgentEnvError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    ratios = {
        name: statistics.median(each["adapter"][name] / each["merged"][name] for each in rounds)
        for name in ("bytes", "update_s", "tokens_per_s")
    }
    print(
        f"adapter over merged, medians: seconds of an update {ratios['update_s']:.2f}, tokens per second after it "
        f"{ratios['tokens_per_s']:.2f}; on {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    )
    bar = Bar(
        f"bytes of an update, adapter of rank {options.rank} over merged", ratios["bytes"], "<=", MOST_BYTES
    )
    held = print_bars([bar])
    if options.json:
        results = {"settings": vars(options), "rounds": rounds, "ratios": ratios, "bars": [bar.as_dict()]}
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if held or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
