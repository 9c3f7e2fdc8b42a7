"""A task: a problem with its answer, whether generated or a data set's."""

from dataclasses import dataclass
from fractions import Fraction

__all__ = ["MathTask"]


@dataclass(frozen=True, slots=True)
class MathTask:
    """A problem in words and its answer."""

    task_id: str
    """Stable name: made of the content, or the data set's own."""
    family: str
    """Kind of problem."""
    problem: str
    """Without any word on how to answer, but for the order of several numbers."""
    answer: str
    """As the final box should hold it."""
    level: int | None = None
    """Difficulty, from 0; a data set's own number, where it has one."""
    values: tuple[Fraction, ...] | None = None
    """The answer's numbers. Where they are given, an answer is compared with them exactly and by nothing else."""
    any_order: bool = False
    """Whether the numbers are a set, such as the roots of an equation."""
    program: str | None = None
    """Python program, standard library only, that computes the answer from the problem's numbers and prints it."""
