"""Figure 8 of ROLL Flash: prompt replication.

A batch of P prompts with n responses each. Without replication the n responses of a prompt are decoded by one engine,
as a request for n samples does; with it they are n requests, and each goes to the engine with the fewest. Engines slow
down with their load, so that it matters how evenly the work is spread while it gets less.
"""

from __future__ import annotations

from typing import Any

from agentenv.report.bars import Bar
from agentenv.simulation.engine import DecodeModel
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
from agentenv.simulation.workload import LogNormal, Workload

PAPER = {"32x16": 1.30, "64x16": 1.84, "16x32": 1.95}
ENGINES, MODEL = 32, DecodeModel(base_s=0.02, knee=8)
WORKLOAD = Workload(tokens=LogNormal(1500.0, 0.6), difficulty=LogNormal(1.0, 0.5), most_tokens=8192)


def measure(case: str, seed: int, *, engines: int = ENGINES) -> Measurement:
    """Seconds of a batch with and without replication."""
    prompts, responses = (int(number) for number in case.split("x"))
    seconds = {}
    for name, replication in (("together_s", False), ("replicated_s", True)):
        config = rollout_config(
            batch_size=prompts * responses,
            group_size=responses,
            num_envs=prompts * responses,
            mode="sync",
            prompt_replication=replication,
            num_steps=1,
        )
        seconds[name] = simulate(Run(config, WORKLOAD, engines=(MODEL,) * engines), seed=seed).total_s
    return seconds


def summarise(results: Measurements) -> Summary:
    """Speed-ups beside the paper's."""
    rows: list[tuple[Cell, ...]] = []
    curves: dict[str, Any] = {}
    speed_ups = {}
    for case, measurements in results.items():
        speed_up = speed_ups[case] = ratio(measurements, "together_s", "replicated_s")
        seconds = [Estimate.of(column(measurements, name)) for name in ("together_s", "replicated_s")]
        rows.append((case, *seconds, speed_up, PAPER[case]))
        curves[case] = {"ours": speed_up.as_dict(), "paper": PAPER[case]}
    bars = [Bar("prompt replication, 16x32", speed_ups["16x32"].mean, ">=", 1.8, "x")]
    table = Table(
        ("prompts x responses", "one engine a prompt, s", "replicated, s", "speed-up", "paper"), rows
    )
    return Summary(table, bars, curves=curves)


def draw(summary: Summary, canvas: Any) -> None:
    """Speed-ups beside the paper's."""
    from agentenv.simulation.plot import paired_bars

    paired_bars(canvas.subplots(), summary.curves, y_label="speed-up by prompt replication")


FIGURE = Figure(
    name="fig8",
    title="prompt replication (ROLL Flash, figure 8)",
    cases=tuple(PAPER),
    seeds=50,
    assumed={
        "engines": f"{ENGINES}; {MODEL}",
        "in flight": "the whole batch from the start",
        "response length": f"{WORKLOAD.tokens} tokens, times a factor of the prompt, {WORKLOAD.difficulty}, at most "
        f"{WORKLOAD.most_tokens:g}",
    },
    measure=measure,
    summarise=summarise,
    draw=draw,
)
