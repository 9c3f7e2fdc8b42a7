"""Where games come from: drawn from a seed, or a folder in the official layout.

Invariants:
- a seed chooses the same game in every process, as long as the files stay the same;
- a folder's games come in a fixed order that mixes the families, so that the first N of any split are a fair sample.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from agentenv.errors import UsageError

from .games import GAME_FILE, LAYOUT, Game, UnsolvableGameError, read_game
from .generate import SIZES, SPLITS, synthetic_game
from .household import FAMILIES

__all__ = [
    "OFFICIAL",
    "OFFICIAL_SPLITS",
    "FolderGames",
    "Games",
    "SyntheticGames",
    "find_games",
    "official_root",
    "open_games",
]

OFFICIAL: Final = "official"
OFFICIAL_SPLITS: Final = ("train", "valid_seen", "valid_unseen")
_GET: Final = (
    "`agentenv alfworld download` gets the official games, `agentenv alfworld generate DIR` writes "
    "synthetic ones"
)


class Games(Protocol):
    """Games by seed."""

    def game(self, seed: int) -> Game:
        """The game that a seed chooses.

        Raises:
            UsageError: its file is missing or damaged.
        """
        ...


class SyntheticGames:
    """Games drawn from the seed.

    Args:
        split: one of `generate.SPLITS`.
        families: what a task may be.
        size: of the households.
        num_games: how many there are; None: one for each seed.
    """

    def __init__(self, split: str, families: Sequence[str], size: str, num_games: int | None) -> None:
        self._split, self._families, self._size, self._num_games = split, families, size, num_games

    def game(self, seed: int) -> Game:
        """The game that a seed chooses."""
        number = seed % self._num_games if self._num_games is not None else seed
        return synthetic_game(number, split=self._split, families=self._families, size=self._size)


class FolderGames:
    """Games of a folder.

    Args:
        files: in any order.
        num_games: how many of them to use; None: all.
    """

    def __init__(self, files: Sequence[Path], num_games: int | None) -> None:
        ordered = sorted(files)
        random.Random(0).shuffle(ordered)
        self._files = ordered[:num_games]

    def __len__(self) -> int:
        return len(self._files)

    def game(self, seed: int) -> Game:
        """The game of a seed, or the next one that can be won.

        Raises:
            UsageError: its file is damaged, or none of the games can be won.
        """
        for step in range(len(self._files)):
            try:
                return read_game(self._files[(seed + step) % len(self._files)])
            except UnsolvableGameError:
                continue
        raise UsageError(f"all {len(self._files)} games say that they can't be won, such as {self._files[0]}")


def find_games(folder: Path, families: Sequence[str] = FAMILIES) -> list[Path]:
    """Files of the games below a folder.

    Like alfworld, it leaves out tasks with sliced objects and with receptacles that are carried.
    """
    return [
        file
        for file in folder.rglob(GAME_FILE)
        if (name := file.parent.parent.name).partition("-")[0] in families
        and "Sliced" not in name
        and "movable" not in name
    ]


def open_games(
    split: str, data: str | None, families: Sequence[str] | None, size: str, num_games: int | None
) -> Games:
    """The games that these arguments name; see `ALFWorldEnv`.

    Raises:
        UsageError: one of them is out of its range, or the data is missing.
    """
    chosen: Sequence[str] = FAMILIES if families is None else families
    if (
        isinstance(chosen, str)
        or not isinstance(chosen, Sequence)
        or not chosen
        or not all(family in FAMILIES for family in chosen)
    ):
        raise UsageError(f"families must be some of {', '.join(FAMILIES)}, got {families!r}")
    if size not in SIZES:
        raise UsageError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    if num_games is not None and (
        isinstance(num_games, bool) or not isinstance(num_games, int) or num_games < 1
    ):
        raise UsageError(f"num_games must be a whole number of at least 1 or None, got {num_games!r}")
    if data is None and split in SPLITS:
        return SyntheticGames(split, chosen, size, num_games)
    if data is None and split not in OFFICIAL_SPLITS:
        raise UsageError(
            f"split must be one of {', '.join(SPLITS)} (synthetic), valid_seen, valid_unseen (official), or with "
            f"data={OFFICIAL!r} or a folder one that it has; got {split!r}"
        )
    if size != "full":
        raise UsageError(f"size={size!r} is for synthetic games; those of a folder are as they are")
    root = official_root() if data in (None, OFFICIAL) else Path(str(data)).expanduser()
    if root.is_file() or (root / GAME_FILE).is_file():
        return FolderGames([root if root.is_file() else root / GAME_FILE], num_games)
    folder = _split_folder(root, split)
    files = find_games(folder, chosen)
    if not files:
        wanted = "" if families is None else f" of the families {', '.join(chosen)}"
        raise UsageError(f"{folder} has no game ({GAME_FILE}){wanted}; {_GET}")
    return FolderGames(files, num_games)


def official_root() -> Path:
    """Where alfworld keeps its data."""
    return Path(os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld").expanduser()


def _split_folder(root: Path, split: str) -> Path:
    # A path, or no name at all, would lead to another split, or to all of them.
    if not isinstance(split, str) or split in ("", ".", "..") or Path(split).name != split or "\0" in split:
        raise UsageError(f"split must be the name of a folder, such as train or valid_seen, got {split!r}")
    for folder in (root / LAYOUT / split, root / split):
        if folder.is_dir():
            return folder
    parent = root / LAYOUT if (root / LAYOUT).is_dir() else root
    has = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    said = f"; it has {', '.join(has[:10])}" if has else ""
    raise UsageError(
        f"there is no folder {root / LAYOUT / split} with the games of split {split!r}{said}; {_GET}"
    )
