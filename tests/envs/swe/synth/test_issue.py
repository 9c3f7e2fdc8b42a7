"""The issue's text: what it tells, and that it tells no code."""

import random
from typing import Any

import pytest

from agentenv_envs.swe.synth.issue import leaks, write_issue

CODE = "def total(items):\n    result = sum(items)\n    return result + 1\n"
TESTS = "def test_total():\n    assert total([1, 2]) == 3\n"


def issue(
    failure: dict[str, Any], test: str = "tests/test_a.py::test_total_of_a_list", **calls: list[str]
) -> str:
    return write_issue("pkg 1.0", {test: failure}, {test: ["pkg.total"]}, [CODE, TESTS])


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            {"type": "AssertionError", "compare": {"op": "==", "left": "4", "right": "3"}},
            "4 and 3 are not equal, but should be",
        ),
        (
            {"type": "AssertionError", "compare": {"op": "in", "left": "'a'", "right": "['b']"}},
            "'a' and ['b'] - the first is missing in the second",
        ),
        (
            {
                "type": "AssertionError",
                "message": "assert False\n +  where False = <function f at 0x7f12>('x')",
            },
            "`f('x')` gives False",
        ),
        ({"type": "AssertionError", "message": "assert 4\n +  where 4 = total([3])"}, "`total([3])` gives 4"),
        ({"type": "AssertionError", "message": "4 != 3"}, "4 and 3 are not equal, but should be"),
        ({"type": "ValueError", "message": "bad value"}, "ValueError is raised: bad value"),
        (
            {"type": "Failed", "message": "DID NOT RAISE <class 'pkg.errors.PkgError'>"},
            "PkgError should be raised, but nothing is",
        ),
    ],
)
def test_a_failure_is_told_as_behaviour(failure: dict[str, Any], told: str) -> None:
    text = issue(failure)
    assert f"- total of a list (a use of `pkg.total`): {told}\n" in text
    assert text.startswith("Wrong behaviour of `pkg.total` in pkg 1.0\n")


def test_parameters_of_a_test_are_told() -> None:
    failure = {"type": "KeyError", "message": "'x'", "parameters": {"size": "3"}}
    assert "total of a list, with size = 3 (a use" in issue(failure)


@pytest.mark.parametrize(
    "message",
    [
        "result = sum(items)",
        "see return result + 1 there",
        "assert total([1, 2]) == 3",
        "in /testbed/pkg/core.py:12",
        "bad (core.py, line 12)",
    ],
)
def test_what_holds_code_or_a_place_is_left_out(message: str) -> None:
    for kind in ("AssertionError", "SyntaxError"):
        for failure in (
            {"type": kind, "message": message},
            {"type": kind, "compare": {"op": "==", "left": message, "right": "1"}},
            {"type": kind, "message": "x", "parameters": {"text": message}},
        ):
            assert leaks(issue(failure), [CODE, TESTS]) == []


def test_no_text_of_random_failures_leaks() -> None:
    pieces = [
        *CODE.split("\n"),
        *TESTS.split("\n"),
        "/testbed/pkg/a.py",
        "line 3",
        "a.py:4",
        " ",
        "\n",
        "where x = (",
    ]
    pieces += ["<function f at 0x12>(1)", "assert ", " != ", "DID NOT RAISE <class 'E'>", "`", "é"]
    for seed in range(500):
        chance = random.Random(seed)

        def text(chance: random.Random = chance) -> str:
            return "".join(chance.choices(pieces, k=chance.randint(0, 5)))

        compare = {"op": chance.choice(["==", "in", "?"]), "left": text(), "right": text()}
        failure = {
            "type": chance.choice(["AssertionError", "Failed", "KeyError", ""]),
            "message": text(),
            "compare": chance.choice([{}, compare]),
            "parameters": {"p": text()},
        }
        assert leaks(issue(failure), [CODE, TESTS]) == [], failure


def test_failures_that_tell_nothing_come_last_and_make_no_issue_alone() -> None:
    vague = {"type": "AssertionError", "message": "assert 1 < 0"}
    assert issue(vague) == ""
    told = {"type": "KeyError", "message": "'x'"}
    lines = write_issue("pkg 1.0", {"t.py::test_a": vague, "t.py::test_b": told}, {}, []).split("\n")
    assert lines[4:6] == ["- b: KeyError is raised: 'x'", "- a: the result is wrong"]


def test_values_that_stand_in_docstrings_are_told() -> None:
    failure = {"compare": {"op": "==", "left": "(1, 2, 3)", "right": "(1, 2)"}, "type": "AssertionError"}
    assert "(1, 2, 3) and (1, 2) are not equal" in write_issue(
        "p 1", {"t.py::test_a": failure}, {}, ["(1, 2, 3)"]
    )


def test_leaks_finds_lines_and_places() -> None:
    assert leaks("it says result = sum(items) in a.py", [CODE]) == ["result = sum(items)", "a.py"]


def test_equal_failures_are_told_once_and_in_the_same_order() -> None:
    failures = {f"t.py::test_x[{n}]": {"type": "KeyError", "message": "'a'"} for n in range(9)}
    text = write_issue("pkg 1.0", failures, {}, [])
    assert text.count("KeyError") == 1
    assert text == write_issue("pkg 1.0", dict(reversed(failures.items())), {}, [])
