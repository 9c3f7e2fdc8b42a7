"""How programs end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.console.exit_codes import ExitCode, run_program
from agentenv.console.output import stderr_as
from agentenv.errors import EnvError, MissingExtraError, UsageError


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UsageError("bad\n input"), 2, "x: error: bad input\n"),
        (
            MissingExtraError("bm25s", "shop"),
            2,
            "x: error: bm25s is not installed; pip install 'agentenv-rl[shop]'\n",
        ),
        (EnvError("it broke"), 1, "x: error: it broke\n"),
        (KeyboardInterrupt(), 130, "x: interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_raised_on_purpose_is_one_line_and_a_code(
    raised: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def call() -> int:
        raise raised

    assert run_program(call, name="x") == code
    assert capsys.readouterr().err == said


def test_what_nobody_foresaw_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def call() -> int:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        run_program(call, name="x")
    with stderr_as(log_format="json"):
        assert run_program(call, name="x") == 1
    assert '"exception": "Traceback' in capsys.readouterr().err


def test_the_programs_own_code_is_handed_on() -> None:
    assert run_program(lambda: 3) == 3


def test_the_documentation_has_every_code(repository: Path) -> None:
    table = re.findall(r"^\| (\d+) \| \S", (repository / "docs" / "console.md").read_text(), re.MULTILINE)
    assert [int(code) for code in table] == [int(code) for code in ExitCode]


def test_a_forked_child_dies_of_sigterm_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """Pools end their workers by it; in a process of its own, since a fork of a test's process warns."""
    program = (
        "import os, signal, sys, time\n"
        "from agentenv.console.exit_codes import run_program\n"
        "def call():\n"
        "    ready, begun = os.pipe()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.write(begun, b'.')\n"
        "    while not child:\n"
        "        time.sleep(0.01)\n"
        "    os.read(ready, 1)  # Python forgets a signal that comes while it sets up a fork\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    return 0 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM else 1\n"
        "sys.exit(run_program(call))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert (done.returncode, capfd.readouterr().err) == (0, "")
