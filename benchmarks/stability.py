"""Does SAO stay stable? A thousand steps at staleness 4, with the numbers in which a collapse shows first.

    python benchmarks/stability.py --json stability.json --check

SAO trains the policy of the text environments on KeyDoor-v0, far beyond the point at which it solves most tasks, on
episodes of weights that are four batches old: what may go wrong in a long run has time to. Written to --output_dir:
diagnostics.csv, a row per step, and stability.svg. docs/metrics.md says what the numbers are; a public rebuild of SAO
saw its collapse in nothing but the length of responses.
"""

import argparse
import csv
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learning import POLICY
from learning_methods import Run, Sizes, fingerprint, make_run
from learning_report import smoothed

from agentenv.report.bars import Bar, print_bars
from agentenv.report.progress import Progress

STALENESS = 4
LEARNING_RATE = 1e-4
"""A third of what the learning benchmark takes for its 120 steps: at 3e-4 the same run collapses after step 700 (see
docs/learning.md). The share of masked tokens is then as small as in the paper, below 0.006."""
SIZES = Sizes(steps=1000, batch_size=16)
SMOKE = Sizes(steps=20, batch_size=4, critic_only_steps=2, evaluation_episodes=8)
TENTH = 10
"""Success of the last tenth of the steps is held against that of the second tenth."""
TOLERANCE = 0.02
"""Loss of success that may be chance: two standard errors of a difference of means over 1,600 episodes, at 0.9."""
ENTROPY_FLOOR = 0.02
"""Nats per token, mean of the last tenth. The token that ends a turn is certain; often the action is, too."""
LENGTH_FACTOR = 2.0
MASKED_SHARE = 0.05
MAY_BE_UNDEFINED = ("explained_variance",)
"""Not a number where all episodes of a batch had the same result."""
PANELS = (
    ("success",),
    ("entropy",),
    ("response_tokens",),
    ("masked_low", "masked_high"),
    ("explained_variance",),
    ("policy_grad_norm", "critic_grad_norm"),
)

Curves = Mapping[str, Sequence[float | None]]


def numbers(values: Sequence[float | None]) -> list[float]:
    """Those that are numbers."""
    return [value for value in values if value is not None]


def tenth(values: Sequence[float | None], number: int) -> float:
    """Mean of one tenth of the steps, counted from 0; -1 is the last."""
    size = max(1, len(values) // TENTH)
    start = number * size if number >= 0 else len(values) + number * size
    part = numbers(values[start : start + size])
    return statistics.fmean(part) if part else math.nan


def undefined(curves: Curves, critic_only_steps: int) -> int:
    """Numbers that are none, in steps that should have them."""
    return sum(
        value is None
        for name, values in curves.items()
        if name not in MAY_BE_UNDEFINED
        # While only the critic trains, there is nothing to say of the policy.
        for value in values[critic_only_steps:]
    )


def bars_of(curves: Curves, sizes: Sizes) -> list[Bar]:
    """What must hold."""
    success, length = curves["success"], curves["response_tokens"]
    first = statistics.fmean(numbers(length)[: max(1, len(length) // TENTH)])
    ratio = tenth(length, -1) / first
    return [
        Bar("steps", len(success), "==", sizes.steps),
        Bar("numbers that are none", undefined(curves, sizes.critic_only_steps), "==", 0),
        Bar("success, last tenth less second", tenth(success, -1) - tenth(success, 1), ">=", -TOLERANCE),
        Bar("entropy, last tenth", tenth(curves["entropy"], -1), ">=", ENTROPY_FLOOR, "nats"),
        Bar("response length, last tenth over first", ratio, "<=", LENGTH_FACTOR),
        Bar("response length, last tenth over first", ratio, ">=", 1.0 / LENGTH_FACTOR),
        Bar("masked share, mean", statistics.fmean(numbers(curves["masked_share"])), "<=", MASKED_SHARE),
        Bar("explained variance, mean", statistics.fmean(numbers(curves["explained_variance"])), ">=", 0.0),
    ]


def write_csv(curves: Curves, path: Path) -> None:
    """A row per step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        for step, row in enumerate(zip(*curves.values(), strict=True), start=1):
            writer.writerow([step, *row])


def draw(curves: Curves, path: Path) -> None:
    """The diagnostics over the steps, each as the mean of the last 20."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "stability"
    canvas = Figure(figsize=(12, 5.5), layout="constrained")
    for axis, names in zip(canvas.subplots(2, 3).flat, PANELS, strict=True):
        for name, colour in zip(names, ("#0b6bcb", "#c2410c"), strict=False):
            points = [(i, v) for i, v in enumerate(curves.get(name, ()), start=1) if v is not None]
            if points:
                steps, values = zip(*points, strict=True)
                axis.plot(steps, smoothed(values, 20), color=colour, lw=1.2, label=name)
        axis.set_title(", ".join(names), fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            axis.legend(frameon=False, fontsize=8)
    canvas.supxlabel("training step")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None})


def play(run: Run, policy: Path) -> dict[str, Any]:
    """The run, with its progress shown."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from learning_run import play as play_run

    with Progress() as progress:
        progress.stage("training", unit="step", total=run.sizes.steps)

        def show(step: int, logs: Mapping[str, float]) -> None:
            shown = {
                name: f"{logs[name]:.2f}" for name in ("success", "entropy") if logs.get(name) is not None
            }
            progress.update(step, shown)

        return play_run(run, policy, show)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, print the figures against their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/stability"), help="of the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=LEARNING_RATE, help="of the policy, above 0")
    parser.add_argument("--staleness", type=int, default=STALENESS, help="batches, at least 0")
    parser.add_argument("--policy", type=Path, default=POLICY, help="folder of the policy to start from")
    parser.add_argument("--smoke", action="store_true", help="20 steps")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    if not (args.policy / "model.safetensors").exists():
        parser.error(f"--policy {args.policy} holds no model.safetensors")

    if not args.learning_rate > 0.0:
        parser.error(f"--learning_rate is {args.learning_rate}, must be above 0")
    if args.staleness < 0:
        parser.error(f"--staleness is {args.staleness}, must be at least 0")
    sizes = SMOKE if args.smoke else SIZES
    run = make_run("sao", args.staleness, args.seed, sizes, fingerprint(args.policy), args.learning_rate)
    result = play(run, args.policy)
    curves = result["curves"]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_csv(curves, args.output_dir / "diagnostics.csv")
    draw(curves, args.output_dir / "stability.svg")
    print("mean of each tenth of the steps:")
    for name, values in curves.items():
        print(f"{name:20} " + " ".join(f"{tenth(values, number):8.3f}" for number in range(TENTH)))
    final = result["final"]
    print(
        f"held-out success: {final['success']:.3f} [{final['interval'][0]:.3f}, {final['interval'][1]:.3f}]"
    )
    print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in result["seconds"].items()))
    bars = bars_of(curves, sizes)
    held = print_bars(bars)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        tenths = {
            name: [None if math.isnan(mean) else mean for mean in (tenth(values, i) for i in range(TENTH))]
            for name, values in curves.items()
        }
        content = {
            "assumed": {**run.as_dict(), "cpus": os.cpu_count()},
            "final": final,
            "tenths": tenths,
            "seconds": result["seconds"],
            "bars": [bar.as_dict() for bar in bars],
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
