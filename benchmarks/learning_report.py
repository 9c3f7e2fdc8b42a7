"""Results of benchmarks/learning.py for people: tables, CSV files, a figure, and their place in a page."""

import csv
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from learning_methods import ALL, METHODS, TUNING_RATES, TUNING_STALENESS
from learning_results import Result, Results, difference, estimate

WINDOW = 10
"""Training steps that a point of a curve is the mean of."""
BEGIN, END = "<!-- results: written by benchmarks/learning.py -->", "<!-- results end -->"
COLOURS = {
    "sao": "#0b6bcb",
    "sao_math": "#0e9aa7",
    "grpo": "#6b7280",
    "grpo_dis": "#c2410c",
    "ppo": "#15803d",
    "running_mean": "#7e22ce",
}


def markdown(results: Results, tuning: Sequence[Result] = ()) -> str:
    """The tables, for docs/learning.md and for a terminal."""
    lags = results.staleness
    heads = [f"staleness {lag}" for lag in lags]
    parts = []
    if results.start is not None:
        low, high = results.start["interval"]
        parts.append(
            f"The policy that all runs start from solves {results.start['success']:.3f} [{low:.3f}, {high:.3f}] of the "
            f"held-out tasks ({results.start['episodes']:,} episodes)."
        )
    parts.append("Held-out success after training:")
    parts.append(
        _table(
            ["method", *heads],
            [[ALL[n].label, *(str(estimate(results.final(n, lag))) for lag in lags)] for n in METHODS],
        )
    )
    parts.append("SAO less the other method:")
    others = [name for name in METHODS if name != "sao"]
    parts.append(
        _table(
            ["method", *heads],
            [[ALL[n].label, *(str(results.lead(n, lag)) for lag in lags)] for n in others],
        )
    )
    parts.append("Success of the training episodes, mean over the whole run (who learns sooner has more):")
    parts.append(
        _table(
            ["method", *heads],
            [[ALL[n].label, *(str(estimate(results.on_the_way(n, lag))) for lag in lags)] for n in METHODS],
        )
    )
    lag = results.ablation_staleness
    parts.append(f"SAO with one setting changed, staleness {lag}:")
    rows = []
    for name, value in results.ablations().items():
        base = "pool" if name == "running_mean_per_task" else "sao"
        less = difference(results.final(name, lag), results.final(base, lag))
        against = (
            ""
            if name == "sao"
            else f"{less}" + (f" (to SAO on the same {ALL[base].pool} tasks)" * (base == "pool"))
        )
        rows.append([ALL[name].label, str(value), against])
    parts.append(_table(["variant", "held-out success", "less SAO"], rows))
    parts.append(
        f"Control, SAO with shuffled rewards, staleness {lag}: gain in held-out success {results.control_gain()}."
    )
    if tuning:
        lags = " and ".join(str(lag) for lag in TUNING_STALENESS)
        parts.append(
            "Learning rates were chosen by runs with seeds of their own. Mean held-out success, and in brackets "
            f"that at a staleness of {lags}: a rate that is fine on fresh episodes may ruin a run on stale ones."
        )
        parts.append(tuning_table(tuning))
    if results.runs:
        parts.append(_effort(results))
    return "\n\n".join(parts)


def _effort(results: Results) -> str:
    runs, sizes = results.runs, results.runs[0]["run"]["sizes"]
    seconds = [result["seconds"]["total"] for result in runs]
    return (
        f"{len(runs)} runs of {sizes['steps']} steps of {sizes['batch_size']} episodes, "
        f"{sizes['evaluation_episodes']} held-out episodes after each; "
        f"{statistics.fmean(seconds):.0f} s a run, {sum(result['seconds']['cpu'] for result in runs) / 3600:.1f} "
        f"hours of one core in all."
    )


def tuning_scores(tuning: Sequence[Result]) -> dict[str, dict[float, dict[int, list[float]]]]:
    """Final success of the tuning runs by method, learning rate and staleness."""
    scores: dict[str, dict[float, dict[int, list[float]]]] = {}
    for result in tuning:
        run = result["run"]
        by_staleness = scores.setdefault(run["method"], {}).setdefault(run["learning_rate"], {})
        by_staleness.setdefault(run["staleness"], []).append(result["final"]["success"])
    return scores


def tuning_table(tuning: Sequence[Result]) -> str:
    """Mean of the tuning runs, the best of each method marked, and the means at each staleness."""
    scores = tuning_scores(tuning)
    rows = []
    for method in (name for name in METHODS if name in scores):
        found = scores[method]
        means = {
            rate: statistics.fmean(v for values in lags.values() for v in values)
            for rate, lags in found.items()
        }
        best = max(means, key=lambda rate: means[rate])
        cells = []
        for rate in TUNING_RATES:
            if rate not in means:
                cells.append("-")
                continue
            mean = f"**{means[rate]:.3f}**" if rate == best else f"{means[rate]:.3f}"
            parts = " / ".join(f"{statistics.fmean(found[rate][lag]):.3f}" for lag in sorted(found[rate]))
            cells.append(f"{mean} ({parts})")
        rows.append([ALL[method].label, *cells])
    return _table(["method", *(f"{rate:g}" for rate in TUNING_RATES)], rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_docs(page: Path, text: str) -> None:
    """Put the tables between the page's marks.

    Raises:
        ValueError: the page has no marks.
    """
    content = page.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(content):
        raise ValueError(f"{page} has no place for the results: {BEGIN} ... {END}")
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", content), encoding="utf-8")


def write_csv(results: Results, folder: Path) -> None:
    """results.csv, a row per run, and curves.csv, a row per training step of a run."""
    curves = sorted({name for result in results.runs for name in result["curves"]})
    seconds = sorted({name for result in results.runs for name in result["seconds"]})
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        heads = ["method", "staleness", "seed", "learning_rate", "success", "low", "high", "episodes"]
        writer.writerow([*heads, "training_success", *(f"{name}_s" for name in seconds)])
        for result in results.runs:
            run, final = result["run"], result["final"]
            keys = [run[name] for name in ("method", "staleness", "seed", "learning_rate")]
            writer.writerow(
                [*keys, final["success"], *final["interval"], final["episodes"]]
                + [round(statistics.fmean(result["curves"]["success"]), 6)]
                + [result["seconds"].get(name, "") for name in seconds]
            )
    with (folder / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "staleness", "seed", "step", *curves])
        for result in results.runs:
            run, values = result["run"], result["curves"]
            steps = len(values["success"])
            columns = [values.get(name, [None] * steps) for name in curves]
            for step in range(steps):
                writer.writerow(
                    [run["method"], run["staleness"], run["seed"], step + 1, *(c[step] for c in columns)]
                )


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of the last ``window`` values at each place, of fewer at the beginning."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def draw(results: Results, path: Path) -> None:
    """Curves per staleness, mean over seeds with their interval, and the ablations."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "learning"
    lags = results.staleness
    canvas = Figure(figsize=(4.2 * (len(lags) + 1) + 1.5, 3.8), layout="constrained")
    axes = canvas.subplots(1, len(lags) + 1, width_ratios=[1.0] * len(lags) + [0.9], squeeze=False)[0]
    for place, (axis, lag) in enumerate(zip(axes, lags, strict=False)):
        for name in METHODS:
            runs = [smoothed(result["curves"]["success"]) for result in results.of(name, lag)]
            points = [estimate(values) for values in zip(*runs, strict=True)]
            steps = range(1, len(points) + 1)
            axis.plot(steps, [p.mean for p in points], color=COLOURS[name], label=ALL[name].label, lw=1.6)
            if points and points[0].low is not None:
                low, high = [p.low for p in points], [p.high for p in points]
                axis.fill_between(steps, low, high, color=COLOURS[name], alpha=0.15, lw=0)
        axis.set(title=f"staleness {lag}", xlabel="training step", ylim=(0, 1))
        if place == 0:
            axis.set_ylabel(f"success of training episodes, {WINDOW} steps")
            axis.legend(frameon=False, loc="lower right", fontsize=8)
    found = {name: value for name, value in results.ablations().items() if value.values}
    if results.control_gain().values:
        found["shuffled"] = estimate(results.final("shuffled", results.ablation_staleness))
    last = axes[-1]
    for place, (name, value) in enumerate(found.items()):
        colour = COLOURS["sao"] if name == "sao" else "#374151"
        if value.low is not None and value.high is not None:
            last.plot([value.low, value.high], [place, place], color=colour, lw=2)
        last.plot([value.mean], [place], "o", color=colour, ms=5)
    last.set_yticks(range(len(found)), [ALL[name].label for name in found], fontsize=8)
    last.invert_yaxis()
    last.set(
        title=f"SAO changed, staleness {results.ablation_staleness}",
        xlabel="held-out success",
        xlim=(0, 1.02),
    )
    if results.start is not None:
        last.axvline(results.start["success"], color="#9ca3af", ls=":", lw=1)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None})
