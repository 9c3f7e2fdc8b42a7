"""ToolArithmetic-v0: an arithmetic question with a calculator that does one operation a turn.

The results of a chain of operations are too large to be guessed, so each has to be asked for and carried on, until the
last one is given as the answer.

Invariants:
- reward 1 for `answer` with the right number; `answer` terminates, right or wrong, and nothing else does;
- no number of a question or of its right solution is negative;
- the calculator takes whole numbers of up to 12 digits and is exact.
"""

import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from .task_env import Answer, TextTaskEnv, text_policies, whole_number, word

__all__ = ["TOOLS", "Calculation", "ToolArithmeticEnv"]

TOOLS: Final = ("add", "sub", "mul")
_OPERATORS: Final[dict[str, Callable[[int, int], int]]] = dict(
    zip(TOOLS, (operator.add, operator.sub, operator.mul), strict=True)
)
_SYMBOLS: Final = dict(zip(TOOLS, "+-*", strict=True))
_NUMBER: Final = r"(-?[0-9]{1,12})"
_CALL: Final = re.compile(rf"({'|'.join(TOOLS)}) {_NUMBER} {_NUMBER}")
_ANSWER: Final = re.compile(rf"answer {_NUMBER}")
_INSTRUCTION: Final = (
    "Use one tool a turn: add, sub or mul and two numbers. In the end, write answer and the result."
)
_NOT_UNDERSTOOD: Final = (
    "Not understood: write add, sub or mul and two whole numbers, or answer and one, of at most 12 digits."
)


class Calculation(NamedTuple):
    """A task: from a first number on, each tool with its second number, one after the other."""

    first: int
    operations: tuple[tuple[str, int], ...]

    @property
    def values(self) -> list[int]:
        """The first number and the result of each operation."""
        values = [self.first]
        for tool, operand in self.operations:
            values.append(_OPERATORS[tool](values[-1], operand))
        return values

    def __str__(self) -> str:
        text = str(self.first)
        for number, (tool, operand) in enumerate(self.operations):
            text = f"({text})" if number else text
            text = f"{text} {_SYMBOLS[tool]} {operand}"
        return text


class ToolArithmeticEnv(TextTaskEnv[Calculation]):
    """A question such as (47 + 36) * 21, answered with the help of a calculator.

    Args:
        split: "train" or "heldout".
        operations: of a question, 1 to 4.
        digits: of its numbers, 1 to 2.
        max_turns: actions after which the episode is truncated; None: three more than `operations`.

    Raises:
        UsageError: an argument is out of its range.
    """

    family = "tool-arithmetic"
    policies = text_policies("RandomCalls")

    def __init__(
        self, *, split: str = "train", operations: int = 2, digits: int = 2, max_turns: int | None = None
    ) -> None:
        self.operations = whole_number("operations", operations, 1, 4)
        self.digits = whole_number("digits", digits, 1, 2)
        super().__init__(split=split, max_turns=operations + 3 if max_turns is None else max_turns)
        self._done = 0

    def solutions(self) -> Sequence[str]:
        value = self.task.values[self._done]
        if self._done == len(self.task.operations):
            return [f"answer {value}"]
        tool, operand = self.task.operations[self._done]
        return [f"{tool} {value} {operand}"]

    def mistakes(self) -> Sequence[str]:
        """The wrong tool, the wrong number, or an answer too soon."""
        values, operands = self.task.values, [operand for _, operand in self.task.operations]
        value = values[self._done]
        if self._done == len(operands):
            return [f"answer {wrong}" for wrong in [*values[:-1], *operands] if wrong != value]
        tool, operand = self.task.operations[self._done]
        wrong = [f"{other} {value} {operand}" for other in TOOLS if other != tool]
        wrong += [f"{tool} {value} {other}" for other in operands if other != operand]
        return [*wrong, f"answer {value}"]

    def _draw(self, rng: random.Random) -> Calculation:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        first = value = rng.randint(low, high)
        operations: list[tuple[str, int]] = []
        for _ in range(self.operations):
            operand = rng.randint(low, high)
            # Nothing below 0 comes out.
            tool = rng.choice(TOOLS if operand <= value else ("add", "mul"))
            value = _OPERATORS[tool](value, operand)
            operations.append((tool, operand))
        return Calculation(first, tuple(operations))

    def _open(self, task: Calculation) -> str:
        self._done = 0
        return f"{_INSTRUCTION} What is {task}?"

    def _answer(self, task: Calculation, action: str) -> Answer:
        action = word(action)
        if answered := _ANSWER.fullmatch(action):
            return Answer("", reward=float(int(answered[1]) == task.values[-1]))
        called = _CALL.fullmatch(action)
        if called is None:
            return Answer(_NOT_UNDERSTOOD, malformed=True)
        result = _OPERATORS[called[1]](int(called[2]), int(called[3]))
        if self._done < len(task.operations) and result == task.values[self._done + 1]:
            self._done += 1
        return Answer(str(result))
