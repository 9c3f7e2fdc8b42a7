"""Figure 9 of ROLL Flash: environments stepped as a batch against environments that go on one by one.

A batch of episodes of 22 turns. Stepped as a batch, every turn takes as long as its slowest environment; one by one,
the whole takes as long as the environment with the largest sum (the ideal). Both are the production classes, in
``mode`` batch and sync.
"""

from __future__ import annotations

from typing import Any

from agentenv.report.bars import Bar
from agentenv.simulation.experiment import Run, rollout_config, simulate
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
from agentenv.simulation.workload import Gaussian, Workload

BATCH_SIZE = 512
TURNS = 22
CELLS = {"N(10, 10)": (10.0, 10.0), "N(10, 7)": (10.0, 7.0), "N(10, 1)": (10.0, 1.0), "N(50, 5)": (50.0, 5.0)}
PAPER = {"N(10, 10)": 2.46, "N(10, 7)": 2.12, "N(10, 1)": 1.16, "N(50, 5)": 1.20}
IDEAL = {"N(10, 10)": 2.42, "N(10, 7)": 2.14, "N(10, 1)": 1.23, "N(50, 5)": 1.23}
"""Speed-up of the ideal schedule over barriers at each turn, by the latencies alone."""


def measure(case: str, seed: int, *, batch_size: int = BATCH_SIZE, turns: int = TURNS) -> Measurement:
    """Seconds of one batch: stepped as a batch, one by one, and ideally."""
    mean, sd = CELLS[case]
    workload = Workload(turns=turns, step_s=Gaussian(mean, sd))
    seconds: dict[str, float] = {}
    for mode in ("batch", "sync"):
        config = rollout_config(batch_size=batch_size, num_envs=batch_size, mode=mode, num_steps=1)
        outcome = simulate(Run(config, workload), seed=seed, keep_batches=True)
        seconds[mode] = outcome.total_s
        ideal_s = max(trajectory.info["latency_s"] for trajectory in outcome.batches[0])
    return {"batch_s": seconds["batch"], "async_s": seconds["sync"], "ideal_s": ideal_s}


def summarise(results: Measurements) -> Summary:
    """Speed-ups beside the paper's."""
    rows: list[tuple[Cell, ...]] = []
    bars: list[Bar] = []
    curves: dict[str, Any] = {}
    for case, measurements in results.items():
        speed_up = ratio(measurements, "batch_s", "async_s")
        worst = max(item["async_s"] / item["ideal_s"] for item in measurements)
        seconds = [Estimate.of(column(measurements, name)) for name in ("batch_s", "async_s", "ideal_s")]
        rows.append((case, *seconds, speed_up, PAPER[case]))
        bars.append(Bar(f"{case}: asynchronous over ideal time, worst seed", worst, "<=", 1.02))
        bars.append(
            Bar(
                f"{case}: speed-up's distance from {IDEAL[case]}",
                abs(speed_up.mean / IDEAL[case] - 1),
                "<=",
                0.03,
            )
        )
        curves[case] = {"ours": speed_up.as_dict(), "paper": PAPER[case]}
    table = Table(
        ("latency of a step, s", "batch-wise, s", "asynchronous, s", "ideal, s", "speed-up", "paper"), rows
    )
    return Summary(table, bars, curves=curves)


def draw(summary: Summary, canvas: Any) -> None:
    """Speed-ups as bars, ours beside the paper's."""
    from agentenv.simulation.plot import paired_bars

    paired_bars(canvas.subplots(), summary.curves, y_label="speed-up over batch-wise stepping")


FIGURE = Figure(
    name="fig9",
    title="environment-level asynchronous rollout against batch-wise stepping (ROLL Flash, figure 9)",
    cases=tuple(CELLS),
    seeds=50,
    assumed={
        "batch": f"{BATCH_SIZE} episodes, one environment each (stated)",
        "turns": f"{TURNS}, all of an episode (from the paper's 892 s against 362 s)",
        "decode time": "none",
        "latency": "drawn anew for each turn, values below 0 taken as 0",
    },
    measure=measure,
    summarise=summarise,
    draw=draw,
)
