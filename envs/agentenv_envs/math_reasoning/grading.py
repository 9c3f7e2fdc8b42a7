r"""Is an answer right?

Invariants:
- a generated task's numbers are compared exactly, without any library; so are whole numbers and fractions of data sets;
- the same text is the same answer; everything else is for math-verify (`verifier`);
- an answer over `MAX_ANSWER_CHARS`, or with brackets more than `MAX_DEPTH` deep, is wrong, whatever it says: the right
  ones of the data sets are far shorter, and the library would only be busy until it is stopped;
- what is wrong is a `Grade`; an exception means that it could not be found out.
"""

import re
from dataclasses import dataclass
from typing import Final

from .exact import read_values
from .task import MathTask
from .verifier import Verifier, shared_verifier

__all__ = ["MAX_ANSWER_CHARS", "MAX_DEPTH", "Grade", "grade_answer"]

MAX_ANSWER_CHARS: Final = 2_000
MAX_DEPTH: Final = 30
_NOISE = re.compile(r"\\(?:left|right|displaystyle|,|;|:|!| )(?![a-zA-Z])|\$|\s+")
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")
_PLAIN = re.compile(r"-?[0-9]+|-?[0-9]+/[0-9]+|-?\\[dt]?frac\{-?[0-9]+\}\{[0-9]+\}")


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether an answer is right, and what decided it."""

    correct: bool
    decided_by: str
    """"size", "exact", "text" or "verifier"."""
    stopped: str | None = None
    """What stopped the verifier: "time", "memory" or "crash"; the answer is wrong then."""


def grade_answer(task: MathTask, answer: str, *, verifier: Verifier | None = None) -> Grade:
    """Grade what stands in the final box.

    Args:
        task: with the right answer.
        answer: of any length, holding anything.
        verifier: instead of the process's shared one.

    Raises:
        RewardError: the verifier's processes could not be used.
    """
    if len(answer) > MAX_ANSWER_CHARS or _depth(answer) > MAX_DEPTH:
        return Grade(False, "size")
    if task.values is not None:
        values = read_values(answer, len(task.values))
        if values is not None and task.any_order:
            return Grade(sorted(values) == sorted(task.values), "exact")
        return Grade(values == task.values, "exact")
    gold, given = read_values(task.answer), read_values(answer)
    if gold is not None and given is not None:
        if gold == given:
            return Grade(True, "exact")
        # Decimals may be rounded: how near is near enough is the library's to say.
        if _is_plain(task.answer) and _is_plain(answer):
            return Grade(False, "exact")
    if same_text(task.answer) == same_text(answer):
        return Grade(True, "text")
    verdict = (verifier or shared_verifier()).equal(task.answer, answer)
    return Grade(verdict.equal, "verifier", verdict.stopped)


def same_text(answer: str) -> str:
    """An answer without spaces, dollars and other marks that change nothing; `1 2` is not `12`."""
    text = _BETWEEN_DIGITS.sub("_", _TEXT.sub(r"\1", answer))
    return _NOISE.sub("", text).replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".")


def _is_plain(answer: str) -> bool:
    """A whole number or a fraction, without decimals, names and commas."""
    return _PLAIN.fullmatch(_NOISE.sub("", answer)) is not None


def _depth(answer: str) -> int:
    """How deep its brackets are nested, of whatever kind."""
    depth = most = 0
    for character in answer:
        if character in "([{":
            depth += 1
            most = max(most, depth)
        elif character in ")]}":
            depth -= 1
    return most
