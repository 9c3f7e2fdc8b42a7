"""What each parser reads from a log: recorded runs, odd lines, and the same as swebench's where that is installed."""

from pathlib import Path

import pytest

from agentenv_envs.swe.log_parsers import PARSERS, STATUSES, parser_name, pytest_summary, resolve_id

LOGS = Path(__file__).parent / "fixtures" / "logs"
A = "tests/test_a.py::"


def parsed(parser: str, name: str) -> dict[str, str]:
    return PARSERS[parser]((LOGS / f"{name}.txt").read_text())


@pytest.mark.parametrize("log", ["pytest_rA", "pytest6_rA"])
def test_the_summary_of_pytest_names_every_test(log: str) -> None:
    found = parsed("pytest", log)
    assert found[f"{A}test_plain"] == found[f"{A}TestB::test_method"] == "PASSED"
    assert found[f"{A}test_wrong"] == found[f"{A}test_options[-]"] == "FAILED"
    assert found[f"{A}test_known"] == "XFAIL"
    assert found[f"{A}test_broken"] == found["tests/test_b.py"] == "ERROR"
    assert found[f"{A}test_options[/usr/share/x.txt]"] == "PASSED"
    assert "[1]" not in found  # how many were skipped, not a test


def test_of_a_parameter_that_is_a_path_the_last_part_is_kept() -> None:
    found = parsed("pytest_options", "pytest_rA")
    assert found[f"{A}test_options[/x.txt]"] == "PASSED"
    assert found[f"{A}test_options[//host/x]"] == "PASSED"
    assert f"{A}test_options[/usr/share/x.txt]" not in found


def test_colours_and_names_with_spaces_are_read() -> None:
    found = parsed("pytest_v2", "pytest_rA_colour")
    assert found[f"{A}test_options[a b]"] == "PASSED"
    assert found[f"{A}test_wrong"] == "FAILED"
    assert len(found) == 11


def test_the_lines_of_verbose_pytest_are_read() -> None:
    found = parsed("pytest_verbose", "pytest_verbose")
    assert found[f"{A}test_plain"] == "PASSED"
    assert found[f"{A}test_skipped"] == "SKIPPED"
    assert found[f"{A}test_known"] == "XFAIL"
    assert found[f"{A}test_broken"] == "ERROR"
    assert len(found) == 10  # `test_options[a b]` has a space


def test_unittest_names_tests_with_their_class() -> None:
    case = "(case_c.CaseC.test_{0})"
    assert parsed("unittest", "unittest") == {
        "A test that is named by its docstring.": "PASSED",
        f"test_error {case.format('error')}": "ERROR",
        f"test_ok {case.format('ok')}": "PASSED",
        f"test_skipped {case.format('skipped')}": "SKIPPED",
        f"test_wrong {case.format('wrong')}": "FAILED",
    }


def test_django_finds_results_behind_other_output() -> None:
    found = parsed("django", "django")
    case = "(forms_tests.tests.FormsTests)"
    assert found[f"test_plain {case}"] == found[f"test_upper {case}"] == "PASSED"
    assert found[f"test_noisy {case}"] == found[f"test_printing {case}"] == "PASSED"
    assert found["A form names its fields (#1234)"] == "PASSED"
    assert found[f"test_wrong {case}"] == "FAILED"
    assert found[f"test_broken {case}"] == "ERROR"
    assert found[f"test_skipped {case}"] == "SKIPPED"
    assert found["--version is equivalent to version"] == "PASSED"
    assert found["test_no_migrations (backends.tests.MigrationTests)"] == "PASSED"


def test_sympys_marks_are_read() -> None:
    assert parsed("sympy", "sympy") == {
        "sympy/core/tests/test_basic.py:test_equality": "FAILED",
        "test_structure": "PASSED",
        "test_equality": "FAILED",
        "test_matches_basic": "ERROR",
        "test_atoms": "PASSED",
    }


def test_seaborn_reads_passed_and_failed_alone() -> None:
    core = "tests/test_core.py::"
    assert parsed("seaborn", "seaborn") == {
        f"{core}test_first": "PASSED",
        f"{core}test_third[x]": "PASSED",
        f"{core}test_second": "FAILED",
    }


def test_matplotlibs_mouse_buttons_are_numbers() -> None:
    widgets = "lib/matplotlib/tests/test_widgets.py::"
    assert parsed("matplotlib", "matplotlib") == {
        f"{widgets}test_span[1]": "PASSED",
        f"{widgets}test_span[3]": "PASSED",
        f"{widgets}test_click": "FAILED",
    }


def test_r2e_names_tests_without_their_file_and_leaves_skipped_ones_out() -> None:
    found = parsed("r2e", "pytest_rA")
    assert found["TestB.test_method"] == "PASSED"
    assert found["test_wrong"] == "FAILED"
    assert found["test_broken"] == "ERROR"
    assert "test_skipped" not in found
    assert "test_never" not in found  # printed by a test, before the summary


def test_r2e_reads_the_summary_of_other_runners_too() -> None:
    log = (
        "PASSED x::a\n--- short test summary info ---\nPASSED x::TestB::b\n\x1b[31mFAILED\x1b[0m x::c - why\n"
    )
    assert PARSERS["r2e"](log) == {"TestB.b": "PASSED", "c": "FAILED"}
    assert PARSERS["r2e"]("PASSED x::a\n") == {}


def test_only_the_last_summary_counts() -> None:
    log = "== short test summary info ==\nPASSED x\n=== short test summary info ===\nFAILED x\n"
    assert (pytest_summary(log) or "").split() == ["FAILED", "x"]
    assert pytest_summary("PASSED x\n") is None


@pytest.mark.parametrize("name", sorted(PARSERS))
@pytest.mark.parametrize(
    "log", ["", "\n\n", "FAILED\nERROR:\nFAIL:\n ... ok\n____ .py: ____\n\x1b[31m\nPASSED \n"]
)
def test_a_log_that_tells_nothing_is_no_error(name: str, log: str) -> None:
    assert set(PARSERS[name](log).values()) <= set(STATUSES)


def test_a_long_line_takes_no_quadratic_time() -> None:
    log = "_ " * 200_000 + ".py:" + " _" * 200_000
    for parser in PARSERS.values():
        parser(log)


def test_an_id_that_is_cut_short_stands_for_tests_that_agree() -> None:
    statuses = {"a[log(x y)]": "PASSED", "a[log(z)]": "XFAIL", "b[x 1]": "PASSED", "b[x 2]": "FAILED"}
    assert resolve_id("a[log(", statuses) == "a[log(x y)]"
    assert resolve_id("b[x", statuses) is None
    assert resolve_id("a", statuses) is None  # not cut short
    assert resolve_id("c[x", statuses) is None


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("parse_log_pytest", "pytest"),
        ("parse_log_astropy", "pytest_v2"),
        ("django", "django"),
        ("parse_log_jest", None),
    ],
)
def test_names_of_swebenchs_parsers_are_understood(given: str, ours: str | None) -> None:
    assert parser_name(given) == ours


SAME = {
    "pytest": "parse_log_pytest",
    "pytest_options": "parse_log_pytest_options",
    "pytest_v2": "parse_log_pytest_v2",
    "matplotlib": "parse_log_matplotlib",
    "seaborn": "parse_log_seaborn",
    "sympy": "parse_log_sympy",
    "django": "parse_log_django",
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("log", sorted(path.stem for path in LOGS.glob("*.txt")))
def test_each_parser_says_of_each_log_what_swebench_says(name: str, log: str) -> None:
    log_parsers = pytest.importorskip("swebench.harness.log_parsers")
    text = (LOGS / f"{log}.txt").read_text()
    theirs = log_parsers.PARSER_REGISTRY[SAME[name]](text, None)
    # Theirs takes lines such as `ERRORS !` for tests, with a status that is none.
    assert PARSERS[name](text) == {test: status for test, status in theirs.items() if status in STATUSES}
