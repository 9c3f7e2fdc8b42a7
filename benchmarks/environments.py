"""What do the environments cost, each beside the usual way, and how do oracle and random policy fare in them?

    python benchmarks/environments.py --json environments.json --check
    python benchmarks/environments.py --only shop baselines

- Each `benchmarks/environments_NAME.py` that is there runs in a process of its own, so that what it says of memory and
  time is of nothing else; it can be run by itself, with more options.
- baselines: oracle and random policy of each environment, through the rollout as `agentenv eval` plays them, on
  held-out tasks. What an environment needs and is not installed is said, and misses its bars.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv import cli, registration
from agentenv.report.bars import Bar, print_bars

FOLDER = Path(__file__).parent
BASELINES = "baselines"
SMOKE_EPISODES = 6


@dataclass(frozen=True)
class Played:
    """An environment whose baselines are measured, and what they must reach.

    Args:
        env: its id.
        episodes: held-out tasks.
        oracle: least success of the oracle.
        random: greatest success of the random policy.
        options: of the environment, as `agentenv eval --env-option` takes them.
    """

    env: str
    episodes: int
    oracle: float
    random: float
    options: Sequence[str] = field(default_factory=tuple)


PLAYED = (
    Played("KeyDoor-v0", 500, 1.0, 0.1),
    Played("GuessNumber-v0", 500, 1.0, 0.3),  # six guesses of 32 numbers: 1 - (31/32)^6 = 0.17
    Played("ToolArithmetic-v0", 500, 1.0, 0.1),
    Played("StyledReply-v0", 500, 1.0, 0.25),  # a price of three, in a style of three: 0.11
    Played("SWE-v0", 30, 1.0, 0.3, ("sandbox=local-unisolated",)),  # any of a few edits may be the right one
    Played("ALFWorld-v0", 60, 1.0, 0.1),
    Played("ShopSimulator-SingleTurn-v0", 500, 0.98, 0.1),
    Played("ShopSimulator-MultiTurn-v0", 500, 0.98, 0.1),
    Played("ShopSimulator-Persona-v0", 500, 0.98, 0.1),
    Played("Math-v0", 500, 1.0, 0.1),
    Played("MathPython-v0", 60, 1.0, 0.1, ("sandbox=local-unisolated",)),
)
"""SWE-v0 and MathPython-v0 run their own baselines' commands here, which need no isolation."""


def parts() -> list[str]:
    """Names of what can be measured."""
    found = sorted(path.stem.removeprefix("environments_") for path in FOLDER.glob("environments_*.py"))
    return [*found, BASELINES]


def run_part(name: str, *, smoke: bool) -> dict[str, Any]:
    """Run `environments_NAME.py`; its output goes to ours.

    Returns:
        What it wrote, with "bars"; where it failed "error" and a bar that is missed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(FOLDER / f"environments_{name}.py"), "--json", str(file)]
        done = subprocess.run([*command, *(["--smoke"] if smoke else [])], check=False)
        if done.returncode != 0 or not file.is_file():
            error = f"environments_{name}.py ended with exit code {done.returncode}"
            missed = Bar(f"{name}: figures", float("nan"), ">=", 0.0)
            return {"error": error, "bars": [missed.as_dict()]}
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return results


def play_baselines(played: Sequence[Played], *, smoke: bool) -> dict[str, Any]:
    """Play oracle and random policy; a line for each.

    Returns:
        "figures": reports by environment and policy, without the settings; "bars".
    """
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    known = {name.removeprefix("agentenv/") for name in registration.registered_ids()}
    for one in played:
        if one.env not in known:
            print(f"{one.env:<28} is not part of this version")
            continue
        episodes = min(one.episodes, SMOKE_EPISODES) if smoke else one.episodes
        for policy in ("oracle", "random"):
            report, error = evaluate(one, policy, episodes)
            figures.setdefault(one.env, {})[policy] = report or {"error": error}
            success = report.get("success")
            relation, limit = (">=", one.oracle) if policy == "oracle" else ("<=", one.random)
            if smoke and policy == "random":
                limit = 1.0  # so few episodes say nothing about it
            bars.append(
                Bar(
                    f"{one.env}: success of {policy}, {episodes} tasks",
                    float("nan") if success is None else success,
                    relation,  # type: ignore[arg-type]
                    limit,
                )
            )
            print(f"{one.env:<28} {policy:<7} {_line(report) if report else error}")
    return {"figures": figures, "bars": [bar.as_dict() for bar in bars]}


def evaluate(one: Played, policy: str, episodes: int) -> tuple[dict[str, Any], str]:
    """`agentenv eval`; the report without what it says of the command, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = ["eval", one.env, "--policy", policy, "--split", "heldout", "--episodes", str(episodes)]
        for option in one.options:
            command += ["--env-option", option]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([*command, "--json", str(file)])
        if code != 0:
            return {}, " ".join(err.getvalue().split())[-300:] or f"exit code {code}"
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {name: value for name, value in report.items() if name not in ("settings", "metrics")}, ""


def _line(report: dict[str, Any]) -> str:
    low, high = report["interval"]
    return f"success {report['success']:.3f} [{low:.3f}, {high:.3f}]  {report['steps']:5.1f} actions" + (
        f"  {report['failed']} failed" if report["failed"] else ""
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=parts(), help="these alone; by default all")
    parser.add_argument(
        "--smoke", action="store_true", help="a small size: whether it runs; costs have no bars"
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    results: dict[str, Any] = {
        "assumed": {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load before": round(os.getloadavg()[0], 2),
            "smoke": args.smoke,
        }
    }
    for name in args.only or parts():
        print(f"\n{name}", flush=True)
        began = time.monotonic()
        if name == BASELINES:
            results[name] = play_baselines(PLAYED, smoke=args.smoke)
        else:
            results[name] = run_part(name, smoke=args.smoke)
        results[name]["seconds"] = round(time.monotonic() - began, 1)
    print("\nall bars")
    held = print_bars(
        Bar(bar["name"], float(bar["value"]), bar["relation"], float(bar["limit"]), bar["unit"])
        for part in results.values()
        for bar in part.get("bars", ())
        if not args.smoke or "error" in part or part is results.get(BASELINES)  # a small size costs otherwise
    )
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in results["assumed"].items()))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if args.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
