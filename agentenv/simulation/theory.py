"""Propositions 1 and 2 of ROLL Flash against simulated runs, and the optimum of the split of workers.

K workers, N samples a step, mean time mu of a sample, longest L, asynchrony alpha, E uses of a sample, training time
mu_t per sample and worker, a share beta of the workers for training:

* Proposition 1: Q samples take at most (Q / K) mu + L.
* Proposition 2, synchronous: a step takes at most a + b + L, with a = N mu / K and b = E N mu_t / K.
* Proposition 2, asynchronous: a step takes at most max(a / (1 - beta) + c, b / beta), with c = L / (alpha + 1).

The asynchronous bound is Proposition 1 for the samples in flight, of which the paper counts (1 + alpha) N at all times.
That is so where new samples may start as soon as a batch is taken. Where they have to wait for the next version (the
rule of :class:`~agentenv.rollout.SampleBuffer`, under which no sample is older than alpha when it is used), only
alpha N are in flight during training, and the same argument gives c = L / alpha. Both are checked. Under the stricter
rule the paper's c is no bound, though hardly ever exceeded; it is shown for comparison.

mu is an empirical mean: of the batch, or the largest one over as many consecutive batches as are in flight. A run of M
steps is held against M times the bound, and Proposition 1 for its first batch, during which there is nothing to train.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from agentenv.report.bars import Bar
from agentenv.simulation.experiment import Outcome, Run, rollout_config, simulate
from agentenv.simulation.figure import (
    Cell,
    Estimate,
    Figure,
    Measurement,
    Measurements,
    Summary,
    Table,
    column,
)
from agentenv.simulation.workload import Constant, Distribution, Gaussian, LogNormal, Workload

_ROUNDING = 1e-9
CHECKED = {
    "proposition_1": "Proposition 1: N and (1 + alpha) N samples on K workers",
    "proposition_2_sync": "Proposition 2, synchronous",
    "proposition_2_async": "Proposition 2, asynchronous, start at once, c = L / (alpha + 1)",
    "proposition_2_strict": "Proposition 2, asynchronous, start at the next version, c = L / alpha",
}
"""Bounds that must hold."""
UNPROVED = {"paper_bound_under_strict_rule": "(no bound) start at the next version, c = L / (alpha + 1)"}


def best_share(a: float, b: float, c: float) -> tuple[float, float]:
    """The share beta that minimises max(a / (1 - beta) + c, b / beta), and the minimum.

    The first term grows with beta and the second falls, so that they are equal at the optimum:
    c beta^2 - (a + b + c) beta + b = 0, of whose roots the smaller one lies in (0, 1).

    Args:
        a: N mu / K, in seconds; above 0.
        b: E N mu_t / K, in seconds; above 0.
        c: what the longest sample adds to a step, in seconds; 0 or more.

    Returns:
        beta, seconds a step.

    Raises:
        ValueError: a value is out of range.
    """
    if not (a > 0.0 and b > 0.0 and c >= 0.0):
        raise ValueError(f"best_share got a = {a}, b = {b}, c = {c}; a and b must be above 0, c at least 0")
    total = a + b + c
    root = math.sqrt(total * total - 4.0 * b * c)
    # The root (total - root) / (2 c) in the form that neither cancels nor divides by a c of 0.
    return 2.0 * b / (total + root), (total + root) / 2.0


def numeric_best_share(a: float, b: float, c: float) -> tuple[float, float]:
    """The same by bisection, without the closed form: where the two terms cross."""
    low, high = 0.0, 1.0
    for _ in range(200):
        beta = (low + high) / 2.0
        if beta in (low, high):
            break
        if a / (1.0 - beta) + c < b / beta:
            low = beta
        else:
            high = beta
    return low, min(max(a / (1.0 - beta) + c, b / beta) for beta in (low, high) if 0.0 < beta < 1.0)


def measure(case: str, seed: int) -> Measurement:
    """One random case: simulated time over each bound, and the distance of the two optima."""
    rng = random.Random(f"theory/{seed}")
    workers, batch = rng.randint(2, 16), rng.randint(2, 32)
    training = rng.randint(1, workers - 1)
    alpha, uses = rng.randint(1, 4), rng.randint(1, 3)
    step_s = _random_latency(rng)
    train_s = batch * rng.uniform(0.5, 20.0) / uses
    """E N mu_t: training time of a step on one worker."""
    workload, steps = Workload(step_s=step_s), rng.randint(6, 12)
    rollout = workers - training

    def run(
        num_envs: int, mode: str, *, train_s: float = 0.0, size: int = batch, steps: int = 1, **more: Any
    ) -> Outcome:
        config = rollout_config(
            batch_size=size, num_envs=num_envs, mode=mode, asynchrony=float(alpha), num_steps=steps
        )
        parts = Run(config, workload, steps=steps, train_s=train_s, **more)
        return simulate(parts, seed=seed, keep_batches=True)

    ratios = {}
    single = [(run(workers, "sync", size=size), size) for size in (batch, (1 + alpha) * batch)]
    ratios["proposition_1"] = max(
        outcome.total_s / first_bound(_seconds(outcome.batches[0]), workers) for outcome, _ in single
    )
    sync = run(workers, "sync", train_s=train_s / workers, steps=steps)
    bound = math.fsum(first_bound(_seconds(taken), workers) + train_s / workers for taken in sync.batches)
    ratios["proposition_2_sync"] = sync.total_s / bound
    loose = run(rollout, "async", train_s=train_s / training, steps=steps, counts_at_consumption=True)
    ratios["proposition_2_async"] = loose.total_s / async_bound(loose, rollout, train_s / training, alpha + 1)
    strict = run(rollout, "async", train_s=train_s / training, steps=steps)
    ratios["proposition_2_strict"] = strict.total_s / async_bound(strict, rollout, train_s / training, alpha)
    ratios["paper_bound_under_strict_rule"] = strict.total_s / async_bound(
        strict, rollout, train_s / training, alpha + 1
    )

    a, b, c = (10.0 ** rng.uniform(-1.0, 3.0) for _ in range(3))
    (share, seconds), (numeric_share, numeric_seconds) = best_share(a, b, c), numeric_best_share(a, b, c)
    ratios["share_distance"] = abs(share - numeric_share)
    ratios["seconds_distance"] = abs(seconds / numeric_seconds - 1.0)
    return ratios


def first_bound(seconds: Sequence[float], workers: int) -> float:
    """Proposition 1 for samples of these durations."""
    return math.fsum(seconds) / workers + max(seconds)


def async_bound(outcome: Outcome, workers: int, train_s: float, batches_in_flight: int) -> float:
    """Proposition 1 for the first batch and Proposition 2 for each step.

    Args:
        outcome: of an asynchronous run, with its batches.
        workers: that roll out.
        train_s: b / beta, of one step.
        batches_in_flight: the longest sample is spread over so many steps.
    """
    batches = [_seconds(taken) for taken in outcome.batches]
    sums = [math.fsum(seconds) for seconds in batches]
    longest = max(map(max, batches))
    width = min(batches_in_flight, len(sums))
    windows = [math.fsum(sums[first : first + width]) / width for first in range(len(sums) - width + 1)]
    step_s = max(max(windows) / workers + longest / batches_in_flight, train_s)
    return max(sums) / workers + longest + len(batches) * step_s


def summarise(results: Measurements) -> Summary:
    """Violations, and how near the simulated times come to the bounds."""
    (measurements,) = results.values()
    rows: list[tuple[Cell, ...]] = []
    bars: list[Bar] = []
    curves: dict[str, Any] = {}
    for name, title in (CHECKED | UNPROVED).items():
        ratios = column(measurements, name)
        violations = sum(ratio > 1.0 + _ROUNDING for ratio in ratios)
        rows.append((title, float(violations), f"{max(ratios):.4f}", Estimate.of(ratios)))
        if name in CHECKED:
            bars.append(Bar(f"{title}: violations in {len(ratios)} cases", violations, "==", 0))
            curves[name] = ratios
    for name, what in (("share_distance", "share"), ("seconds_distance", "time, relative")):
        worst = max(column(measurements, name))
        bars.append(Bar(f"optimal split, closed form against numeric: {what}", worst, "<=", 1e-6))
    table = Table(("bound", "violations", "worst time / bound", "mean time / bound"), rows)
    return Summary(table, bars, curves=curves)


def draw(summary: Summary, canvas: Any) -> None:
    """How near to its bound each case came."""
    axes = canvas.subplots()
    axes.hist(list(summary.curves.values()), bins=40, range=(0.0, 1.05), label=list(CHECKED.values()))
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_xlabel("simulated time / bound")
    axes.set_ylabel("cases")
    axes.legend(frameon=False, fontsize=8)


def _random_latency(rng: random.Random) -> Distribution:
    mean = rng.uniform(1.0, 20.0)
    kinds: list[Distribution] = [
        Constant(mean),
        Gaussian(mean, mean * rng.uniform(0.1, 1.0)),
        LogNormal(mean, rng.uniform(0.2, 1.5)),
    ]
    return rng.choice(kinds)


def _seconds(batch: Sequence[Any]) -> list[float]:
    return [trajectory.info["latency_s"] for trajectory in batch]


FIGURE = Figure(
    name="theory",
    title="Propositions 1 and 2 of ROLL Flash against simulated runs of random cases",
    cases=("random cases",),
    seeds=1000,
    assumed={
        "a case": "K in 2..16 workers, N in 2..32 samples, alpha in 1..4, 1..K-1 workers train, 6 to 12 steps",
        "sample": "one turn; constant, Gaussian or log-normal time, mean or median 1 to 20 s",
        "training": "0.5 to 20 s per sample and use on one worker, divided by the workers that train; E in 1..3",
        "mu": "of the batch; for the asynchronous bounds the largest over as many batches as are in flight",
        "optimum": "a, b, c log-uniform in 0.1..1000 s, one triple per case",
    },
    measure=measure,
    summarise=summarise,
    draw=draw,
)
