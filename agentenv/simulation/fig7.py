"""Figure 7 of ROLL Flash: queue scheduling against batch rollout, with dynamic filtering.

A step needs 8 prompts x 8 responses, and groups whose responses all pass or all fail are dropped. Batch rollout
(``mode`` batch) decodes a round of prompts to its last response, then computes the rewards, then filters, and plays
another round for what is missing. Queue scheduling (``mode`` sync) rewards each response as soon as it ends, drops or
keeps a group as soon as it is whole, starts the next prompt at once, and ends the step with the eighth kept group, with
up to 16 prompts more in flight than the step needs. Both are shown with and without the extra prompts, which save batch
rollout its further rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from agentenv.simulation.workload import Beta, LogNormal, Workload

PROMPTS, GROUP_SIZE, EXTRA, STEPS = 8, 8, 16, 16
ENGINES, MODEL, REWARD_S = 8, DecodeModel(base_s=0.011, knee=32), 3.0
WORKLOAD = Workload(
    tokens=LogNormal(1000.0, 0.6),
    difficulty=LogNormal(1.0, 0.5),
    most_tokens=8192,
    pass_rate=Beta(1.0, 1.0),
)
PAPER_S = {"batch": 125.0, "queue": 37.0}
ARMS = {
    "batch": ("batch rollout", "batch", 0),
    "batch_extra": ("batch rollout, 16 extra prompts", "batch", EXTRA),
    "queue_alone": ("queue scheduling, no extra prompts", "sync", 0),
    "queue": ("queue scheduling, 16 extra prompts", "sync", EXTRA),
}


def measure(case: str, seed: int, *, steps: int = STEPS) -> Measurement:
    """Mean seconds of a step, for each arm; how long the taken responses are, against all."""
    found: dict[str, float] = {}
    for arm, (_, mode, extra) in ARMS.items():
        config = rollout_config(
            batch_size=PROMPTS * GROUP_SIZE,
            group_size=GROUP_SIZE,
            num_envs=(PROMPTS + extra) * GROUP_SIZE,
            mode=mode,
            redundant_groups=extra,
            filter_zero_variance=True,
            num_reward_workers=(PROMPTS + extra) * GROUP_SIZE,
            num_steps=steps,
        )
        run = Run(config, WORKLOAD, engines=(MODEL,) * ENGINES, steps=steps, reward_s=REWARD_S)
        outcome = simulate(run, seed=seed, keep_batches=True)
        found[f"{arm}_s"] = sum(outcome.wait_s) / steps
        found[f"{arm}_tokens"] = _mean_tokens(outcome)
    return found


def summarise(results: Measurements) -> Summary:
    """Seconds a step beside the paper's, and how far each way prefers short responses."""
    (measurements,) = results.values()
    speed_up = ratio(measurements, "batch_s", "queue_s")
    rows: list[tuple[Cell, ...]] = []
    curves: dict[str, Any] = {}
    for arm, (title, _, _) in ARMS.items():
        seconds = Estimate.of(column(measurements, f"{arm}_s"))
        tokens = Estimate.of(column(measurements, f"{arm}_tokens"))
        gain = ratio(measurements, "batch_s", f"{arm}_s") if arm != "batch" else None
        rows.append((title, seconds, PAPER_S.get(arm), gain, tokens))
        curves[arm] = {"ours": seconds.as_dict(), "paper": PAPER_S.get(arm)}
    paper = PAPER_S["batch"] / PAPER_S["queue"]
    fair = ratio(measurements, "batch_extra_s", "queue_s")
    shorter = 1.0 - ratio(measurements, "queue_tokens", "batch_tokens").mean
    notes = [
        f"speed-up: ours {speed_up}, the paper's {paper:.1f}; over batch rollout with the extra prompts, too: {fair}",
        f"the price: with 16 extra prompts in flight the taken responses are {shorter:.0%} shorter than all (what was "
        "not taken comes again at the next steps, twice at most)",
    ]
    bars = [Bar("queue scheduling over batch rollout", speed_up.mean, ">=", 3.0, "x")]
    table = Table(("way", "ours, s a step", "paper, s", "speed-up", "tokens of a taken response"), rows)
    return Summary(table, bars, notes, curves)


def draw(summary: Summary, canvas: Any) -> None:
    """Seconds a step of each way."""
    from agentenv.simulation.plot import paired_bars

    named = {ARMS[arm][0].replace(", ", ",\n"): value for arm, value in summary.curves.items()}
    paired_bars(canvas.subplots(), named, y_label="seconds a step")


def _mean_tokens(outcome: Outcome) -> float:
    taken: Sequence[int] = [trajectory.info["tokens"] for batch in outcome.batches for trajectory in batch]
    return sum(taken) / len(taken)


FIGURE = Figure(
    name="fig7",
    title="queue scheduling against batch rollout under dynamic filtering (ROLL Flash, figure 7)",
    cases=("8 x 8, up to 16 extra prompts",),
    seeds=20,
    assumed={
        "batch": f"{PROMPTS} prompts x {GROUP_SIZE} responses, up to {EXTRA} extra prompts (stated)",
        "steps": f"{STEPS} a seed; the mean is over them",
        "response length": f"{WORKLOAD.tokens} tokens, times a factor of the prompt, {WORKLOAD.difficulty}, at most "
        f"{WORKLOAD.most_tokens:g}",
        "pass rate": f"{WORKLOAD.pass_rate} over the prompts: 22 % of the groups are dropped",
        "engines": f"{ENGINES}; {MODEL}",
        "reward": f"{REWARD_S:g} s a response, computed side by side",
    },
    measure=measure,
    summarise=summarise,
    draw=draw,
)
