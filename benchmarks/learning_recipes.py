"""Do the recipes' embedded defaults learn? Held-out success before and after, seeds, and a control.

    python benchmarks/learning_recipes.py --json recipes.json --check
    python benchmarks/learning_recipes.py math_rlvr_grpo --seeds 1 --no-control --json rlvr.json

Runs `recipes/NAME.py` as it is, once per seed, and once more per seed (--control_seeds: of the first so many) with the
rewards of each batch dealt out among its episodes anew: nothing can be learned from those, so what still moves is
drift. A recipe evaluates itself on held-out tasks, at temperature 1, before and after training. Finished runs in
--work_dir are not run again, and an interrupted one goes on. --docs FILE writes the table between its marks there.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learning_swe import mean_interval

ROOT = Path(__file__).parent.parent
RECIPES = ("math_tir_sao", "math_rlvr_grpo", "alfworld_sao", "alfworld_grpo", "shop_sao")
BARS = {"gain": 0.1, "control": 0.05, "minutes": 15.0}
"""Least gain in held-out success of a seed, greatest mean gain of the control, longest run."""
BEGIN, END = "<!-- recipes: written by benchmarks/learning_recipes.py -->", "<!-- recipes end -->"


def train(recipe: str, seed: int, control: bool, work_dir: Path, extra: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of a run, from its directory if it has finished already."""
    run = work_dir / f"{recipe}-{'control-' * control}{seed}"
    summary = run / "summary.json"
    if not summary.exists() or json.loads(summary.read_text()).get("status") != "finished":
        command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), "--output_dir", str(run)]
        if (run / "run.json").exists():
            command += ["--resume", "true"]
        else:
            command += ["--seed", str(seed), *(["--control", "shuffled_rewards"] if control else []), *extra]
        subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Held-out success before and after and the difference, over seeds."""
    before = [run["before"]["success"] for run in runs]
    after = [run["after"]["success"] for run in runs]
    return {
        "before": mean_interval(before),
        "after": mean_interval(after),
        "gain": mean_interval([b - a for a, b in zip(before, after, strict=True)]),
        "episodes_each": runs[0]["before"]["episodes"],
        "minutes": [run["seconds"] / 60 for run in runs],
    }


def table(results: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "| recipe | held-out success before | after, each seed | gain | gain with shuffled rewards | minutes a run |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        runs, control = result["trained"], result.get("control")
        after = ", ".join(f"{value:.2f}" for value in runs["after"]["values"])
        cells = [f"`{name}`", f"{runs['before']['mean']:.2f}", after, _mean(runs["gain"])]
        cells += [_mean(control["gain"]) if control else "not measured"]
        cells += [f"{statistics.mean(runs['minutes']):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    each = {result["trained"]["episodes_each"] for result in results.values()}
    lines += ["", f"Held-out episodes of each evaluation: {', '.join(map(str, sorted(each)))}."]
    return "\n".join(lines)


def _mean(value: Mapping[str, Any]) -> str:
    interval = value["interval"]
    if interval is None:
        return f"{value['mean']:.2f} (one seed)"
    return f"{value['mean']:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def report(results: Mapping[str, Any]) -> bool:
    """Print each figure with its bar; whether all held."""
    held = True
    for name, result in results.items():
        runs = result["trained"]
        lines = [("least gain of a seed", min(runs["gain"]["values"]), ">=", BARS["gain"])]
        lines.append(("minutes of the longest run", max(runs["minutes"]), "<=", BARS["minutes"]))
        if "control" in result:
            control = result["control"]["gain"]["mean"]
            lines.append(("gain with shuffled rewards", control, "<=", BARS["control"]))
        for what, value, sign, bar in lines:
            held &= value >= bar if sign == ">=" else value <= bar
            print(f"{name:16} {what:30} {value:7.3f}  {sign} {bar}")
    print("every bar held" if held else "a bar was missed")
    return held


def write_docs(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put the results between their marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path} has no place for the results: the lines {begin} and {end}")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the figures, print them against their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; all by default"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--control_seeds", type=int, metavar="N", help="of the control; as many by default")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--docs", type=Path, help="file whose table is written")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/learning_recipes"))
    parser.add_argument(
        "--recipe_options", nargs=argparse.REMAINDER, default=[], help="passed on; comes last"
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.recipes) - set(RECIPES)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")

    results: dict[str, Any] = {}
    for name in args.recipes or RECIPES:
        results[name] = {}
        for kind in ("trained", "control") if args.control else ("trained",):
            runs = [
                train(name, seed, kind == "control", args.work_dir, args.recipe_options)
                for seed in range(args.seeds if kind == "trained" else args.control_seeds or args.seeds)
            ]
            results[name][kind] = compare(runs)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    assumed = {"recipe_options": args.recipe_options, "bars": BARS}
    args.json.write_text(json.dumps({"assumed": assumed, "recipes": results}, indent=1) + "\n")
    if args.docs is not None:
        write_docs(args.docs, table(results))
    held = report(results)
    return 0 if held or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
