"""From finished runs of benchmarks/learning.py to intervals and bars.

Invariants:
- an interval is over seeds, 95 %, of Student's t; that of a difference is Welch's, as the runs are independent;
- a run that failed is in no mean, and the number of runs that are missing has a bar.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from learning_methods import ABLATIONS, ALL, METHODS

from agentenv.report.bars import Bar

LEVEL = 0.95
DRIFT = 0.03
"""Gain in success that the control may have had by chance."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval; without one for fewer than two runs."""

    mean: float
    low: float | None
    high: float | None
    values: list[float]

    def __str__(self) -> str:
        if not self.values:
            return "-"
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean with its t-interval; NaN of no values."""
    if not values:
        return Estimate(math.nan, None, None, [])
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, list(values))
    half = _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, list(values))


def difference(ones: Sequence[float], others: Sequence[float]) -> Estimate:
    """Difference of the means with Welch's interval; its values are those of the first less the others' mean."""
    mean = estimate(ones).mean - estimate(others).mean
    values = [one - estimate(others).mean for one in ones] if others else []
    if min(len(ones), len(others)) < 2:
        return Estimate(mean, None, None, values)
    one, other = (statistics.variance(v) / len(v) for v in (ones, others))
    if one + other == 0.0:
        return Estimate(mean, mean, mean, values)
    freedom = (one + other) ** 2 / (one**2 / (len(ones) - 1) + other**2 / (len(others) - 1))
    half = _quantile(freedom) * math.sqrt(one + other)
    return Estimate(mean, mean - half, mean + half, values)


def _quantile(freedom: float) -> float:
    from scipy import stats

    return float(stats.t.ppf((1.0 + LEVEL) / 2.0, freedom))


class Results:
    """Finished runs, asked for by method and staleness.

    Args:
        results: of the runs, the start's among them.
        staleness: that methods were run at.
        ablation_staleness: that ablations and control were run at.
        wanted: runs that there should be, the start's included.
    """

    def __init__(
        self, results: Iterable[Result], *, staleness: Sequence[int], ablation_staleness: int, wanted: int
    ) -> None:
        found = list(results)
        self.staleness, self.ablation_staleness = tuple(staleness), ablation_staleness
        self.missing = wanted - len(found)
        self.runs = [result for result in found if result["run"]["method"] != "start"]
        starts = [result for result in found if result["run"]["method"] == "start"]
        self.start: Result | None = starts[0]["final"] if starts else None

    def of(self, method: str, staleness: int) -> list[Result]:
        """The runs, in the order of their seeds."""
        chosen = [r for r in self.runs if (r["run"]["method"], r["run"]["staleness"]) == (method, staleness)]
        return sorted(chosen, key=lambda result: result["run"]["seed"])

    def final(self, method: str, staleness: int) -> list[float]:
        """Held-out success after training, by seed."""
        return [result["final"]["success"] for result in self.of(method, staleness)]

    def on_the_way(self, method: str, staleness: int) -> list[float]:
        """Success of the training episodes, mean over all steps, by seed."""
        return [statistics.fmean(result["curves"]["success"]) for result in self.of(method, staleness)]

    def control_gain(self) -> Estimate:
        """Held-out success after training on shuffled rewards, less that of the start."""
        before = self.start["success"] if self.start else math.nan
        return estimate([value - before for value in self.final("shuffled", self.ablation_staleness)])

    def lead(self, other: str, staleness: int) -> Estimate:
        """Final success of SAO less that of another method."""
        return difference(self.final("sao", staleness), self.final(other, staleness))

    def ablations(self) -> dict[str, Estimate]:
        """Final success at the ablations' staleness, by name; SAO first."""
        names = ["sao", "ppo", "running_mean", *ABLATIONS]
        return {name: estimate(self.final(name, self.ablation_staleness)) for name in names}

    def bars(self) -> list[Bar]:
        """What must hold."""
        control, last = self.control_gain(), max(self.staleness)
        low = control.mean if control.low is None else control.low
        return [
            Bar("runs that are missing", self.missing, "==", 0),
            Bar("gain with shuffled rewards, lower end of its interval", low, "<=", DRIFT),
            *(
                Bar(
                    f"final success, SAO less {ALL[other].label}, staleness {last}",
                    self.lead(other, last).mean,
                    ">=",
                    0.0,
                )
                for other in ("grpo_dis", "ppo")
            ),
        ]

    def as_dict(self) -> dict[str, Any]:
        """All figures for a JSON file."""
        return {
            "start": self.start,
            "final": {
                str(lag): {name: asdict(estimate(self.final(name, lag))) for name in METHODS}
                for lag in self.staleness
            },
            "on_the_way": {
                str(lag): {name: asdict(estimate(self.on_the_way(name, lag))) for name in METHODS}
                for lag in self.staleness
            },
            "sao_less": {
                str(lag): {name: asdict(self.lead(name, lag)) for name in METHODS if name != "sao"}
                for lag in self.staleness
            },
            "ablations": {name: asdict(value) for name, value in self.ablations().items()},
            "ablation_staleness": self.ablation_staleness,
            "control_gain": asdict(self.control_gain()),
            "runs": len(self.runs),
            "missing": self.missing,
            "cpu_hours": sum(result["seconds"]["cpu"] for result in self.runs) / 3600,
        }
