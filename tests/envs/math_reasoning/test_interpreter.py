"""An interpreter that keeps its variables, whatever programs do to it."""

from collections.abc import Callable, Iterator

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.math_reasoning import MathPythonEnv
from agentenv_envs.math_reasoning.interpreter import FreshInterpreter, LastingInterpreter
from agentenv_envs.swe.protocols.tools import as_tool_call
from agentenv_envs.swe.sandbox import Sandbox, SandboxSpec, open_backend

LOST = "[a new interpreter begins: its variables are lost]"


@pytest.fixture(scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), "local-unisolated"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def sandbox(kind: str) -> Iterator[Sandbox]:
    backend = open_backend(kind)
    sandbox = backend.acquire(SandboxSpec(read_only=True, memory_mb=256))
    yield sandbox
    backend.release(sandbox)
    backend.close()


@pytest.fixture
def run(sandbox: Sandbox) -> Callable[..., str]:
    interpreter = LastingInterpreter(sandbox)

    def run(code: str, timeout_s: float = 60.0) -> str:
        text, well = interpreter.run(code, timeout_s=timeout_s, half_bytes=500)
        assert well == ("[exit code" not in text and LOST not in text), text
        return text

    return run


def test_variables_functions_and_imports_are_kept(run: Callable[..., str]) -> None:
    assert run("import math\nx = 5\ndef f(n):\n    return math.factorial(n) * x") == "(no output)"
    assert run("print(f(3))") == "30"
    assert run("x = 7") == "(no output)"
    assert run("print(f(3))") == "42"


def test_an_error_is_shown_with_its_line_and_costs_no_variable(run: Callable[..., str]) -> None:
    run("x = 5")
    heard = run("y = 1\nprint(x / 0)")
    assert heard.startswith('Traceback (most recent call last):\n  File "program.py", line 2, in <module>\n')
    assert "    print(x / 0)\n" in heard and heard.endswith(
        "ZeroDivisionError: division by zero\n[exit code 1]"
    )
    assert "SyntaxError" in run("def (")
    assert run("raise SystemExit('bye')") == "bye\n[exit code 1]"
    assert run("import sys\nsys.exit(3)") == "[exit code 3]"
    assert run("sys.exit(253)") == "[exit code 1]"
    assert run("print(x, y)") == "5 1"


def test_a_program_that_runs_too_long_is_stopped_and_told_what_is_lost(run: Callable[..., str]) -> None:
    for limit_s in (0.5, 4.0, 30.0):  # longer where it did not come to its first line
        run("x = 5")
        heard = run("print('begun')\nwhile True: pass", timeout_s=limit_s)
        if "begun" in heard:
            break
    assert heard == f"begun\n[stopped after {limit_s:g} s]\n{LOST}"
    assert "NameError" in run("print(x)")
    assert run("print(9 ** 9 % 7)") == "1"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os\nos.closerange(0, 100)",
        "import os\nfor name in ('.ask', '.done', '.pid', '.out'):\n    os.remove(name)\nos._exit(0)",
    ],
)
def test_a_program_that_ends_its_interpreter_is_told_and_the_next_one_runs(
    run: Callable[..., str], code: str
) -> None:
    assert LOST in run(code)
    assert run("print(6 * 7)") == "42"


@pytest.mark.parametrize(
    ("code", "heard"),
    [
        ("print('a' * 3000)", "bytes left out"),
        ("import sys\nsys.stdout.close()\nsys.stderr = None", "(no output)"),
        ("import os\nos.chdir('/tmp')", "(no output)"),
        ("input()", "EOFError"),
        ("print('\\ud800')", "\\ud800"),
        ("x = 'a' * 10 ** 11", "["),
        ("import subprocess\nsubprocess.run(['echo', 'hi'])", "hi"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "(no output)"),
        ("\x00", "null"),
        ("import os\nif os.fork():\n    os.wait()\n    print('parent')", "parent"),
    ],
)  # fmt: skip
def test_the_next_program_runs_whatever_the_one_before_did(
    run: Callable[..., str], code: str, heard: str
) -> None:
    assert heard in run(code)
    assert run("print(6 * 7)") == "42"
    assert run("print(6 * 8)") == "48"


@pytest.mark.parametrize("kind_of_it", [FreshInterpreter, LastingInterpreter])
def test_a_folder_that_the_programs_spoilt_is_told_and_no_failure_of_the_sandbox(
    sandbox: Sandbox, kind_of_it: type[FreshInterpreter | LastingInterpreter]
) -> None:
    interpreter = kind_of_it(sandbox)
    spoil = "import os\nos.remove('program.py')\nos.mkdir('program.py')\nprint('spoilt')"
    assert interpreter.run(spoil, timeout_s=20.0, half_bytes=500) == ("spoilt", True)
    heard, well = interpreter.run("print(1)", timeout_s=20.0, half_bytes=500)
    assert not well and heard.startswith("[not run: earlier programs made it impossible")


def test_a_sandbox_that_is_gone_is_an_error_and_no_observation(sandbox: Sandbox) -> None:
    interpreter = LastingInterpreter(sandbox)
    interpreter.run("x = 5", timeout_s=20.0, half_bytes=500)
    sandbox.close()
    with pytest.raises(SandboxError):
        interpreter.run("print(x)", timeout_s=20.0, half_bytes=500)


@pytest.mark.parametrize("protocol", ["block", "tools"])
def test_the_environment_keeps_state_where_it_says_so_and_never_over_episodes(
    kind: str, protocol: str
) -> None:
    env = MathPythonEnv(sandbox=kind, protocol=protocol, keep_state=True)
    observation, _ = env.reset(seed=0)
    assert (
        "Variables are kept from program to program." in observation and "new interpreter" not in observation
    )
    env.step(env.speech.write("x = 5"))
    assert "5" in env.step(env.speech.write("print(x)"))[0]
    env.reset(seed=0)
    assert "NameError" in env.step(env.speech.write("print(x)"))[0]
    if protocol == "tools":
        two = as_tool_call("python", code="y = 6") + as_tool_call("python", code="print(y * 7)")
        assert "42" in env.step(two)[0]
    assert env.step(rf"\boxed{{{env.task.answer}}}")[4]["metrics"]["failed_tool_calls"] == 1.0
    env.close()
