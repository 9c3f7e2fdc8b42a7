"""How the tests of a row are run where the row does not say it, and the script that a grading run executes.

Invariants:
- A script prints the tests' output between two lines, `TESTS_START` and `TESTS_END`; the grader puts secrets in their
  place (`marked_script`), so that no output of a test can pass for one.
- Nothing in a script needs a network.

Source of the commands: SWE-bench 4 `harness/constants/python.py`, SWE-Gym's fork of the same, and SWE-smith
`constants.py`. What those do with a network first (installing the package once more) is left out: images have it.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Sequence

from .diffs import diff_paths

__all__ = [
    "CONDA_SETUP",
    "SWE_GYM_REPOS",
    "TESTS_END",
    "TESTS_START",
    "command_of_repo",
    "commands_between",
    "eval_script",
    "marked_script",
    "parser_of_repo",
    "smith_command",
]

TESTS_START = ">>>>> Start Test Output"
TESTS_END = ">>>>> End Test Output"
# What the published images of SWE-bench and of its relatives need before a command sees the repository's Python.
CONDA_SETUP = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
)

_PYTEST = "pytest -rA"
_LOCALE = (
    "export LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 LANGUAGE=en_US:en PYTHONIOENCODING=utf8",
    "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen 2>/dev/null && locale-gen || true",
)
_COMMANDS = {
    "astropy/astropy": _PYTEST,
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "marshmallow-code/marshmallow": _PYTEST,
    "matplotlib/matplotlib": _PYTEST,
    "mwaskom/seaborn": "pytest --no-header -rA",
    "pallets/flask": _PYTEST,
    "psf/requests": _PYTEST,
    "pvlib/pvlib-python": _PYTEST,
    "pydata/xarray": _PYTEST,
    "pydicom/pydicom": _PYTEST,
    "pylint-dev/astroid": _PYTEST,
    "pylint-dev/pylint": _PYTEST,
    "pytest-dev/pytest": _PYTEST,
    "pyvista/pyvista": _PYTEST,
    "scikit-learn/scikit-learn": _PYTEST,
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sqlfluff/sqlfluff": _PYTEST,
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
_OLD_ASTROPY = ("0.1", "0.2", "0.3", "0.4", "1.1", "1.2", "1.3")
_GYM_COMMANDS = {
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "getmoto/moto": "pytest -n0 -rA",
    "hypothesisworks/hypothesis": "pytest -n0 -rA --tb=no --no-header",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "project-monai/monai": "pytest -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA -k",
    "spyder-ide/spyder": "pytest -n0 -rA",
}
SWE_GYM_REPOS = frozenset(_GYM_COMMANDS)
"""Repositories, in lower case, whose rows in the SWE-bench schema are SWE-Gym's."""

_PARSERS = {
    "django/django": "django",
    "matplotlib/matplotlib": "matplotlib",
    "mwaskom/seaborn": "seaborn",
    "sympy/sympy": "sympy",
    "astropy/astropy": "pytest_v2",
    "scikit-learn/scikit-learn": "pytest_v2",
    "sphinx-doc/sphinx": "pytest_v2",
    "pydicom/pydicom": "pytest_options",
    "psf/requests": "pytest_options",
    "pylint-dev/pylint": "pytest_options",
}
_SMITH_PYTEST = "pytest --disable-warnings --color=no --tb=no --verbose"
# By "owner__repo", in lower case; the second item is the parser, the third whether files are handed over.
_SMITH_COMMANDS = {
    "un33k__python-slugify": ("python test.py --verbose", "unittest", False),
    "tornadoweb__tornado": ("python -m tornado.test --verbose", "unittest", False),
    "mido__mido": (f"{_SMITH_PYTEST} -rs -c /dev/null", "pytest_verbose", True),
    "paramiko__paramiko": ("pytest -rA --color=no --disable-warnings", "pytest", True),
    "pydantic__pydantic": (f"/root/.local/bin/uv run {_SMITH_PYTEST}", "pytest_verbose", True),
}
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


def parser_of_repo(repo: str) -> str:
    """The parser for a repository's logs; `pytest` where nothing else is known."""
    return _PARSERS.get(repo, "pytest")


def command_of_repo(repo: str, version: str, test_patch: str) -> tuple[str, tuple[str, ...]] | None:
    """The command that runs the tests which a test patch touches, and shell lines to run before it.

    Args:
        repo: "owner/name".
        version: the row's `version`, "" where it has none.
        test_patch: the row's test patch.

    Returns:
        command and lines; None for a repository that is not known.
    """
    base = _COMMANDS.get(repo) or _GYM_COMMANDS.get(repo.lower())
    if base is None:
        return None
    if repo.lower() == "python/mypy":  # its tests are sections of data files, chosen by name
        cases = re.findall(r"\[case ([^\]]+)\]", test_patch)
        return f"{base} {shlex.quote(' or '.join(dict.fromkeys(cases)))}", ()
    before: tuple[str, ...] = ()
    files = [path for path in diff_paths(test_patch) if not path.endswith(_NO_TESTS)]
    if repo == "django/django":
        files = [_django_label(path) for path in files if _is_django_test(path)]
        if version == "1.9":
            base = "./tests/runtests.py --verbosity 2"
        if not version or version.startswith(("1.", "2.", "3.")):
            before = _LOCALE
    if repo == "astropy/astropy" and version in _OLD_ASTROPY:
        base = "pytest -rA -vv -o console_output_style=classic --tb=no"
    return " ".join([base, *map(shlex.quote, files)]), before


def smith_command(name: str, files: Sequence[str]) -> tuple[str, str]:
    """Command and parser of a SWE-smith row.

    Args:
        name: "owner__repo".
        files: test files of its FAIL_TO_PASS.
    """
    command, parser, takes_files = _SMITH_COMMANDS.get(name.lower(), (_SMITH_PYTEST, "pytest_verbose", True))
    return (" ".join([command, *map(shlex.quote, files)]) if takes_files else command), parser


def eval_script(command: str, *, before: Sequence[str] = (), workdir: str = "/testbed") -> str:
    """The script that runs a command between the marker lines."""
    lines = [CONDA_SETUP, f"cd {shlex.quote(workdir)}", *before]
    return "\n".join([*lines, f": '{TESTS_START}'", command, f": '{TESTS_END}'"]) + "\n"


def marked_script(script: str, start: str, end: str) -> str | None:
    """The script with other marker lines, of which the second brings the exit code of the line before it.

    Args:
        script: bash with one line for each marker, a no-op (`:`) or an `echo`.
        start: printed on a line of its own before the tests.
        end: printed with the exit code on a line of its own after them.

    Returns:
        The script; None where it has not exactly one line for each marker, in this order.
    """
    lines = script.split("\n")
    places = _places(lines)
    if places is None:
        return None
    lines[places[0]] = f"printf '\\n%s\\n' {shlex.quote(start)}"
    lines[places[1]] = f"printf '\\n%s %s\\n' {shlex.quote(end)} \"$?\""
    return "\n".join(lines)


def commands_between(script: str) -> str:
    """The lines of a script between its markers; "" where it has not both."""
    lines = script.split("\n")
    places = _places(lines)
    return "" if places is None else "\n".join(lines[places[0] + 1 : places[1]])


def _places(lines: Sequence[str]) -> tuple[int, int] | None:
    """Numbers of the two marker lines; None where there is not one of each, in this order."""
    starts, ends = (
        [number for number, line in enumerate(lines) if _is_marker(line, marker)]
        for marker in (TESTS_START, TESTS_END)
    )
    return (starts[0], ends[0]) if len(starts) == len(ends) == 1 and starts[0] < ends[0] else None


def _is_marker(line: str, marker: str) -> bool:
    return line.strip().startswith((":", "echo")) and marker in line


def _is_django_test(path: str) -> bool:
    name = posixpath.basename(path)
    return name == "tests.py" or name.startswith("test_") or "/tests/" in path or "/test_" in path


def _django_label(path: str) -> str:
    return path.removesuffix(".py").removeprefix("tests/").replace("/", ".")
