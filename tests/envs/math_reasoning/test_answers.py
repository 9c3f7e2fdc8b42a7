r"""Reading the last \boxed{}, and numbers as exact values."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv_envs.math_reasoning.boxed import last_boxed
from agentenv_envs.math_reasoning.exact import format_values, read_values
from agentenv_envs.math_reasoning.grading import MAX_ANSWER_CHARS, grade_answer
from agentenv_envs.math_reasoning.task import MathTask


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1}, no, \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ 7" + "\n}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed 7", None),
        (r"boxed{7}", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_box_counts(text: str, answer: str | None) -> None:
    found = last_boxed(text)
    assert (None if found is None else found[1]) == answer


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "}", r"\boxed{1} ", "\\", " "])
def test_a_megabyte_is_read_in_a_moment(piece: str) -> None:
    started = time.process_time()
    last_boxed(r"\boxed{" + piece * (1_000_000 // len(piece)))
    last_boxed(piece * (1_000_000 // len(piece)) + r"\boxed{7}")
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("+7", 7),
        ("\u22127", -7),
        ("1,234,567", 1234567),
        (r"1{,}234", 1234),
        (r"1\,234", 1234),
        ("007", 7),
        ("7.", 7),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("6/4", Fraction(3, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("3/-4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\tfrac34", Fraction(3, 4)),
        ("$7$", 7),
        (r"\(7\)", 7),
        ("x = 7", 7),
        ("x=-1/2", Fraction(-1, 2)),
        ("x_1 = 7", 7),
        ("X=7", 7),
        ("12 345", 12345),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("1 1/2", Fraction(3, 2)),
        (r"-1\tfrac12", Fraction(-3, 2)),
        (r"7\text{ apples}", 7),
        (r"\frac{5}{3} \text{ hours}", Fraction(5, 3)),
        (r"7\,\mathrm{cm}^2", 7),
        (r"\$7", 7),
        (r"\text{7}", 7),
        ("{7}", 7),
        (r"\displaystyle 7", 7),
        (r"\left(7\right)", 7),
    ],
)
def test_a_number_has_its_value_however_it_is_spelled(text: str, value: int | Fraction) -> None:
    assert read_values(text) == (Fraction(value),)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "x",
            "7x",
            "1 2",
            "12,34",
            "1/0",
            "1/2/3",
            "--7",
            "2^3",
            "7 or 8",
            "1e5",
            "7%",
            "½",
            "٣",
            "1_0",
        ),
        *("9" * 500, "(1, 2)", "inf", "nan", "=", "12 34", "1 2345", "1 1/2/3"),
        *(
            r"7\text{ thousand}",
            r"7\text{ percent}",
            r"7\text{ or none}",
            r"7\text{2}",
            r"3\frac{5}{2}",
            r"1\frac{-1}{2}",
        ),
    ],
)
def test_what_is_not_plainly_one_number_has_no_value(text: str) -> None:
    assert read_values(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("1, 5/2", "(1, 5/2)", "1 and 2.5", "x = 1, y = 5/2", "(x, y) = (1, 5/2)", "$1, 5/2$"),
        *(r"x=1 \text{ and } y=\frac{5}{2}", r"\left(1, 2.5\right)", r"\{1; 5/2\}", r"\left\{1, 5/2\right\}"),
        *(r"1, 2\frac{1}{2}", "1, 2 1/2", r"x_1 = 1, x_2 = 5/2", r"x_{1} = 1, x_{2} = 5/2", r"x=1 \\ y=5/2"),
        *("y = 5/2, x = 1", "(y, x) = (5/2, 1)"),
    ],
)
def test_two_numbers_have_their_values_however_they_are_put(text: str) -> None:
    assert read_values(text, 2) == (Fraction(1), Fraction(5, 2))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.fractions(), min_size=1, max_size=3))
def test_values_are_read_as_they_are_written(values: list[Fraction]) -> None:
    assert read_values(format_values(values), len(values)) == tuple(values)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.integers(1, 3))
def test_no_text_makes_reading_fail(text: str, count: int) -> None:
    last_boxed(text)
    values = read_values(text, count)
    assert values is None or len(values) == count


def task(*values: int, any_order: bool = False) -> MathTask:
    exact = tuple(map(Fraction, values))
    return MathTask("t", "f", "p", format_values(exact), values=exact, any_order=any_order)


def test_roots_may_come_in_any_order_and_unknowns_may_not() -> None:
    assert grade_answer(task(1, 2, any_order=True), "2, 1").correct
    assert not grade_answer(task(1, 2), "2, 1").correct
    assert not grade_answer(task(1, 2, any_order=True), "1, 1").correct
    assert not grade_answer(task(1, 2, any_order=True), "1, 2, 3").correct


def test_unknowns_are_taken_by_their_names() -> None:
    assert grade_answer(task(1, 2), "y = 2, x = 1").correct
    assert not grade_answer(task(1, 2), "y = 1, x = 2").correct
    assert not grade_answer(task(1, 2), "(y, x) = (1, 2)").correct


@pytest.mark.parametrize(
    ("expected", "answer", "correct"),
    [("11/2", "1 1/2", False), ("3/2", "1 1/2", True), ("12", "1 2", False), ("12345", "12 345", True)],
)
def test_a_space_between_digits_is_not_nothing(expected: str, answer: str, correct: bool) -> None:
    if expected == "12":
        pytest.importorskip("math_verify")  # what is no number and not the same text is for the library
    assert grade_answer(MathTask("t", "f", "p", expected), answer).correct is correct


@pytest.mark.parametrize(
    "answer", ["8", "7 or 8", "7, 8", "x", "7.0001", "9**9**9", "{" * 900 + "7" + "}" * 900, "7" * 1_000_000]
)
def test_a_generated_task_takes_nothing_but_its_number(answer: str) -> None:
    grade = grade_answer(task(7), answer)
    assert not grade.correct
    assert grade.decided_by == ("size" if len(answer) > MAX_ANSWER_CHARS or "{{" in answer else "exact")
