"""Mutation operators on worked examples."""

import ast
import textwrap
from pathlib import Path

import pytest

from agentenv_envs.swe.synth import operators
from agentenv_envs.swe.synth.operators import OPERATORS, Function, functions_of, mutations_of


def changes_of(operator: str, body: str) -> list[str]:
    """What an operator makes of a function's body (given without indentation), one text per mutation."""
    source = "def f(a, b, xs):\n" + textwrap.indent(body, "    ") + "\n"
    found = [m.apply(source) for m in mutations_of(source) if m.operator == operator]
    return [textwrap.dedent(text.partition("\n")[2]).rstrip("\n") for text in found if text is not None]


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("comparison_flip", "return a < b", ["return a > b"]),
        ("comparison_flip", "return a  ==  b  # same", ["return a  !=  b  # same"]),
        ("comparison_flip", "return a not in xs", ["return a in xs"]),
        ("comparison_flip", "return (a) is (b)", ["return (a) is not (b)"]),
        ("boundary", "return a <= b", ["return a < b"]),
        ("boundary", "return (a\n        > b)", ["return (a\n        >= b)"]),
        ("negation", "return not a", ["return a"]),
        ("negation", "return f(a, True)", ["return f(a, False)"]),
        ("and_or", "return a and b", ["return a or b"]),
        ("and_or", "return a or b or xs", ["return a and b or xs", "return a or b and xs"]),
        ("inverted_condition", "while a:\n    a -= b", ["while not a:\n    a -= b"]),
        ("inverted_condition", "return a if a > b else b", ["return a if not (a > b) else b"]),
        ("arithmetic", "return a + b", ["return a - b"]),
        ("arithmetic", "a //= b", ["a *= b"]),
        ("arithmetic", "return 'x%s' % a", []),
        ("index_shift", "return xs[0]", ["return xs[1]"]),
        ("index_shift", "return xs[-1]", ["return xs[-2]"]),
        ("index_shift", "return xs[1:-2]", ["return xs[2:-2]", "return xs[1:-3]"]),
        ("off_by_one", "return a * 3", ["return a * 4", "return a * 2"]),
        ("wrong_constant", "return 'ab'", ["return 'a'", "return 'AB'"]),
        ("wrong_constant", "return a * 0.5", ["return a * 5.0"]),
        ("wrong_constant", 'return f"{a}x"', []),
        ("wrong_constant", '"""A docstring."""', []),
        ("swapped_arguments", "return pow(a, b)", ["return pow(b, a)"]),
        ("swapped_arguments", "return print(*xs, a)", []),
        ("sibling_call", "return max(xs)", ["return min(xs)"]),
        ("sibling_call", "return a.lower()", ["return a.upper()"]),
        ("removed_statement", "xs.append(a)\nreturn xs", ["return xs"]),
        ("removed_statement", "xs[a] = b  # keep\nreturn xs", ["return xs"]),
        ("removed_statement", "if a:\n    raise ValueError", ["if a:\n    pass"]),
        ("removed_statement", "c = a\nreturn c", []),
        ("removed_branch", "if a:\n    return 1\nreturn b", ["return b"]),
        ("removed_branch", "if a:\n    b = 1\nelse:\n    b = 2", ["if a:\n    b = 1"]),
        ("changed_return", "return a", ["return None"]),
        ("changed_return", "return None", []),
        (
            "exception_handling",
            "try:\n    f()\nexcept E:\n    a = 1",
            ["try:\n    f()\nexcept E:\n    raise"],
        ),
        ("loop_control", "for x in xs:\n    break", ["for x in xs:\n    continue"]),
    ],
)
def test_an_operator_makes_exactly_these_changes(operator: str, before: str, after: list[str]) -> None:
    assert changes_of(operator, before) == after


@pytest.mark.parametrize(
    ("default", "changed"),
    [("True", ["False"]), ("1", ["2", "0"]), ("'ab'", ["'a'", "'AB'"]), ("None", ["True"])],
)
def test_defaults_of_functions_are_changed(default: str, changed: list[str]) -> None:
    source = f"def f(a, *, b={default}):\n    return a, b\n"
    found = [m.apply(source) for m in mutations_of(source) if m.operator == "wrong_default"]
    assert found == [source.replace(default, new) for new in changed]


def test_bytes_outside_of_an_edit_stay_also_behind_other_letters() -> None:
    source = "# déjà\ndef f(a):\n    é = 'ü'; return a < é  # größer\n"
    (flip,) = [m for m in mutations_of(source) if m.operator == "comparison_flip"]
    assert flip.apply(source) == source.replace("<", ">")


def test_nothing_outside_of_functions_is_changed() -> None:
    source = "A = 1 + 2\n\n"
    source += (
        "@deco(1)\ndef f(x: int = 3) -> 'text':\n    '''Doc 1.'''\n    return x\n\nif A < 3:\n    A = 4\n"
    )
    for mutation in mutations_of(source):
        changed = mutation.apply(source)
        if changed is not None:
            assert changed.partition("def f")[0] == source.partition("def f")[0]
            assert changed.endswith("\nif A < 3:\n    A = 4\n")
            assert "'''Doc 1.'''" in changed
            assert "-> 'text'" in changed


def test_every_mutation_parses_differs_and_comes_once_and_in_the_same_order() -> None:
    source = Path(operators.__file__).read_text(encoding="utf-8")
    mutations = mutations_of(source)
    assert {m.operator for m in mutations} >= set(OPERATORS) - {"loop_control", "wrong_default"}
    assert len({(m.begin, m.end, m.replacement) for m in mutations}) == len(mutations)
    assert mutations == mutations_of(source)
    for mutation in mutations[::7]:
        changed = mutation.apply(source)
        if changed is not None:
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def test_functions_are_named_and_found_by_the_line_that_code_objects_know() -> None:
    source = "class A:\n    @staticmethod\n    def f():\n        def g():\n            return 1\n        return g\n"
    assert functions_of(source) == {2: Function("A.f", 2), 4: Function("A.f.<locals>.g", 4)}
    scope: dict[str, type] = {}
    exec(source, scope)
    code = scope["A"].f.__code__  # type: ignore[attr-defined]
    assert functions_of(source)[code.co_firstlineno].name == "A.f"


def test_sources_that_count_lines_otherwise_are_left_alone() -> None:
    assert mutations_of("def f(a):\r\n    return a + 1\r\n") == []
