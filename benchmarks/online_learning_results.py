"""From runs of recipes/online_learning.py to intervals, a table, a CSV file, a figure and bars.

Invariants:
- an interval is over seeds, 95 %, of Student's t; a difference is taken seed by seed, as both methods of a seed are
  asked the same questions;
- nothing is averaged across a change of the wanted style;
- runs of a method that differ in more than their seed are an error, not a mean.
"""

import csv
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learning_results import Estimate, estimate

from agentenv.errors import UsageError
from agentenv.report.bars import Bar
from agentenv.report.charts import Series, line_chart, smooth, standalone
from agentenv.report.run_directory import read_json, read_lines, write_text

METHODS = {"gae": "SAO", "running_mean": "mean of the last 128 rewards"}
"""The recipe's ``--advantage``, and what it is called."""
WINDOW = 9
"""Training steps that a point of the figure is the mean of."""
LAST_STEPS = 20
"""Steps at the end of a phase that show what was learned."""
REACHED = 0.8
"""Share of the level at the end of a phase that counts as having adapted."""
RECOVERY_WINDOW = 5
"""Steps whose mean reward must have come that far."""
LEARNED, BASELINE_LEARNED = 0.6, 0.5
"""Reward of the last steps of each phase, of SAO and of the running mean."""
BEGIN, END = "<!-- results: written by benchmarks/online_learning.py -->", "<!-- results end -->"
_OWN = ("seed", "output_dir", "resume")
"""Settings in which runs of a method differ."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    method: str
    seed: int
    settings: Mapping[str, Any]
    """What the recipe or its user set, without what every run has of its own."""
    curves: Mapping[str, Sequence[float]]
    """One number per training step: reward, quality, style_NAME, response_tokens."""
    seconds: float

    @property
    def phases(self) -> list[Sequence[float]]:
        """The rewards of each phase."""
        steps, rewards = self.settings["phase_steps"], self.curves["reward"]
        starts = [steps * number for number in range(len(self.settings["styles"]))]
        return [rewards[a:b] for a, b in zip(starts, [*starts[1:], len(rewards)], strict=True)]


def read_run(folder: Path) -> Result:
    """A finished run from its folder."""
    record, summary = read_json(folder / "run.json"), read_json(folder / "summary.json")
    lines = list(read_lines(folder / "metrics.jsonl"))
    styles = [f"style_{style}" for style in record["args"]["styles"]]
    names = ["reward", "quality", *styles, "response_tokens"]
    return Result(
        method=record["args"]["advantage"],
        seed=record["args"]["seed"],
        settings={name: value for name, value in record["args"].items() if name not in _OWN},
        curves={name: [line[name] for line in lines] for name in names},
        seconds=summary["seconds"],
    )


def recovery(rewards: Sequence[float]) -> int:
    """Steps of a phase until the reward has come near to what it is in the end.

    The first step at which the mean of the last RECOVERY_WINDOW rewards of the phase is REACHED times its final level
    (mean of the LAST_STEPS) or more. A phase in which nothing was ever rewarded counts with its whole length.
    """
    target = REACHED * statistics.fmean(rewards[-LAST_STEPS:])
    for step in range(min(RECOVERY_WINDOW, len(rewards)), len(rewards) + 1):
        level = statistics.fmean(rewards[max(0, step - RECOVERY_WINDOW) : step])
        if level > 0.0 and level >= target:
            return step
    return len(rewards)


@dataclass(frozen=True)
class Row:
    """A line of the table: a measure for each method, and their difference."""

    measure: str
    phase: str
    values: Mapping[str, Estimate]
    difference: Estimate
    """SAO less the running mean, paired by seed."""


class Results:
    """Finished runs of the experiment.

    Args:
        runs: of both methods.
        wanted: how many there should be.

    Raises:
        UsageError: runs of one method have different settings.
    """

    def __init__(self, runs: Sequence[Result], *, wanted: int) -> None:
        self.runs = sorted(runs, key=lambda run: (run.method, run.seed))
        self.missing = wanted - len(runs)
        for method in METHODS:
            first, *others = [run.settings for run in self.of(method)] or [{}]
            for other in others:
                different = sorted(k for k in {*first, *other} if first.get(k) != other.get(k))
                if different:
                    raise UsageError(
                        f"runs of {method} differ in {', '.join(different)}: give another --output_dir"
                    )
        settings = self.runs[0].settings if self.runs else {"styles": [], "phase_steps": 1}
        self.styles: list[str] = settings["styles"]
        self.phase_steps: int = settings["phase_steps"]

    def of(self, method: str) -> list[Result]:
        """The runs, in the order of their seeds."""
        return [run for run in self.runs if run.method == method]

    def rows(self) -> list[Row]:
        """The whole table."""
        found = []
        for number, style in enumerate(self.styles):
            found.append(
                self._row("mean reward", style, lambda run, n=number: statistics.fmean(run.phases[n]))
            )
        found.append(self._row("mean reward", "all", lambda run: statistics.fmean(run.curves["reward"])))
        for number, style in enumerate(self.styles):
            found.append(
                self._row(
                    f"reward, last {LAST_STEPS} steps",
                    style,
                    lambda run, n=number: statistics.fmean(run.phases[n][-LAST_STEPS:]),
                )
            )
        for number, style in enumerate(self.styles):
            found.append(
                self._row(
                    f"steps until {REACHED:g} of that", style, lambda run, n=number: recovery(run.phases[n])
                )
            )
        return found

    def row(self, measure: str, phase: str) -> Row:
        """One of them, by the start of its measure."""
        return next(row for row in self.rows() if row.measure.startswith(measure) and row.phase == phase)

    def _row(self, measure: str, phase: str, read: Any) -> Row:
        values = {method: {run.seed: float(read(run)) for run in self.of(method)} for method in METHODS}
        sao, baseline = values["gae"], values["running_mean"]
        return Row(
            measure,
            phase,
            {method: estimate(list(by_seed.values())) for method, by_seed in values.items()},
            estimate([sao[seed] - baseline[seed] for seed in sao if seed in baseline]),
        )

    def bars(self) -> list[Bar]:
        """What must hold, and what the paper says of the two methods."""
        bars = [Bar("runs that are missing", self.missing, "==", 0)]
        if not self.of("gae") or not self.of("running_mean"):
            return bars
        last = [self.row("reward, last", style) for style in self.styles]
        for method, least in (("gae", LEARNED), ("running_mean", BASELINE_LEARNED)):
            for row in last:
                name = f"{METHODS[method]}, {row.phase} wanted: {row.measure}"
                bars.append(Bar(name, row.values[method].mean, ">=", least))
        for number, style in enumerate(self.styles):
            lead = self.row("mean reward", style).difference
            said = f"SAO less running mean, {style} wanted: mean reward {shown(lead, '+.3f')}"
            bars.append(
                Bar(f"paper, baseline leads at first: {said}", lead.mean, "<=", 0.0)
                if number == 0
                else Bar(f"paper, SAO leads after a shift: {said}", lead.mean, ">=", 0.0)
            )
        return bars

    def as_dict(self) -> dict[str, Any]:
        """All figures for a JSON file."""
        return {
            "rows": [
                {
                    "measure": row.measure,
                    "phase": row.phase,
                    **{method: asdict(value) for method, value in row.values.items()},
                    "sao_less_running_mean": asdict(row.difference),
                }
                for row in self.rows()
            ],
            "settings": {method: dict(self.of(method)[0].settings) for method in METHODS if self.of(method)},
            "seconds": {
                method: [run.seconds for run in self.of(method)] for method in METHODS if self.of(method)
            },
            "missing": self.missing,
        }


def shown(value: Estimate, form: str) -> str:
    """A mean with its interval."""
    if not value.values:
        return "-"
    if value.low is None or value.high is None:
        return format(value.mean, form)
    return f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


def markdown(results: Results) -> str:
    """The table, for a page and for a terminal."""
    if not results.runs:
        return "no run is finished"
    heads = ["measure", "wanted", *METHODS.values(), "SAO less the running mean"]
    lines = [heads, ["---"] * len(heads)]
    for row in results.rows():
        form = ".1f" if row.measure.startswith("steps") else ".3f"
        values = [shown(row.values[method], form) for method in METHODS]
        lines.append([row.measure, row.phase, *values, shown(row.difference, f"+{form}")])
    counts = {method: len(results.of(method)) for method in METHODS}
    seconds = {method: [run.seconds for run in results.of(method)] for method in METHODS}
    effort = ", ".join(
        f"{METHODS[m]} {counts[m]} runs of {statistics.fmean(seconds[m]):.0f} s" for m in METHODS if counts[m]
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{effort}."


def tuning_table(runs: Sequence[Result]) -> str:
    """Mean reward of the tuning runs over all steps, mean of their seeds; the best of each method marked."""
    scores: dict[str, dict[tuple[float, float], list[float]]] = {}
    for run in runs:
        place = (run.settings["beta"], run.settings["learning_rate"])
        scores.setdefault(run.method, {}).setdefault(place, []).append(statistics.fmean(run.curves["reward"]))
    rates = sorted({rate for cells in scores.values() for _, rate in cells})
    lines = [["method", "beta", *(f"{rate:g}" for rate in rates)]]
    lines.append(["---"] * len(lines[0]))
    for method in (name for name in METHODS if name in scores):
        means = {place: statistics.fmean(values) for place, values in scores[method].items()}
        best = max(means, key=lambda place: means[place])
        for beta in sorted({beta for beta, _ in means}):
            cells = [f"{means[beta, rate]:.3f}" if (beta, rate) in means else "-" for rate in rates]
            marked = [f"**{c}**" if (beta, rate) == best else c for rate, c in zip(rates, cells, strict=True)]
            lines.append([METHODS[method], f"{beta:g}", *marked])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_docs(page: Path, table: str) -> None:
    """Put the table between the page's marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    content = page.read_text(encoding="utf-8")
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{table}\n\n{END}", content), encoding="utf-8")


def write_csv(results: Results, path: Path) -> None:
    """A row per training step of every run."""
    names = list(results.runs[0].curves) if results.runs else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "step", "wanted", *names])
        for run in results.runs:
            for step, values in enumerate(zip(*(run.curves[name] for name in names), strict=True)):
                wanted = results.styles[min(step // results.phase_steps, len(results.styles) - 1)]
                writer.writerow([run.method, run.seed, step + 1, wanted, *values])


def draw(results: Results, path: Path) -> None:
    """Reward against the training step: mean over seeds, and its interval."""
    series = []
    for method, label in METHODS.items():
        runs = [[y for phase in run.phases for y in smooth(phase, WINDOW)] for run in results.of(method)]
        points = [estimate([y for y in ys if y is not None]) for ys in zip(*runs, strict=True)]
        band = [(p.low, p.high) for p in points if p.low is not None and p.high is not None]
        series.append(Series(label, range(1, len(points) + 1), [p.mean for p in points], band))
    marks = [(number * results.phase_steps + 1, style) for number, style in enumerate(results.styles)]
    title = "Reward while what is wanted changes"
    chart = line_chart(
        series,
        x_label=f"training step; means of {WINDOW} steps",
        y_range=(0.0, 1.0),
        window=1,
        marks=marks,
        label=title,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, standalone(chart, title=title))
