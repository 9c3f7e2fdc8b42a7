"""How long do the advantages of a large batch take, beside scipy's filter and beside loops over tokens?

    python benchmarks/gae.py --json gae.json --check

64 episodes of 32,768 tokens: several turns each, with observation tokens between the actions, and the same batch
without any observation, where all tokens take part. Values are float32, as a critic gives them; each episode has its
own length-adaptive lambda. All ways do the same job: they read the mask, cut the observations out, compute advantages
and returns in float64, and write both back to where the tokens stood.

- `scipy`: row by row with `scipy.signal.lfilter`, a compiled recursion on one core. "recursion alone" is only its
  filter, on numbers that are already cut out.
- `tensor loop`: one step of Python per position, tensor operations over all rows, as public trainers have it.
- `float loop`: one step of Python per token, on plain floats; measured on `--loop_rows` rows and scaled up by the
  number of action tokens.

The ways take turns; a figure is the median of the repeats, and the ratio to scipy the median of the ratios within a
turn. The loops, which take long, are measured once.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from scipy.signal import lfilter
from torch import Tensor

from agentenv.report.bars import Bar, conclude
from agentenv_trainers.objectives import length_adaptive_lambda, skip_observation_gae

LIMIT_MS = 100.0
"""Bar of the time for a batch."""
SCIPY_LIMIT = 5.0
"""Bar of the time over that of scipy's row by row."""
FLOAT_LOOP_LIMIT = 3.0
TENSOR_LOOP_LIMIT = 5.0
"""Bars of the time that loops take over ours."""
TOLERANCE = 1e-9
"""Bar of the greatest difference to scipy's result on float64 values, in units of reward."""
THREADS = 2
ALPHA = 1.5
GAMMA = 1.0
WARM_UP = 2
"""Rounds that are not counted."""

Estimate = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Batch:
    """[B, T] each, and [B] lambda."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    gae_lambda: Tensor

    def rows(self, count: int) -> "Batch":
        """The first rows."""
        return Batch(self.rewards[:count], self.values[:count], self.mask[:count], self.gae_lambda[:count])

    def double(self) -> "Batch":
        """The same numbers in float64."""
        return Batch(self.rewards.double(), self.values.double(), self.mask, self.gae_lambda)


def make_batch(rows: int, tokens: int, *, observations: bool, seed: int = 0) -> Batch:
    """Actions of 20 to 400 tokens and observations of 0 to 600 in turn; a reward of 0 or 1 on the last action token."""
    generator = np.random.default_rng(seed)
    mask = np.ones((rows, tokens), dtype=bool)
    for row in mask if observations else ():
        place = 0
        while place < tokens:
            place += int(generator.integers(20, 401))
            gap = int(generator.integers(0, 601))
            row[place : place + gap] = False
            place += gap
    values = torch.from_numpy(generator.normal(0.5, 0.3, (rows, tokens)).astype(np.float32))
    rewards = torch.zeros(rows, tokens)
    last = torch.tensor([int(row.nonzero()[0][-1]) for row in mask])
    rewards[torch.arange(rows), last] = torch.from_numpy(generator.integers(0, 2, rows).astype(np.float32))
    torch_mask = torch.from_numpy(mask)
    return Batch(rewards, values, torch_mask, length_adaptive_lambda(torch_mask.sum(dim=1), alpha=ALPHA))


def ours(batch: Batch) -> Estimate:
    """What is measured."""
    return skip_observation_gae(
        batch.rewards, batch.values, batch.mask, gamma=GAMMA, gae_lambda=batch.gae_lambda
    )


def by_scipy(batch: Batch) -> Estimate:
    """scipy's filter over each row's action tokens."""
    rewards, values, mask = batch.rewards.numpy(), batch.values.numpy(), batch.mask.numpy()
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for row, gae_lambda in enumerate(batch.gae_lambda.tolist()):
        kept = mask[row]  # indexing a row by it is several times faster than the array by row and mask
        dense = values[row][kept].astype(np.float64)
        deltas = rewards[row][kept].astype(np.float64)
        deltas -= dense
        deltas[:-1] += GAMMA * dense[1:]
        found = lfilter([1.0], [1.0, -GAMMA * gae_lambda], deltas[::-1])[::-1]
        advantages[row][kept] = found
        returns[row][kept] = found + dense
    return torch.from_numpy(advantages), torch.from_numpy(returns)


def by_tensor_loop(batch: Batch) -> Estimate:
    """One step per position, all rows at once; a row in an observation keeps what it has."""
    rewards, values, keep = batch.rewards.double(), batch.values.double(), batch.mask
    following, last = torch.zeros_like(batch.gae_lambda), torch.zeros_like(batch.gae_lambda)
    advantages, decay = [], GAMMA * batch.gae_lambda
    for place in range(values.size(1) - 1, -1, -1):
        here, value = keep[:, place], values[:, place]
        delta = rewards[:, place] + GAMMA * following - value
        last = torch.where(here, delta + decay * last, last)
        following = torch.where(here, value, following)
        advantages.append(last)
    result = torch.stack(advantages[::-1], dim=1)
    found = torch.where(keep, result, 0.0), torch.where(keep, result + values, 0.0)
    return found[0].to(batch.values.dtype), found[1].to(batch.values.dtype)


def by_float_loop(batch: Batch) -> Estimate:
    """One step per token, on plain floats."""
    advantages, returns = [], []
    columns = batch.rewards.tolist(), batch.values.tolist(), batch.mask.tolist(), batch.gae_lambda.tolist()
    for rewards, values, mask, gae_lambda in zip(*columns, strict=True):
        row_advantages, row_returns = [0.0] * len(values), [0.0] * len(values)
        following = last = 0.0
        for place in range(len(values) - 1, -1, -1):
            if mask[place]:
                value = values[place]
                last = rewards[place] + GAMMA * following - value + GAMMA * gae_lambda * last
                following = value
                row_advantages[place], row_returns[place] = last, last + value
        advantages.append(row_advantages)
        returns.append(row_returns)
    dtype = batch.values.dtype
    return torch.tensor(advantages, dtype=dtype), torch.tensor(returns, dtype=dtype)


def seconds(way: Callable[[Batch], Any], batch: Batch) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    way(batch)
    return time.perf_counter() - began


def greatest_difference(batch: Batch) -> float:
    """Of all ways to scipy's, in advantages and returns, on the same numbers in float64."""
    exact = batch.double()
    expected = by_scipy(exact)
    return max(
        float((found - wanted).abs().max())
        for way in (ours, by_tensor_loop, by_float_loop)
        for found, wanted in zip(way(exact), expected, strict=True)
    )


def measure(batch: Batch, *, repeats: int, loop_rows: int) -> dict[str, float]:
    """Times in milliseconds, and how many times ours fit in the others' or the others' in ours."""
    dense = [
        row[kept].astype(np.float64)
        for row, kept in zip(batch.values.numpy(), batch.mask.numpy(), strict=True)
    ]
    lambdas = batch.gae_lambda.tolist()

    def recursion(_: Batch) -> None:
        for row, gae_lambda in zip(dense, lambdas, strict=True):
            lfilter([1.0], [1.0, -GAMMA * gae_lambda], row)

    ways = {"ours": ours, "scipy": by_scipy, "recursion": recursion}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP + repeats):
        for name, way in ways.items():
            spent = seconds(way, batch)
            if turn >= WARM_UP:
                times[name].append(spent)
    few = batch.rows(loop_rows)
    scale = float(batch.mask.sum() / few.mask.sum())
    median = {f"{name}_ms": 1e3 * statistics.median(found) for name, found in times.items()}
    median["ours_least_ms"], median["ours_greatest_ms"] = 1e3 * min(times["ours"]), 1e3 * max(times["ours"])
    median["ours_over_scipy"] = statistics.median(
        mine / theirs for mine, theirs in zip(times["ours"], times["scipy"], strict=True)
    )
    median["tensor_loop_ms"] = 1e3 * seconds(by_tensor_loop, batch)
    median["float_loop_ms"] = 1e3 * scale * seconds(by_float_loop, few)
    median["tensor_loop_over_ours"] = median["tensor_loop_ms"] / median["ours_ms"]
    median["float_loop_over_ours"] = median["float_loop_ms"] / median["ours_ms"]
    return median


def bars_of(name: str, figures: dict[str, float]) -> list[Bar]:
    """The figures of one batch that are judged."""
    return [
        Bar(f"skip_observation_gae, {name}", figures["ours_ms"], "<=", LIMIT_MS, "ms"),
        Bar(f"over scipy's lfilter row by row, {name}", figures["ours_over_scipy"], "<=", SCIPY_LIMIT, "x"),
        Bar(f"float loop over it, {name}", figures["float_loop_over_ours"], ">=", FLOAT_LOOP_LIMIT, "x"),
        Bar(f"tensor loop over it, {name}", figures["tensor_loop_over_ours"], ">=", TENSOR_LOOP_LIMIT, "x"),
        Bar(f"greatest difference in float64, {name}", figures["difference"], "<=", TOLERANCE),
    ]


def show(name: str, figures: dict[str, float], loop_rows: int) -> None:
    """The table of one batch."""
    print(f"\n{name}, {100 * figures['action_share']:.1f} % of the tokens are actions")
    for label, key, remark in (
        (
            "skip_observation_gae",
            "ours_ms",
            "{ours_least_ms:.1f} to {ours_greatest_ms:.1f}".format_map(figures),
        ),
        ("scipy, row by row", "scipy_ms", "one core"),
        ("scipy, recursion alone", "recursion_ms", "one core; less than the job"),
        ("tensor loop", "tensor_loop_ms", "measured once"),
        ("float loop", "float_loop_ms", f"measured once, on {loop_rows} rows, and scaled up"),
    ):
        print(f"  {label:24} {figures[key]:10.1f} ms   {remark}")


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both batches; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write figures and bars to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--repeats", type=_at_least_one, default=20, help="turns that are counted")
    parser.add_argument("--rows", type=_at_least_one, default=64, help="episodes of the batch")
    parser.add_argument(
        "--tokens", type=_at_least_one, default=32_768, help="tokens of each, observations included"
    )
    parser.add_argument("--loop_rows", type=_at_least_one, default=4, help="rows that the float loop plays")
    options = parser.parse_args(argv)
    loop_rows = min(options.loop_rows, options.rows)
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        results: dict[str, dict[str, float]] = {}
        for name, observations in (("with observations", True), ("without observations", False)):
            batch = make_batch(options.rows, options.tokens, observations=observations)
            figures = measure(batch, repeats=options.repeats, loop_rows=loop_rows)
            figures["difference"] = greatest_difference(batch.rows(loop_rows))
            figures["action_share"] = float(batch.mask.double().mean())
            results[name] = figures
    finally:
        torch.set_num_threads(before)
    assumed = {
        "rows": options.rows,
        "tokens": options.tokens,
        "dtype": "float32 in and out, float64 within",
        "threads": THREADS,
        "gamma": GAMMA,
        "alpha": ALPHA,
        "repeats": options.repeats,
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name, figures in results.items():
        show(name, figures, loop_rows)
    print()
    bars = [bar for name, figures in results.items() for bar in bars_of(name, figures)]
    return conclude(bars, assumed=assumed, figures=results, json_file=options.json, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())
