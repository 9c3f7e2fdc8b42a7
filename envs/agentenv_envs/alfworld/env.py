"""ALFWorld-v0: do a household task by text commands, on the real engine of ALFWorld.

Invariants:
- the seed of `reset` chooses the game; the same commands then give the same texts, in every process;
- `terminated` means that the task is done, with reward 1; `truncated` that the turns ran out; there is no other reward;
- a command that is not admissible costs a turn, changes nothing and is answered by "Nothing happens.";
- one engine per environment, reused by all its episodes and, once closed, by the next environment of the process.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from agentenv.env import BaseEnv
from agentenv.errors import UsageError

from .actions import command_of
from .engine import Engine, State, borrow_engine, require_engine, return_engine
from .games import Game
from .problem import Layout, read_layout
from .sources import Games, open_games
from .walkthrough import situation_of, walkthrough

__all__ = ["ALFWorldEnv"]

_BANNER: Final = "-= Welcome to TextWorld, ALFRED! =-"
_RULES: Final = (
    "You do a task in a household. Each turn, write one command and nothing else: go to PLACE, open PLACE, "
    "close PLACE, take THING from PLACE, move THING to PLACE, clean THING with PLACE, heat THING with PLACE, "
    "cool THING with PLACE, slice THING with THING, use THING, examine THING or PLACE, look, inventory. "
    "Things and places have numbers, such as mug 1. You hold one thing at a time and have {turns} turns."
)
_NOTHING: Final = "Nothing happens."


class ALFWorldEnv(BaseEnv):
    """Household tasks: find things, clean, heat or cool them, put them where they belong.

    Args:
        split: "train" or "heldout" of synthetic games; "train", "valid_seen" or "valid_unseen" of the official ones.
        data: None for synthetic games (the official ones for split "valid_seen" and "valid_unseen"), "official" for
            those in $ALFWORLD_DATA or ~/.cache/alfworld, or a folder in the same layout, or one game's file or folder.
        families: of the tasks; all six by default.
        size: of synthetic households: "full" or "small".
        num_games: how many games there are, chosen by the seed modulo their number; None: all of them.
        max_turns: commands after which the episode is truncated.
        show_commands: list the admissible commands in each observation.
        cache_dir: a folder for what the first reset of a game computes; processes and runs that share it compute it
            once. None: each process keeps it for itself.

    Raises:
        UsageError: an argument is out of its range, or the data is missing.
        MissingExtraError: the extra `alfworld` is not installed.
    """

    worker = "process"
    max_turns: int = 50
    policies: ClassVar[Mapping[str, str]] = {
        "oracle": "agentenv_envs.alfworld.policies:Oracle",
        "random": "agentenv_envs.alfworld.policies:RandomCommand",
    }

    def __init__(
        self,
        *,
        split: str = "train",
        data: str | None = None,
        families: Sequence[str] | None = None,
        size: str = "full",
        num_games: int | None = None,
        max_turns: int = 50,
        show_commands: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise UsageError(f"max_turns must be a whole number of at least 1, got {max_turns!r}")
        if not isinstance(show_commands, bool):
            raise UsageError(f"show_commands must be true or false, got {show_commands!r}")
        if cache_dir is not None and (
            not isinstance(cache_dir, str | Path) or not str(cache_dir).strip() or "\0" in str(cache_dir)
        ):
            raise UsageError(f"cache_dir must be the name of a folder or None, got {cache_dir!r}")
        self.games: Games = open_games(split, data, families, size, num_games)
        require_engine()
        self.max_turns = max_turns
        self.show_commands = show_commands
        self._cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else None
        self._engine: Engine | None = None
        self._game: Game | None = None
        self._state = State("", (), False)
        self._layout: Layout | None = None
        self._turn = self._invalid = 0

    @property
    def game(self) -> Game:
        """The running episode's.

        Raises:
            RuntimeError: none is running.
        """
        if self._game is None:
            raise RuntimeError("ALFWorldEnv has no running episode: call reset first")
        return self._game

    @property
    def commands(self) -> tuple[str, ...]:
        """The admissible commands, sorted."""
        return self._state.commands

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._game = None
        game = self.games.game(seed if seed is not None else int(self.np_random.integers(2**31)))
        self._state = self._own_engine().begin(game)
        self._game, self._turn, self._invalid, self._layout = game, 0, 0, None
        scene = self._state.text.removeprefix(_BANNER).strip()
        info = {
            "task_id": game.task_id,
            "family": game.task.family,
            "synthetic": game.synthetic,
            "admissible_commands": list(self._state.commands),
        }
        return self._shown(f"{_RULES.format(turns=self.max_turns)}\n\n{scene}"), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give a command; see `actions` for what it may look like.

        Raises:
            RuntimeError: called before `reset` or after the end.
            InfrastructureError: the engine broke.
        """
        if self._game is None or self._engine is None:
            raise RuntimeError("step before reset, or after the end of the episode")
        self._turn += 1
        command = command_of(action)
        is_valid = command in self._state.commands
        if is_valid:
            try:
                self._state = self._engine.command(str(command))
            except BaseException:
                self._engine = self._game = None
                raise
        else:
            # What the engine would answer, too: nothing changes.
            self._state = self._state._replace(text=_NOTHING)
            self._invalid += 1
        terminated = self._state.won
        truncated = not terminated and self._turn >= self.max_turns
        info: dict[str, Any] = {
            "action_valid": is_valid,
            "invalid_actions": self._invalid,
            "command": command,
            "admissible_commands": list(self._state.commands),
        }
        if terminated or truncated:
            self._game = None
            info["success"] = terminated
            info["metrics"] = {"turns": self._turn, "invalid_actions": self._invalid}
        text = self._state.text if terminated else self._shown(self._state.text)
        return text, float(terminated), terminated, truncated, info

    def solution(self) -> str:
        """The command that leads on to the goal from the present state, whatever was done before.

        Raises:
            RuntimeError: no episode is running.
            ValueError: the household, as it is now, lacks something that the task needs.
        """
        task = self.game.task
        assert self._engine is not None
        if self._layout is None:
            self._layout = read_layout(self.game.problem)
        return walkthrough(task, self._layout, situation_of(self._engine.facts(), task))[0]

    def demonstrate(self, skill: float, rng: random.Random) -> str:
        """A command of a demonstrator for the present state.

        Args:
            skill: probability that it is the `solution`; otherwise it is any admissible command. 1 is an oracle.
            rng: where chance comes from.

        Raises:
            RuntimeError: no episode is running.
        """
        return self.solution() if rng.random() < skill else rng.choice(self.commands)

    def prefetch(self, seeds: Iterable[int]) -> None:
        """Have the games of coming resets prepared by a process beside this one; returns at once.

        A reset then takes milliseconds instead of up to a second. The latest 256 games of a process stay prepared.

        Args:
            seeds: that `reset` will get.
        """
        engine = self._own_engine()
        for seed in seeds:
            engine.prefetch(self.games.game(seed))

    def wait_prefetched(self, seed: int, timeout_s: float = 60.0) -> bool:
        """Wait until the game of a seed is prepared.

        Returns:
            False: it was prefetched and isn't prepared yet.
        """
        return self._own_engine().wait_prefetched(self.games.game(seed), timeout_s)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        self._game = None
        if engine is not None:
            engine.close()
            return_engine(engine)

    def _own_engine(self) -> Engine:
        if self._engine is None:
            self._engine = borrow_engine(self._cache_dir)
        return self._engine

    def _shown(self, text: str) -> str:
        return f"{text}\n\nAdmissible commands: {', '.join(self.commands)}" if self.show_commands else text
