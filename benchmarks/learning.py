"""Which method learns, and what staleness does to it: SAO, GRPO, GRPO + DIS, PPO and a running-mean baseline.

    python benchmarks/learning.py --json learning.json --check

All methods start from one warm-started policy, on KeyDoor-v0, and train on as many episodes; each has five seeds at
each staleness, which is exact: a batch is sampled with weights that are 0, 2 or 8 batches old. Besides: SAO with one
setting changed at a time, and a control whose rewards are shuffled among the episodes of a batch, which must not rise.
The policies that come out play held-out tasks, sampled at temperature 1.

Runs are processes of one thread, --workers side by side. Each that is finished is a file in --output_dir/runs and is
not run again: the same command goes on after an interruption. There, too: results.csv, curves.csv, learning.svg.

    python benchmarks/learning.py --tune

chooses the learning rates that stand in learning_methods.py, by seeds that are never reported.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import learning_methods as methods
import learning_report
from learning_pool import run_all
from learning_results import Results

from agentenv.errors import UsageError
from agentenv.report.bars import print_bars
from agentenv.report.progress import Progress

ROOT = Path(__file__).parent.parent
POLICY = ROOT / "envs" / "agentenv_envs" / "text" / "policy"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learning"), help="of runs and results")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, at least 1")
    parser.add_argument("--seeds", type=int, default=methods.SEEDS, help="per method, at least 1")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=list(methods.STALENESS), help="batches, at least 0"
    )
    parser.add_argument("--policy", type=Path, default=POLICY, help="folder of the policy to start from")
    parser.add_argument("--tune", action="store_true", help="choose learning rates instead")
    parser.add_argument("--smoke", action="store_true", help="tiny runs, two seeds, one staleness")
    parser.add_argument(
        "--docs", type=Path, help="page to put the tables into, with the figure in its images/"
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    for name, least in (("workers", 1), ("seeds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}, must be at least {least}")
    if min(args.staleness) < 0:
        parser.error(f"--staleness is {min(args.staleness)}, must be at least 0")
    if not (args.policy / "model.safetensors").exists():
        parser.error(f"--policy {args.policy} holds no model.safetensors")
    if args.docs is not None and learning_report.BEGIN not in args.docs.read_text(encoding="utf-8"):
        parser.error(f"--docs {args.docs} has no line {learning_report.BEGIN}")
    if args.smoke:
        args.seeds, args.staleness = min(args.seeds, 2), [1]
    args.staleness = sorted(set(args.staleness))
    return args


def tune(args: argparse.Namespace, sizes: methods.Sizes, policy: str) -> int:
    """Run what is missing of the tuning, print which learning rates are best."""
    wanted = methods.tuning(sizes, policy)
    with Progress() as progress:
        found = run_all(
            wanted,
            args.policy,
            args.output_dir / "tuning",
            workers=args.workers,
            progress=progress,
            title="tuning",
        )
    results = [found[run.name] for run in wanted if run.name in found]
    print(learning_report.tuning_table(results))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        scores = learning_report.tuning_scores(results)
        args.json.write_text(json.dumps(scores, indent=1) + "\n")
    return 1 if args.check and len(found) < len(wanted) else 0


def compare(args: argparse.Namespace, sizes: methods.Sizes, policy: str) -> int:
    """Run what is missing of the grid, write and print the results."""
    wanted = methods.grid(sizes, policy, seeds=args.seeds, staleness=args.staleness)
    with Progress() as progress:
        found = run_all(
            wanted,
            args.policy,
            args.output_dir / "runs",
            workers=args.workers,
            progress=progress,
            title="learning",
        )
    results = Results(
        found.values(),
        staleness=args.staleness,
        ablation_staleness=methods.ablation_staleness(args.staleness),
        wanted=len(wanted),
    )
    learning_report.write_csv(results, args.output_dir)
    learning_report.draw(results, args.output_dir / "learning.svg")
    text = learning_report.markdown(results, tuning_results(args.output_dir))
    print(text)
    if args.docs is not None:
        learning_report.write_docs(args.docs, text)
        learning_report.draw(results, args.docs.parent / "images" / "learning.svg")
    bars = results.bars()
    held = print_bars(bars)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "assumed": assumptions(args, sizes, policy),
            **results.as_dict(),
            "bars": [bar.as_dict() for bar in bars],
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if args.check and not held else 0


def tuning_results(output_dir: Path) -> list[dict[str, Any]]:
    """What --tune left there, if it did."""
    files = sorted((output_dir / "tuning").glob("*.json"))
    return [json.loads(file.read_text()) for file in files if not file.name.endswith(".failed.json")]


def assumptions(args: argparse.Namespace, sizes: methods.Sizes, policy: str) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "environment": methods.ENVIRONMENT,
        "policy": policy,
        "seeds": args.seeds,
        "sizes": vars(sizes),
        "learning_rates": methods.LEARNING_RATES,
        "critic_rate": methods.CRITIC_RATE,
        "workers": args.workers,
        "cpus": os.cpu_count(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the figures, print them against their bars."""
    args = parse(argv)
    sizes = methods.SMOKE if args.smoke else methods.Sizes()
    try:
        return (tune if args.tune else compare)(args, sizes, methods.fingerprint(args.policy))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the runs that are missing", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
