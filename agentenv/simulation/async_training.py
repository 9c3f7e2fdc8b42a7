"""Figures 1 and 3 of ROLL Flash: synchronous training against asynchronous training, end to end.

The same workers roll out and train. Synchronous training uses all of them for the one and then for the other. With
asynchrony alpha a share of them trains while the others roll out. Two kinds of work: RLVR (one long reply a prompt) and
agents (five turns, and environments whose time has a long tail).

The share is a half; shares beside it are shown for RLVR, because which alpha is enough depends on it, and the paper's
closed form (:func:`agentenv.simulation.theory.best_share`) is held against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.report.bars import Bar
from agentenv.simulation.engine import DecodeModel
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
    ratio,
)
from agentenv.simulation.theory import best_share
from agentenv.simulation.workload import Constant, Gaussian, LogNormal, Workload

ALPHAS = (1, 2, 4, 8)
WORKERS, MODEL = 8, DecodeModel(base_s=0.02, knee=64)
BATCH_SIZE, GROUP_SIZE = 256, 8
TRACED_STEPS = 6
STEPS, WARM_UP = 14, 2
"""Steps of a run; the first ones, in which an asynchronous run fills its buffer, do not count."""


@dataclass(frozen=True)
class Kind:
    """One kind of work."""

    workload: Workload
    train_s: float
    """Training time of a step on one worker."""
    paper: float
    """The paper's best speed-up."""
    training: tuple[int, ...]
    """Workers that train in asynchronous runs; the first is the stated share."""


KINDS = {
    "RLVR": Kind(
        Workload(tokens=LogNormal(1500.0, 0.8), difficulty=LogNormal(1.0, 0.5), most_tokens=12288),
        train_s=480.0,
        paper=2.24,
        training=(4, 3, 5),
    ),
    "agents": Kind(
        Workload(
            turns=5, tokens=LogNormal(400.0, 0.6), step_s=Gaussian(20.0, 20.0), slow_share=0.05, slow_s=180.0
        ),
        train_s=900.0,
        paper=2.72,
        training=(4,),
    ),
}


def _reply(workload: Workload) -> str:
    factor = (
        ""
        if workload.difficulty == Constant(1.0)
        else f", times a factor of the prompt, {workload.difficulty}"
    )
    most = f", at most {workload.most_tokens:g}" if workload.most_tokens < math.inf else ""
    return f"{workload.turns} of {workload.tokens} tokens{factor}{most}"


CASES = {
    f"{name}, {training} of {WORKERS} train": (name, training)
    for name, kind in KINDS.items()
    for training in kind.training
}


def measure(case: str, seed: int, *, steps: int = STEPS) -> Measurement:
    """Seconds of a step, synchronous and with each alpha."""
    name, training = CASES[case]
    kind = KINDS[name]
    sync = _simulate("sync", 0, WORKERS, kind.workload, kind.train_s / WORKERS, seed, steps)
    seconds = [trajectory.duration_s for batch in sync.batches for trajectory in batch]
    found = {
        "sync_s": _step_s(sync),
        "episode_s": sum(seconds) / len(seconds),
        "longest_s": sum(max(item.duration_s for item in batch) for batch in sync.batches) / steps,
    }
    for alpha in ALPHAS:
        engines, train_s = WORKERS - training, kind.train_s / training
        found[f"alpha_{alpha}_s"] = _step_s(
            _simulate("async", alpha, engines, kind.workload, train_s, seed, steps)
        )
    return found


def summarise(results: Measurements) -> Summary:
    """Speed-ups over synchronous training, for each share."""
    rows: list[tuple[Cell, ...]] = []
    bars: list[Bar] = []
    notes: list[str] = []
    curves: dict[str, Any] = {}
    for case, measurements in results.items():
        name, training = CASES[case]
        kind = KINDS[name]
        speed_ups = {alpha: ratio(measurements, "sync_s", f"alpha_{alpha}_s") for alpha in ALPHAS}
        best = max(speed_ups.values(), key=lambda estimate: estimate.mean)
        is_stated = training == kind.training[0]
        sync = Estimate.of(column(measurements, "sync_s"))
        rows.append((case, sync, *speed_ups.values(), kind.paper if is_stated else None))
        curves[case] = {str(alpha): estimate.as_dict() for alpha, estimate in speed_ups.items()}
        if is_stated:
            bars.append(Bar(f"{case}: best alpha over synchronous", best.mean, ">=", 2.2, "x"))
            bars.append(Bar(f"{case}: alpha = 2 over the best", speed_ups[2].mean / best.mean, ">=", 0.95))
            shares = ", ".join(f"{_closed_form(kind, measurements, alpha):.2f}" for alpha in ALPHAS)
            named = ", ".join(str(alpha) for alpha in ALPHAS)
            notes.append(
                f"{name}: the closed form's share of workers that train, for alpha {named}: {shares}"
            )
    columns = ("work", "synchronous, s a step", *(f"alpha = {alpha}" for alpha in ALPHAS), "paper's best")
    return Summary(Table(columns, rows), bars, notes, curves)


def _closed_form(kind: Kind, measurements: Sequence[Measurement], alpha: int) -> float:
    """Share of Proposition 2, with a worker's 64 places for episodes as so many of the theory's workers."""
    episode_s, longest_s = (
        Estimate.of(column(measurements, name)).mean for name in ("episode_s", "longest_s")
    )
    a = BATCH_SIZE * episode_s / (WORKERS * MODEL.knee)
    return best_share(a, kind.train_s / WORKERS, longest_s / (alpha + 1))[0]


def draw(summary: Summary, canvas: Any) -> None:
    """Speed-up over alpha, for each share; the paper's best as lines."""
    axes = canvas.subplots()
    for case, points in summary.curves.items():
        axes.plot(list(points), [point["mean"] for point in points.values()], marker="o", label=case)
    for name, kind in KINDS.items():
        axes.axhline(kind.paper, linestyle="--", linewidth=1.0, color="grey")
        axes.annotate(f"ROLL Flash, up to ({name})", (0, kind.paper), fontsize=8, va="bottom")
    axes.set_xlabel("asynchrony alpha")
    axes.set_ylabel("speed-up over synchronous training")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _step_s(outcome: Outcome) -> float:
    counted = outcome.step_s[WARM_UP:]
    return sum(counted) / len(counted)


def _simulate(
    mode: str, alpha: int, engines: int, workload: Workload, train_s: float, seed: int, steps: int
) -> Outcome:
    run = _run(mode, alpha, engines, workload, train_s, steps)
    return simulate(run, seed=seed, keep_batches=mode == "sync")


def _run(mode: str, alpha: int, engines: int, workload: Workload, train_s: float, steps: int) -> Run:
    config = rollout_config(
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        num_envs=int(MODEL.knee) * engines,
        mode=mode,
        asynchrony=float(alpha),
        # Beyond the last step, too: a run that plays out its end would have less to do in its last steps.
        num_steps=steps + alpha,
    )
    return Run(config, workload, engines=(MODEL,) * engines, steps=steps, train_s=train_s)


def _traced_runs() -> dict[str, Run]:
    """Agents, synchronous and with the first alphas, the stated share of workers training."""
    kind = KINDS["agents"]
    training = kind.training[0]
    runs = {"sync": _run("sync", 0, WORKERS, kind.workload, kind.train_s / WORKERS, TRACED_STEPS)}
    for alpha in ALPHAS[:2]:
        runs[f"alpha-{alpha}"] = _run(
            "async", alpha, WORKERS - training, kind.workload, kind.train_s / training, TRACED_STEPS
        )
    return runs


FIGURE = Figure(
    name="async",
    title="asynchronous against synchronous training, end to end (ROLL Flash, figures 1 and 3)",
    cases=tuple(CASES),
    seeds=10,
    assumed={
        "batch": f"{BATCH_SIZE // GROUP_SIZE} prompts x {GROUP_SIZE}",
        "workers": f"{WORKERS}; synchronous: all roll out, then all train; asynchronous: a fixed share trains",
        "engine": f"one a worker; {MODEL}, {MODEL.knee:g} episodes at a time",
        **{f"{name}: reply": _reply(kind.workload) for name, kind in KINDS.items()},
        "agents: latency": f"{KINDS['agents'].workload.step_s} s a turn, cut at 0; "
        f"{KINDS['agents'].workload.slow_share:.0%} of the episodes {KINDS['agents'].workload.slow_s:g} s longer",
        **{f"{name}: training": f"{kind.train_s:g} s a step on one worker" for name, kind in KINDS.items()},
        "weight update": "takes no time",
        "counted": f"steps {WARM_UP + 1} to {STEPS}",
        "alpha": "age of a sample at its use, at most, in trained versions; alpha batches in flight during training",
    },
    measure=measure,
    summarise=summarise,
    draw=draw,
    runs=_traced_runs(),
)
