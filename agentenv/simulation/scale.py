"""How many environments one controller can serve, and what shards buy: measured costs, and the load that they make.

The controller's loop is single. What it spends on a turn, times the turns that so many environments take in a second,
is its load: the share of the time that the loop is busy. Three ways to share the work are measured:

* one loop: the controller plays all slots;
* shards that ask for turns: slots live in processes with loops of their own, as ``RolloutConfig.ray_shards`` makes
  them; the controller places each turn at an engine and takes finished trajectories;
* shards that deliver episodes: they ask the engines by themselves, too. The least that a controller can be left with.

Invariants:

* The virtual clock is in no cost: costs are CPU time of the loop, over the turns that were played in it.
* What the models of engine and environment cost is measured by itself and taken off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.bars import Bar
from agentenv.simulation import scale_runs, server_cost
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
from agentenv.simulation.scale_cases import (
    COLLECTING,
    EPISODES,
    EVERY_TOKEN,
    MODELS,
    ONE,
    SERVER,
    TURNS,
    cases,
    measure,
)
from agentenv.simulation.scale_load import (
    BUSY,
    CONTROLLER,
    SHARDS,
    TURN_S,
    Costs,
    load_table,
    saturation_table,
)
from agentenv.simulation.scale_runs import WORKLOAD

NUM_ENVS = 100_000
LEAST_ENVS = 500
LIMIT_S, LIMIT_KB = 600.0, 40.0
"""Bars: wall time of all of it at full size, and memory of the largest run, per environment."""
MOST_ERRORS = 5.0
"""Bar: standard errors between a failure rate and the stated one."""


def summarise(results: Measurements) -> Summary:
    """Costs of all runs, then loads and how many environments they allow."""
    by_kind: dict[str, dict[int, Sequence[Measurement]]] = {}
    for case, found in results.items():
        kind, _, size = case.partition(": ")
        by_kind.setdefault(kind, {})[int(size)] = found
    costs = _costs(by_kind)
    rows: list[tuple[Cell, ...]] = []
    for kind, of_kind in by_kind.items():
        for num_envs, found in sorted(of_kind.items()):
            cells = [
                Estimate.of(column(found, name)) if name in found[0] else None
                for name in ("turn_us", "cpu_s", "collecting_s", "wall_s", "grown_mb")
            ]
            rows.append((kind, None if kind == SERVER else float(num_envs), *cells))
    table = Table(
        (
            "what the loop does",
            "environments",
            "CPU of a turn, µs",
            "CPU, s",
            "of it collecting, s",
            "wall, s",
            "memory, MB",
        ),
        rows,
    )
    saturation = saturation_table(costs)
    notes = [
        *_account(by_kind[ONE]),
        _collections(by_kind[ONE + COLLECTING]),
        "",
        f"Load of the busiest loop, {TURN_S[1]:g} s a turn:",
        str(load_table(costs, TURN_S[1])),
        "",
        "Environments at which the busiest loop is 80 % busy:",
        str(saturation),
    ]
    largest = max(by_kind[ONE])
    curves = {
        "costs": costs.as_dict(),
        "loads": {f"{turn_s:g}": costs.loads(turn_s) for turn_s in TURN_S},
        "saturation": saturation.as_dicts(),
        "measured": [
            {
                "num_envs": num_envs,
                "turn_s": found[0]["turn_s"],
                "load": _busy(num_envs, found),
            }
            for num_envs, found in sorted(by_kind[ONE].items())
        ],
    }
    return Summary(table, _bars(results, by_kind[ONE][largest], largest), notes, curves)


def _costs(by_kind: Mapping[str, Mapping[int, Sequence[Measurement]]]) -> Costs:
    def mean(kind: str, name: str = "turn_us") -> dict[int, float]:
        return {size: Estimate.of(column(found, name)).mean for size, found in by_kind[kind].items()}

    (models,) = mean(MODELS).values()
    net = {}
    for kind, off in ((ONE, models), (TURNS, models), (EPISODES, 0.0)):
        few = mean(kind)
        ((size, every),) = mean(kind + EVERY_TOKEN).items()
        tokens = max(0.0, every - few[size])
        net[kind] = {size: max(0.0, cost - off) + tokens for size, cost in few.items()}
    (client,), (look,) = mean(SERVER).values(), mean(SERVER, "look_us").values()
    return Costs(net[ONE], net[TURNS], net[EPISODES], client_us=client, look_us=look, models_us=models)


def _account(runs: Mapping[int, Sequence[Measurement]]) -> list[str]:
    notes = []
    for num_envs, found in sorted(runs.items()):
        total = {name: sum(column(found, name)) for name in found[0]}
        notes.append(
            f"one loop, {num_envs:,} environments: busy for {_busy(num_envs, found):.1%} of the time, models included; "
            f"{total['episodes']:,.0f} episodes, {total['turns']:,.0f} turns; "
            f"{total['resets'] - total['episodes']:,.0f} resets failed and were tried again; ended without a sample: "
            f"{total['crashed']:,.0f} crashed, {total['hung']:,.0f} hung; {total['engine_crashes']:,.0f} engines "
            f"crashed, and {total['moved_turns']:,.0f} turns began again at others"
        )
    return notes


def _busy(num_envs: int, found: Sequence[Measurement]) -> float:
    turn_us, turn_s = (Estimate.of(column(found, name)).mean for name in ("turn_us", "turn_s"))
    return num_envs * turn_us / 1e6 / turn_s


def _collections(runs: Mapping[int, Sequence[Measurement]]) -> str:
    ((num_envs, found),) = runs.items()
    share = sum(column(found, "collecting_s")) / sum(column(found, "cpu_s"))
    return (
        f"Python's collector, {num_envs:,} environments: {share:.0%} of the CPU time, and the loop stands for up "
        f"to {max(column(found, 'longest_collection_s')):.2f} s"
    )


def _bars(results: Measurements, largest: Sequence[Measurement], num_envs: int) -> list[Bar]:
    bars = []
    seeds = len(largest)
    if num_envs >= NUM_ENVS:
        every = [found for of_case in results.values() for found in of_case]
        wall_s = max(column(every, "ended_s")) - min(column(every, "began_s"))
        bars.append(Bar("wall time of all runs, over the seeds", wall_s / seeds, "<=", LIMIT_S, "s"))
    kb = max(found["grown_mb"] * 1e3 / num_envs for found in largest)
    bars.append(Bar("memory of the largest run, per environment", kb, "<=", LIMIT_KB, "kB"))
    played = [found for case in results.values() for found in case if "missing" in found]
    missing = sum(column(played, "missing"))
    bars.append(Bar("episodes that did not end exactly once, all runs", missing, "==", 0.0))
    samples = sum(column(largest, "consumed")) / seeds
    bars.append(Bar("samples taken in the largest run", samples, "==", float(num_envs)))
    resets = sum(column(largest, "resets"))
    failures = {
        "bad resets": (resets - sum(column(largest, "episodes")), WORKLOAD.bad_reset_share),
        "crashes": (sum(column(largest, "crashed")), WORKLOAD.crash_share),
        "hangs": (sum(column(largest, "hung")), WORKLOAD.hang_share),
    }
    for name, (number, share) in failures.items():
        errors = abs(number - share * resets) / math.sqrt(resets * share * (1.0 - share))
        bars.append(Bar(f"{name}: standard errors from the stated share", errors, "<=", MOST_ERRORS))
    return bars


def draw(summary: Summary, canvas: Any) -> None:
    """Load over environments at one latency, and environments at 80 % over latencies."""
    left, right = canvas.subplots(1, 2)
    turn_s = TURN_S[1]
    for name, points in summary.curves["loads"][f"{turn_s:g}"].items():
        if not name.startswith(CONTROLLER):
            left.plot([point[0] for point in points], [point[1] for point in points], label=name)
    left.axhline(BUSY, linestyle="--", linewidth=1.0, color="grey")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="environments",
        ylabel="load of the busiest loop",
        ylim=(1e-3, 10.0),
    )
    left.set_title(f"{turn_s:g} s a turn", fontsize=9)
    left.legend(frameon=False, fontsize=7)
    for row in summary.curves["saturation"]:
        if not row["busiest loop"].startswith(CONTROLLER):
            right.plot(list(TURN_S), [row[f"{turn_s:g} s a turn"] for turn_s in TURN_S], marker="o")
    right.set(
        xscale="log", yscale="log", xlabel="seconds a turn", ylabel=f"environments at a load of {BUSY:g}"
    )
    right.set_xticks(list(TURN_S), [f"{turn_s:g}" for turn_s in TURN_S], minor=False)
    right.set_title("the same colours", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)


def sized(num_envs: int) -> Figure:
    """The figure with so many environments in its largest run.

    Raises:
        UsageError: not a multiple of 500 from 500 on.
    """
    if num_envs < LEAST_ENVS or num_envs % LEAST_ENVS:
        raise UsageError(
            f"--num_envs is {num_envs}, must be a multiple of {LEAST_ENVS}, at least {LEAST_ENVS}"
        )
    return Figure(
        name="scale",
        title="load of the single controller, and what shards buy",
        cases=cases(num_envs),
        seeds=1,
        assumed={
            "largest run": f"{num_envs:,} environments x {scale_runs.TURNS} turns, "
            f"{scale_runs.num_engines(num_envs):,} engines",
            "an episode": f"{WORKLOAD.turns} turns of {WORKLOAD.tokens} tokens, at most {WORKLOAD.most_tokens:g}, and "
            f"{WORKLOAD.step_s} s in the environment",
            "engines": f"one for {scale_runs.ENVS_PER_ENGINE} environments; {scale_runs.MODEL}",
            "failures": f"{WORKLOAD.bad_reset_share:.1%} of the resets raise, {WORKLOAD.crash_share:.1%} of the "
            f"episodes crash in a step, {WORKLOAD.hang_share:.1%} hang for {scale_runs.STEP_TIMEOUT_S:g} s; an engine "
            f"crashes every {scale_runs.ENGINE_MTBF_S / 3600:g} h and is away for "
            f"{scale_runs.ENGINE_AWAY_S:g} s; slots of shards don't fail",
            "batches": f"{scale_runs.STEPS}, all in flight from the start; training and weight updates take no time",
            "turns of the curves": f"{', '.join(f'{turn_s:g}' for turn_s in TURN_S)} s from one to the next",
            "shards": f"{', '.join(map(str, SHARDS))}, each with its share of the slots",
            "collector": "off, but where it is measured",
            "ids": "1 for 1,024 tokens; what it costs that every token is one is measured at the smallest size, and "
            "added",
            "a server's client": f"prompts of {server_cost.FIRST_PROMPT} tokens and {server_cost.REPLY} + "
            f"{server_cost.OBSERVATION} more a turn, over HTTP to this machine; each engine is looked at every "
            "second",
            "left out": "environments in threads, processes and actors, messages between shards and controller, "
            "tokenisation, the trainer's part of the process",
        },
        measure=measure,
        summarise=summarise,
        draw=draw,
        measures_cost=True,
        sized=sized,
    )


FIGURE = sized(NUM_ENVS)
