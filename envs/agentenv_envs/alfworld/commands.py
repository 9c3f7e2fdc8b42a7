"""Commands of the console script: `agentenv alfworld download|check|generate`.

Invariants:
- `download` changes nothing itself: it calls alfworld's own downloader and tells what came of it;
- `check` reads only; it exits with 1 where a game is damaged or, with `--play`, not won by its walkthrough.
"""

import argparse
import os
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any, Final

from agentenv.errors import UsageError

from .actions import command_of
from .engine import borrow_engine, require_engine, return_engine, rules
from .games import LAYOUT, Game, UnsolvableGameError, read_game, write_game
from .generate import SIZES, SPLITS, synthetic_game
from .household import FAMILIES
from .sources import FolderGames, find_games, official_root

__all__ = ["add_commands"]

_DOWNLOADER: Final = "alfworld-download"
_SHOWN: Final = 20
"""Damaged files that are named one by one."""


def add_commands(subparsers: Any) -> None:
    """Add `alfworld` and its commands.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    alfworld = subparsers.add_parser("alfworld")
    commands = alfworld.add_subparsers(title="commands", metavar="COMMAND", required=True)

    download = commands.add_parser("download", help="get the official games by alfworld's own downloader")
    download.add_argument(
        "--dir", type=Path, help="where to (default: $ALFWORLD_DATA, else ~/.cache/alfworld)"
    )
    download.add_argument("--force", action="store_true", help="load and unpack what is there already")
    download.set_defaults(run=_download)

    check = commands.add_parser("check", help="read all games of a folder and tell which are damaged")
    check.add_argument(
        "dir",
        type=Path,
        nargs="?",
        help="data, split or game folder, or one game's file (default: as for download)",
    )
    check.add_argument(
        "--play",
        type=int,
        default=0,
        metavar="N",
        help="begin N games of each split, too, and play their walkthroughs",
    )
    check.set_defaults(run=_check)

    generate = commands.add_parser("generate", help="write synthetic games in the official folder layout")
    generate.add_argument("dir", type=Path)
    generate.add_argument("--split", choices=SPLITS, default="train")
    generate.add_argument(
        "--games", type=int, default=60, metavar="N", help="how many (default: %(default)s)"
    )
    generate.add_argument(
        "--seed", type=int, default=0, help="of the first game; the others follow (default: 0)"
    )
    generate.add_argument("--size", choices=SIZES, default="full")
    generate.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    generate.set_defaults(run=_generate)


def _download(args: argparse.Namespace) -> int:
    folder = (args.dir or official_root()).expanduser().resolve()
    require_engine()
    program = shutil.which(_DOWNLOADER) or shutil.which(_DOWNLOADER, path=sysconfig.get_path("scripts"))
    if program is None:
        raise UsageError(
            f"alfworld's downloader, {_DOWNLOADER}, is neither in PATH nor in {sysconfig.get_path('scripts')}; "
            "install with pip install 'agentenv-rl[alfworld]'"
        )
    command = [program, "--data-dir", str(folder)]
    command += ["--force", "--force-download"] if args.force else []
    print(f"calling {' '.join(command)}", flush=True)
    done = subprocess.run(command, env={**os.environ, "ALFWORLD_DATA": str(folder)}, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"{_DOWNLOADER} ended with exit code {done.returncode}, its own message is above; the "
            "same command goes on from what it has loaded"
        )
    splits = _splits(folder)
    if not splits:
        raise UsageError(f"{_DOWNLOADER} ended without an error, but {folder / LAYOUT} has no games")
    for name, files in splits.items():
        print(f"{name}: {len(files)} games")
    print(
        f"they are in {folder}; use them with data={str(folder)!r}, or data='official' with ALFWORLD_DATA={folder}"
    )
    return 0


def _check(args: argparse.Namespace) -> int:
    folder = (args.dir or official_root()).expanduser()
    splits = _splits(folder)
    if not splits:
        raise UsageError(
            f"no games below {folder}; `agentenv alfworld download` gets the official ones, `agentenv alfworld "
            "generate DIR` writes synthetic ones"
        )
    wrong = 0
    for name, files in splits.items():
        print(f"{name}: {len(files)} games")
        wrong += _check_split(sorted(files), args.play)
    return 1 if wrong else 0


def _check_split(files: list[Path], play: int) -> int:
    """How many games are wrong."""
    families: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    damaged: list[str] = []
    for file in files:
        try:
            game = read_game(file)
        except UnsolvableGameError:
            counts["can't be won, by their own word"] += 1
        except UsageError as error:
            damaged.append(str(error).partition("; `agentenv")[0])
        else:
            families[game.task.family] += 1
            counts["synthetic"] += game.synthetic
            counts["without a walkthrough"] += game.walkthrough is None
    for family, count in sorted(families.items()):
        print(f"  {family}: {count}")
    for what, count in counts.items():
        if count:
            print(f"  {what}: {count}")
    for message in damaged[:_SHOWN]:
        print(f"  {message}")
    if len(damaged) > _SHOWN:
        print(f"  and {len(damaged) - _SHOWN} more damaged files")
    if play > 0 and len(damaged) < len(files):
        damaged += _play(files, play)
    return len(damaged)


def _play(files: list[Path], count: int) -> list[str]:
    """Games that the engine refuses, and those whose walkthroughs don't win."""
    lost: list[str] = []
    games = FolderGames(files, None)
    played = won = 0
    for number in range(min(count, len(games))):
        try:
            game = games.game(number)
        except UsageError:  # counted already
            continue
        problem = _lost(game)
        if problem:
            lost.append(problem)
            print(f"  {problem}")
        played += game.walkthrough is not None
        won += game.walkthrough is not None and not problem
    print(f"  won by their walkthroughs: {won} of {played} played")
    return lost


def _lost(game: Game) -> str:
    """Why the game doesn't begin, or its walkthrough doesn't win it; empty where all is well."""
    engine = borrow_engine()
    try:
        state = engine.begin(game)
        if game.walkthrough is None:
            return ""
        for said in game.walkthrough:
            command = command_of(said) or ""
            if command not in state.commands:
                return f"{game.task_id}: command {said!r} of its walkthrough is not admissible"
            state = engine.command(command)
        return "" if state.won else f"{game.task_id}: its walkthrough does not win"
    except UsageError as error:
        return str(error).partition("; `agentenv")[0]
    finally:
        return_engine(engine)


def _generate(args: argparse.Namespace) -> int:
    if args.games < 1:
        raise UsageError(f"--games must be at least 1, got {args.games}")
    domain, grammar = rules()
    folder = args.dir.expanduser() / LAYOUT / args.split
    for number in range(args.seed, args.seed + args.games):
        game = synthetic_game(number, split=args.split, families=args.families, size=args.size)
        try:
            write_game(game, folder, number, domain=domain, grammar=grammar)
        except OSError as error:
            raise UsageError(f"{error.filename or folder} can't be written: {error.strerror}") from error
    print(f"wrote {args.games} synthetic games to {folder}")
    print(
        f"use them with data={str(args.dir)!r}, split={args.split!r}; a result on them is no result on ALFWorld"
    )
    return 0


def _splits(root: Path) -> dict[str, list[Path]]:
    """Games by split; those of a folder without splits under its own name."""
    if root.is_file():
        return {root.parent.name: [root]}
    parent = root / LAYOUT if (root / LAYOUT).is_dir() else root
    files = find_games(parent) if parent.is_dir() else []
    splits: dict[str, list[Path]] = {}
    for file in sorted(files):
        inside = file.relative_to(parent).parts
        splits.setdefault(inside[0] if len(inside) == 4 else parent.name, []).append(file)
    return splits
