"""GuessNumber-v0: find a number by guesses that are answered "higher" or "lower".

The range is said once, and each answer is one word: what remains has to be put together from the whole dialogue.

Invariants:
- bisection finds every number within the default number of guesses, ceil(log2(numbers)) + 1;
- reward 1 for the right guess, which terminates; nothing else is rewarded;
- a guess outside the range is a guess like any other.
"""

import math
import random
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from .task_env import Answer, TextTaskEnv, text_policies, whole_number, word

__all__ = ["GuessNumberEnv", "Secret"]

_GREATEST: Final = 99
_GUESS: Final = re.compile(r"[0-9]{1,9}")


class Secret(NamedTuple):
    """A task: the range, both ends included, and the number."""

    low: int
    high: int
    number: int


class GuessNumberEnv(TextTaskEnv[Secret]):
    """A number from a range that begins anywhere.

    Args:
        split: "train" or "heldout".
        numbers: how many the range holds, 2 to 99; it lies within 1 and 99.
        max_turns: guesses after which the episode is truncated; None: ceil(log2(numbers)) + 1.

    Raises:
        UsageError: an argument is out of its range.
    """

    family = "guess-number"
    policies = text_policies("RandomGuesses")

    def __init__(self, *, split: str = "train", numbers: int = 32, max_turns: int | None = None) -> None:
        self.numbers = whole_number("numbers", numbers, 2, _GREATEST)
        enough = math.ceil(math.log2(self.numbers)) + 1
        super().__init__(split=split, max_turns=enough if max_turns is None else max_turns)
        self._low = self._high = 0

    def solutions(self) -> Sequence[str]:
        """The middle of what remains; both middles of an even number."""
        total = self._low + self._high
        return [str(guess) for guess in dict.fromkeys((total // 2, (total + 1) // 2))]

    def mistakes(self) -> Sequence[str]:
        """Any other number of the whole range."""
        right = self.solutions()
        everything = map(str, range(self.task.low, self.task.high + 1))
        return [guess for guess in everything if guess not in right] or right

    def _draw(self, rng: random.Random) -> Secret:
        low = rng.randint(1, _GREATEST - self.numbers + 1)
        high = low + self.numbers - 1
        return Secret(low, high, rng.randint(low, high))

    def _open(self, task: Secret) -> str:
        self._low, self._high = task.low, task.high
        return (
            f"Find my number. Each turn, write a guess; I say higher or lower. You have {self.max_turns} guesses. "
            f"It is from {task.low} to {task.high}."
        )

    def _answer(self, task: Secret, action: str) -> Answer:
        action = word(action)
        if not _GUESS.fullmatch(action):
            return Answer(
                f"Not understood: write a whole number from {task.low} to {task.high}.", malformed=True
            )
        guess = int(action)
        if guess == task.number:
            return Answer("right", reward=1.0)
        if guess < task.number:
            self._low = max(self._low, guess + 1)
            return Answer("higher")
        self._high = min(self._high, guess - 1)
        return Answer("lower")
