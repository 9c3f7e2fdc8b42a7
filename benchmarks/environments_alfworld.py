"""How long do a step and a reset of ALFWorld take, beside the unchanged engine, and what do its baselines win?

    python benchmarks/environments_alfworld.py --json alfworld.json --check

Needs the extra `alfworld`. Synthetic games of full size, equally many of each family; `--data FOLDER` takes games in
the official layout instead. Both engines are in this process and take the same commands in turn, drawn from the
admissible ones; one command in ten is none of them. A figure is the median of processor time, which other work on the
machine changes little; the greatest is told, too.

- the usual way: alfworld's own stack (`PddlEnv`, `AlfredDemangler`, `AlfredInfos`), `load` and `reset` for an episode.
- prefetched: `ALFWorldEnv.prefetch` was called and has done its work; then `ALFWorldEnv.reset`.
- transcripts are compared word by word: texts, admissible commands and ends.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentenv.baselines import make_baseline
from agentenv.errors import UsageError
from agentenv.report.bars import Bar, conclude
from agentenv_envs.alfworld import ALFWorldEnv
from agentenv_envs.alfworld.engine import Engine
from agentenv_envs.alfworld.games import Game
from agentenv_envs.alfworld.generate import synthetic_game
from agentenv_envs.alfworld.household import FAMILIES

STEP_SHARE = 0.5
"""Bar of a step's time over that of the unchanged engine."""
RESET_MS = 50.0
"""Bar of the reset of a prefetched game."""
RANDOM_SUCCESS = 0.1
WRONG_COMMAND = "fly to the moon"
WRONG_SHARE = 0.1

_Result = TypeVar("_Result")


class Clock:
    """Processor times in milliseconds, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], _Result]) -> _Result:
        """What the call returns; its time is noted."""
        began = time.process_time()
        result = call()
        self.times.setdefault(name, []).append(1000 * (time.process_time() - began))
        return result

    def figures(self) -> dict[str, dict[str, float]]:
        """Median, greatest and number of each."""
        return {
            name: {
                "median_ms": round(statistics.median(times), 3),
                "greatest_ms": round(max(times), 3),
                "number": len(times),
            }
            for name, times in self.times.items()
        }


def make_env(data: Path | None, split: str) -> ALFWorldEnv:
    """On synthetic games, or on those of a folder."""
    return ALFWorldEnv() if data is None else ALFWorldEnv(data=str(data), split=split)


def choose_games(per_family: int, data: Path | None, split: str) -> list[Game]:
    """The games to compare the engines with."""
    if data is None:
        return [synthetic_game(seed, families=[family]) for family in FAMILIES for seed in range(per_family)]
    env = make_env(data, split)
    games = {game.task_id: game for game in map(env.games.game, range(per_family * len(FAMILIES)))}
    return list(games.values())


def compare(games: Sequence[Game], steps: int, clock: Clock) -> int:
    """Play both engines; the number of answers in which they differ."""
    usual, ours = Engine(fast=False), Engine()
    if not ours.is_fast:
        raise SystemExit(
            "the installed versions are not those that the fast engine knows: nothing to compare"
        )
    differing = 0
    for number, game in enumerate(games):
        rng = random.Random(number)
        one = clock.time("usual reset", lambda game=game: usual.begin(game))  # type: ignore[misc]
        other = clock.time("our reset, new game", lambda game=game: ours.begin(game))  # type: ignore[misc]
        differing += one != other
        for _ in range(steps):
            command = WRONG_COMMAND if rng.random() < WRONG_SHARE else rng.choice(one.commands)
            one = clock.time("usual step", lambda said=command: usual.command(said))  # type: ignore[misc]
            other = clock.time("our step", lambda said=command: ours.command(said))  # type: ignore[misc]
            differing += one != other
        clock.time("our reset, same game", lambda game=game: ours.begin(game))  # type: ignore[misc]
    return differing


def prefetched_resets(number: int, data: Path | None, split: str, clock: Clock) -> None:
    """Time resets of games that were prefetched."""
    first = 10_000  # not the games that were compared: those are known
    env = make_env(data, split)
    env.reset(seed=0)
    env.prefetch(range(first, first + number))
    for seed in range(first, first + number):
        env.wait_prefetched(seed)
    for seed in range(first, first + number):
        clock.time("our reset, prefetched", lambda seed=seed: env.reset(seed=seed))  # type: ignore[misc]
    env.close()


def success(policy: str, per_family: int) -> float:
    """Of a baseline on held-out synthetic games, equally many of each family."""
    won = 0.0
    for family in FAMILIES:
        env = ALFWorldEnv(split="heldout", families=[family])
        baseline = make_baseline(env, policy)
        for seed in range(per_family):
            observation, info = env.reset(seed=seed)
            baseline.begin(observation, info)
            done = False
            while not done:
                observation, reward, terminated, truncated, _ = env.step(baseline.act(observation))
                done = terminated or truncated
                won += reward
        env.close()
    return won / (per_family * len(FAMILIES))


def alfworld_figures(
    *, per_family: int, steps: int, episodes: int, data: Path | None = None, split: str = "valid_seen"
) -> dict[str, Any]:
    """All that is measured.

    Args:
        per_family: games of each family to compare the engines with, and to prefetch.
        steps: commands for each.
        episodes: games of each family for each baseline.
        data: games in the official layout, in place of synthetic ones for the comparison.
        split: of that folder.
    """
    clock = Clock()
    differing = compare(choose_games(per_family, data, split), steps, clock)
    prefetched_resets(per_family * len(FAMILIES), data, split, clock)
    return {
        "times": clock.figures(),
        "differing answers": differing,
        "success": {policy: success(policy, episodes) for policy in ("oracle", "random")},
    }


def alfworld_bars(figures: dict[str, Any]) -> list[Bar]:
    """The figures that have one."""
    times = figures["times"]
    return [
        Bar(
            "alfworld: answers that differ from the unchanged engine's", figures["differing answers"], "==", 0
        ),
        Bar(
            "alfworld: time of a step over the unchanged engine's",
            times["our step"]["median_ms"] / times["usual step"]["median_ms"],
            "<=",
            STEP_SHARE,
        ),
        Bar(
            "alfworld: reset of a prefetched game",
            times["our reset, prefetched"]["median_ms"],
            "<=",
            RESET_MS,
            "ms",
        ),
        Bar("alfworld: success of the oracle", figures["success"]["oracle"], "==", 1.0),
        Bar("alfworld: success of the random policy", figures["success"]["random"], "<=", RANDOM_SUCCESS),
    ]


def print_figures(figures: dict[str, Any]) -> None:
    """A line for each."""
    for name, row in figures["times"].items():
        print(
            f"{name:<24} median {row['median_ms']:8.2f} ms  greatest {row['greatest_ms']:8.2f} ms  of {row['number']:,}"
        )
    for policy, share in figures["success"].items():
        print(f"success of {policy:<13} {share:.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per_family", type=int, default=5, help="games of each family to compare with")
    parser.add_argument("--steps", type=int, default=20, help="commands for each")
    parser.add_argument("--episodes", type=int, default=10, help="games of each family for each baseline")
    parser.add_argument("--data", type=Path, help="games in the official layout, for the comparison")
    parser.add_argument("--split", default="valid_seen", help="of that folder (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a small size: whether it runs at all")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args(argv)
    if args.smoke:
        args.per_family, args.steps, args.episodes = 1, 3, 1
    sizes = {name: getattr(args, name) for name in ("per_family", "steps", "episodes")}
    for name, value in sizes.items():
        if value < 1:
            parser.error(f"--{name} is {value}, must be at least 1")
    load = os.getloadavg()[0]
    try:
        figures = alfworld_figures(**sizes, data=args.data, split=args.split)
    except UsageError as error:
        parser.error(str(error))
    assumed = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load before": round(load, 2),
        **sizes,
        "games": "synthetic" if args.data is None else "of a folder",
    }
    print_figures(figures)
    return conclude(
        alfworld_bars(figures), assumed=assumed, figures=figures, json_file=args.json, check=args.check
    )


if __name__ == "__main__":
    sys.exit(main())
