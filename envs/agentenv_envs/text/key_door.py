"""KeyDoor-v0: fetch the key, then open the door, on a grid of which the agent is told its own place alone.

Where key and door are is said in the first observation, and again only where the agent stands on them; that it has the
key is said once. So what to do next has to be remembered, and which of a dozen turns earned the reward is not said.

Invariants:
- every task can be solved within `max_turns`;
- reward 1 for opening the door with the key, which terminates; nothing else is rewarded;
- a move into a wall, `take` without a key there and `open` without key or door cost a turn and change nothing.
"""

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from agentenv.errors import UsageError

from .task_env import Answer, TextTaskEnv, text_policies, whole_number, word

__all__ = ["ACTIONS", "KeyDoorEnv", "Layout"]

Cell = tuple[int, int]
"""Column and row, from 0."""

_MOVES: Final = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
ACTIONS: Final = (*_MOVES, "take", "open")
_NOT_UNDERSTOOD: Final = f"Not understood: write one of {', '.join(ACTIONS)}."
_SHORTEST: Final = 4  # a step, take, a step, open


class Layout(NamedTuple):
    """A task: where everything is at first."""

    agent: Cell
    key: Cell
    door: Cell

    @property
    def num_turns(self) -> int:
        """Turns that it takes at least."""
        return _distance(self.agent, self.key) + 1 + _distance(self.key, self.door) + 1


class KeyDoorEnv(TextTaskEnv[Layout]):
    """A grid with a key and a door; see the module for what is told.

    Args:
        split: "train" or "heldout".
        size: columns and rows, 2 to 9.
        max_turns: actions after which the episode is truncated; tasks that need more are not drawn.

    Raises:
        UsageError: an argument is out of its range.
    """

    family = "key-door"
    policies = text_policies("RandomMoves")

    def __init__(self, *, split: str = "train", size: int = 5, max_turns: int = 12) -> None:
        super().__init__(split=split, max_turns=max_turns)
        self.size = whole_number("size", size, 2, 9)
        if self.max_turns < _SHORTEST:
            raise UsageError(
                f"max_turns must be {_SHORTEST} or more, got {max_turns}: no task takes fewer turns"
            )
        self._instruction = (
            f"Fetch the key, then open the door. The grid runs from a1 in the south-west to "
            f"{cell_name((self.size - 1, self.size - 1))} in the north-east. "
            f"Each turn, write one of {', '.join(ACTIONS)}."
        )
        self._at: Cell = (0, 0)
        self._has_key = False

    def solutions(self) -> Sequence[str]:
        target, act = (self.task.door, "open") if self._has_key else (self.task.key, "take")
        if self._at == target:
            return [act]
        now = _distance(self._at, target)
        return [move for move in _MOVES if _distance(self._moved(move), target) < now]

    def mistakes(self) -> Sequence[str]:
        right = self.solutions()
        return [action for action in ACTIONS if action not in right]

    def _draw(self, rng: random.Random) -> Layout:
        while True:
            agent, key, door = (divmod(cell, self.size) for cell in rng.sample(range(self.size**2), 3))
            layout = Layout(agent, key, door)
            if layout.num_turns <= self.max_turns:
                return layout

    def _open(self, task: Layout) -> str:
        self._at, self._has_key = task.agent, False
        return (
            f"{self._instruction} {self._where()} "
            f"The key is at {cell_name(task.key)}. The door is at {cell_name(task.door)}."
        )

    def _answer(self, task: Layout, action: str) -> Answer:
        action = word(action)
        if action in _MOVES:
            target = self._moved(action)
            if target == self._at:
                return Answer(f"A wall stops you. {self._where()}")
            self._at = target
            return Answer(self._where())
        if action == "take":
            if self._has_key or self._at != task.key:
                return Answer(f"There is nothing to take. {self._where()}")
            self._has_key = True
            return Answer(f"You have the key. {self._where()}")
        if action == "open":
            if self._at != task.door:
                return Answer(f"There is nothing to open. {self._where()}")
            if not self._has_key:
                return Answer(f"The door is locked. {self._where()}")
            return Answer("The door opens.", reward=1.0)
        return Answer(_NOT_UNDERSTOOD, malformed=True)

    def _where(self) -> str:
        text = f"You are at {cell_name(self._at)}."
        if self._at == self.task.key and not self._has_key:
            return f"{text} The key is here."
        return f"{text} The door is here." if self._at == self.task.door else text

    def _moved(self, move: str) -> Cell:
        """The cell that a move leads to: the same one where a wall is in the way."""
        (x, y), (dx, dy) = self._at, _MOVES[move]
        target = (x + dx, y + dy)
        return target if 0 <= target[0] < self.size and 0 <= target[1] < self.size else self._at


def cell_name(cell: Cell) -> str:
    """As on a chessboard: the column's letter and the row's number, a1 in the south-west."""
    return f"{'abcdefghi'[cell[0]]}{cell[1] + 1}"


def _distance(one: Cell, other: Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
