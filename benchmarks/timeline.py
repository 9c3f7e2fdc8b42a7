"""What asynchrony changes, seen in the traces of two real runs: alpha = 0 and alpha = 1, one below the other.

    python benchmarks/timeline.py --check --png docs/images/timeline.png --json timeline.json

`recipes/swe_sao.py --trace true`, the embedded policy in sandboxes, twice with the same seed and sizes; only
--asynchrony differs. The steps from --first to the last but one are looked at: in the first ones sandboxes are made
and the buffer is empty, and nothing is played beside the last. Policy, critic and engine share the machine's cores: how
much faster steps become depends on how many are free.

Judged is what the picture is about, and that the traces are right:

* with alpha = 0 no environment has an episode while the trainer trains, with alpha = 1 they have ("overlap": the share
  of the time in critic and policy updates in which at least one has);
* the trainer waits for a smaller share of the time with alpha = 1;
* each episode that came to nothing is in the trace once, as summary.json counts them;
* the picture is small enough for the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv.report.bars import Bar, print_bars
from agentenv.report.output_files import check_can_plot, save_plot
from agentenv.timeline import RecordedTrace, Window, find_trace, innermost, read_trace, shares, window_of
from agentenv.timeline.drawing import draw
from agentenv.timeline.shares import tracks_of

REPOSITORY = Path(__file__).resolve().parent.parent
ALPHAS = (0, 1)
SIZES = {
    "num_envs": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "value_pretrain_episodes": 0,
    "eval_episodes": 4,
}
LEAST_OVERLAP, MOST_WAITING, MOST_BYTES = 0.2, 0.6, 200_000
"""Bars: overlap with alpha = 1; its share of waiting over that with alpha = 0; size of the picture."""


def play(folder: Path, alpha: int, steps: int, sandbox: str) -> None:
    """Run the recipe, unless the folder holds a finished run."""
    if (folder / "summary.json").exists():
        return
    options = {**SIZES, "asynchrony": alpha, "max_steps": steps, "sandbox": sandbox, "output_dir": folder}
    command = [sys.executable, str(REPOSITORY / "recipes/swe_sao.py"), "--trace", "true"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def overlap(trace: RecordedTrace, window: Window) -> float:
    """Share of the time in critic and policy updates in which an environment has an episode."""
    changes: Counter[float] = Counter()
    for spans in tracks_of(trace, "environments").values():
        for segment in innermost("environments", spans, window):
            if segment.state != "idle":
                changes[segment.start_s] += 1
                changes[segment.end_s] -= 1
    (trainer,) = tracks_of(trace, "trainer").values()
    trained_s = overlapped_s = 0.0
    for segment in innermost("trainer", trainer, window):
        if segment.state not in ("critic update", "policy update"):
            continue
        trained_s += segment.end_s - segment.start_s
        moments = sorted({*(m for m in changes if segment.start_s < m < segment.end_s), segment.end_s})
        playing = sum(number for moment, number in changes.items() if moment <= segment.start_s)
        now = segment.start_s
        for moment in moments:
            overlapped_s += (moment - now) * (playing > 0)
            playing += changes[moment]
            now = moment
    return overlapped_s / trained_s if trained_s else 0.0


def untold(trace: RecordedTrace, discarded: dict[str, int]) -> int:
    """How many discarded episodes of training the trace lacks, or has too often."""
    told = Counter(
        str(instant.arguments["reason"])
        for instant in trace.instants
        if not str(instant.arguments["episode"]).startswith("eval")
    )
    return sum(abs(told[reason] - discarded.get(reason, 0)) for reason in {*told, *discarded})


def main(argv: Sequence[str] | None = None) -> int:
    """Run, draw, judge; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=Path, help="where the runs go, or are (default: a temporary folder)"
    )
    parser.add_argument("--max_steps", type=int, default=8, help="training steps of a run")
    parser.add_argument("--first", type=int, default=3, help="the first step that is looked at")
    parser.add_argument("--sandbox", default="auto", help="see the recipe")
    parser.add_argument("--png", type=Path, help="where the picture goes")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    if not 1 <= args.first < args.max_steps:
        parser.error(f"--first is {args.first}, must be at least 1 and below --max_steps, {args.max_steps}")
    check_can_plot("--png", args.png)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output_dir or Path(temporary)
        for alpha in ALPHAS:
            play(folder / f"alpha-{alpha}", alpha, args.max_steps, args.sandbox)
        results, bars = judge(folder, args.first, args.max_steps, args.png)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    held = print_bars(bars)
    return 1 if args.check and not held else 0


def judge(folder: Path, first: int, last: int, picture: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    """Figures and bars of the two runs of ``last`` steps below ``folder``; draws them."""
    traces = [read_trace(find_trace(folder / f"alpha-{alpha}")) for alpha in ALPHAS]
    windows = [window_of(trace, (first, last - 1)) for trace in traces]
    found = [shares(trace, window) for trace, window in zip(traces, windows, strict=True)]
    overlaps = [overlap(trace, window) for trace, window in zip(traces, windows, strict=True)]
    waiting = [share.states["trainer"]["waiting"] for share in found]
    wrong = sum(
        untold(trace, json.loads((trace.path.parent / "summary.json").read_text())["episodes"]["discarded"])
        for trace in traces
    )
    bars = [
        Bar("overlap of episodes with training, alpha = 0", overlaps[0], "<=", 0.001),
        Bar("overlap of episodes with training, alpha = 1", overlaps[1], ">=", LEAST_OVERLAP),
        Bar("share of waiting, alpha = 1 over alpha = 0", waiting[1] / waiting[0], "<=", MOST_WAITING),
        Bar("discarded episodes that a trace lacks or repeats", wrong, "==", 0),
    ]
    if picture is not None:
        save_plot(draw([f"alpha = {alpha}" for alpha in ALPHAS], traces, found), picture, dpi=110)
        bars.append(Bar("size of the picture", picture.stat().st_size, "<=", MOST_BYTES, "bytes"))
    assumed = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "sizes": SIZES,
        "first step": first,
        "recipe": "swe_sao, embedded policy",
    }
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in assumed.items()))
    for alpha, share, overlapping in zip(ALPHAS, found, overlaps, strict=True):
        states = {kind: {n: round(s, 3) for n, s in of.items() if s} for kind, of in share.states.items()}
        print(f"alpha = {alpha}: {share.window.seconds:.1f} s, overlap {overlapping:.2f}, shares {states}")
    results = {
        "assumed": assumed,
        "runs": {
            f"alpha-{alpha}": {**share.as_dict(), "overlap": overlapping}
            for alpha, share, overlapping in zip(ALPHAS, found, overlaps, strict=True)
        },
        "bars": [bar.as_dict() for bar in bars],
    }
    return results, bars


if __name__ == "__main__":
    sys.exit(main())
