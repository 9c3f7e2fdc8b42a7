"""Figure 10 of ROLL Flash: redundant environments against environments that fail slow.

Some of the episodes take minutes longer than the others. With more episodes than a batch needs, the batch is full when
enough of them have ended, and the rest are cancelled. The layouts are ``groups x members``. In the paper's form any 256
episodes make a batch (``partial_groups``); in the strict form a batch is of whole groups, as a group baseline needs
them: the first members of a group to end, of the first groups to be whole.

Whether more groups or larger groups help depends on what a batch is and on how failures correlate within a group, so
that layouts with one total are compared over that correlation.
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
)
from agentenv.simulation.workload import Gaussian, Workload

BATCH_SIZE, TURNS = 256, 4
SLOW_SHARE, SLOW_S = 0.18, 180.0
PAPER_S = {"32x8": 243.0, "36x9": 78.0, "36x11": 46.0, "36x12": 45.0}
EQUAL_TOTALS = ("54x8", "48x9", "36x12", "27x16")
"""432 episodes each."""
CORRELATIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SIZES = {"27x16": 16}
"""Members that make a group, where it isn't 8: 27 groups of 8 would be less than a batch."""


def case_name(layout: str, correlation: float) -> str:
    """How a case is called."""
    return f"{layout}, correlation {correlation:g}"


CASES = {case_name(layout, 0.0): (layout, 0.0) for layout in PAPER_S} | {
    case_name(layout, correlation): (layout, correlation)
    for correlation in CORRELATIONS
    for layout in EQUAL_TOTALS
}


def measure(case: str, seed: int, *, batch_size: int = BATCH_SIZE) -> Measurement:
    """Seconds until a batch is full, in both forms; a smaller batch scales the number of groups."""
    layout, correlation = CASES[case]
    groups, members = (int(number) for number in layout.split("x"))
    groups = groups * batch_size // BATCH_SIZE
    size = _SIZES.get(layout, 8)
    workload = Workload(
        turns=TURNS,
        step_s=Gaussian(10.0, 5.0),
        slow_share=SLOW_SHARE,
        slow_s=SLOW_S,
        slow_correlation=correlation,
    )
    seconds = {}
    for form, partial in (("any_s", True), ("whole_s", False)):
        config = rollout_config(
            batch_size=batch_size,
            group_size=size,
            num_envs=groups * members,
            mode="sync",
            redundant_groups=groups - batch_size // size,
            redundant_members=members - size,
            partial_groups=partial,
            num_steps=1,
        )
        seconds[form] = simulate(Run(config, workload), seed=seed).total_s
    return seconds


def summarise(results: Measurements) -> Summary:
    """Times and speed-ups beside the paper's, then the equal totals over the correlation."""
    rows: list[tuple[Cell, ...]] = []
    base = results[case_name("32x8", 0.0)]
    curves: dict[str, Any] = {"layouts": {}, "equal_totals": {}}
    for case, measurements in results.items():
        layout, correlation = CASES[case]
        whole, any_s = (Estimate.of(column(measurements, name)) for name in ("whole_s", "any_s"))
        speed_up = _mean_ratio(base, measurements)
        if correlation == 0.0 and layout in PAPER_S:
            paper_s = PAPER_S[layout]
            rows.append((case, any_s, speed_up, paper_s, PAPER_S["32x8"] / paper_s, whole))
            curves["layouts"][layout] = {"ours": any_s.as_dict(), "paper": paper_s}
        else:
            rows.append((case, any_s, speed_up, None, None, whole))
        if layout in EQUAL_TOTALS:
            found = {"correlation": correlation, "any": any_s.as_dict(), "whole": whole.as_dict()}
            curves["equal_totals"].setdefault(layout, []).append(found)
    best = _mean_ratio(base, results[case_name("36x12", 0.0)])
    table = Table(("layout", "any 256, s", "speed-up", "paper, s", "paper", "whole groups, s"), rows)
    bars = [Bar("36x12 over 32x8, any 256 episodes", best, ">=", 5.0, "x")]
    return Summary(table, bars, _notes(results), curves)


def _mean_ratio(base: Any, measurements: Any) -> float:
    """Ratio of the mean times: a step's time is a sum over many batches."""
    return Estimate.of(column(base, "any_s")).mean / Estimate.of(column(measurements, "any_s")).mean


def _notes(results: Measurements) -> list[str]:
    """Which of the layouts with 432 episodes is fastest, for each correlation and form."""
    means: dict[str, dict[float, dict[str, float]]] = {"whole_s": {}, "any_s": {}}
    for case, measurements in results.items():
        layout, correlation = CASES[case]
        if layout in EQUAL_TOTALS:
            for name, found in means.items():
                found.setdefault(correlation, {})[layout] = Estimate.of(column(measurements, name)).mean
    notes = []
    for correlation, times in means["whole_s"].items():
        order = sorted(times, key=lambda layout: times[layout])
        shown = ", ".join(f"{layout} {times[layout]:.0f} s" for layout in order)
        notes.append(f"432 episodes, whole groups, correlation {correlation:g}: {shown}")
    every = [mean for times in means["any_s"].values() for mean in times.values()]
    notes.append(
        f"432 episodes, any 256: {min(every):.1f} to {max(every):.1f} s in every layout and correlation"
    )
    return notes


def draw(summary: Summary, canvas: Any) -> None:
    """The paper's layouts, and equal totals over the correlation."""
    from agentenv.simulation.plot import paired_bars

    left, right = canvas.subplots(1, 2)
    paired_bars(left, summary.curves["layouts"], y_label="seconds a batch (any 256 episodes)")
    for layout, points in summary.curves["equal_totals"].items():
        xs = [point["correlation"] for point in points]
        right.plot(
            xs, [point["whole"]["mean"] for point in points], marker="o", label=f"{layout}, whole groups"
        )
    right.set_xlabel("correlation of failures within a group")
    right.set_ylabel("seconds a batch (whole groups)")
    right.set_ylim(bottom=0.0)
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)


FIGURE = Figure(
    name="fig10",
    title="redundant environments under fail-slow (ROLL Flash, figure 10)",
    cases=tuple(CASES),
    seeds=30,
    assumed={
        "batch": f"{BATCH_SIZE} episodes (stated)",
        "latency": "N(10, 5) s a turn, cut at 0 (stated)",
        "turns": f"{TURNS}",
        "fail-slow": f"{SLOW_SHARE:.0%} of the episodes take {SLOW_S:g} s longer, at one turn of theirs",
        "correlation": "of failing slow between members of a group; 0 in the rows with the paper's numbers",
        "a batch": "any 256 episodes that ended (the paper's numbers need that), or whole groups",
        "decode time": "none",
    },
    measure=measure,
    summarise=summarise,
    draw=draw,
)
