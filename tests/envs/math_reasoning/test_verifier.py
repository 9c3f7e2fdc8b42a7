"""Answers of data sets: compared by math-verify, in bounded time and memory, from any thread."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentenv.errors import MissingExtraError, RewardError
from agentenv_envs.math_reasoning import verifier as module
from agentenv_envs.math_reasoning.grading import Grade, grade_answer
from agentenv_envs.math_reasoning.task import MathTask
from agentenv_envs.math_reasoning.verifier import Verdict, Verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    pytest.importorskip("math_verify")
    verifier = Verifier(workers=1, cpu_s=1.0)
    yield verifier
    verifier.close()


def task(answer: str) -> MathTask:
    return MathTask("t", "f", "p", answer)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
        ("[0,1)", "[0, 1)", True),
        ("32", "2^5", True),
        ("42", "x=42", True),
        ("42", r"41 \text{ or } 42", False),
        ("42", "1,2,42", False),
        ("42", r"\{41,42\}", False),
        ("42", "x", False),
        ("42", "40<x<43", False),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}", False),
        ("(1,2)", "(2,1)", False),
        (r"\frac{1}{2^{30}}", "0.0", False),
        (r"\frac{1}{2^{100}}", r"\frac{1}{3^{100}}", False),
        (r"\frac{1}{2^{100}}", "2^{-100}", True),
        (r"\frac{1}{30000}", "0.000033", True),
        (r"\frac{1}{300}", "0.003333", True),
        (r"\sqrt{3}-\sqrt{3}", "0", True),
    ],
)
def test_expressions_are_compared_as_mathematics(
    verifier: Verifier, gold: str, answer: str, equal: bool
) -> None:
    assert grade_answer(task(gold), answer, verifier=verifier).correct is equal


def test_a_number_inside_of_other_text_is_no_answer(verifier: Verifier) -> None:
    # From huggingface/Math-Verify#65; the library alone takes a number out of it.
    text = (
        "{@Neillier 1276915 4951077 ник增高人权 国 {1,1-3-10鼓励不停);5个_GENERAL2全校。 _HEADERS1 Orchestra}"
    )
    assert not grade_answer(task("4951077"), text, verifier=verifier).correct


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^9}",
        r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
    ],
)
def test_what_never_ends_is_stopped_and_wrong_and_the_next_answer_is_graded(
    verifier: Verifier, answer: str
) -> None:
    grade = grade_answer(task("3"), answer, verifier=verifier)
    assert (grade.correct, grade.decided_by) == (False, "verifier")
    assert grade.stopped in ("time", "memory", "crash")
    assert verifier.equal("x+1", "1+x") == Verdict(True)


@pytest.mark.parametrize(
    "answer",
    [
        *("9**9**9", "{" * 500 + "}" * 500, r"\frac{" * 200 + "1" + "}{2}" * 200, "(" * 800, "1" * 1_000_000),
        r"\sqrt{" * 29 + "9" + "}" * 29,
    ],
)
def test_what_is_huge_or_deep_is_wrong_in_bounded_time(verifier: Verifier, answer: str) -> None:
    assert not grade_answer(task("3"), answer, verifier=verifier).correct


def test_an_answer_is_not_run_as_python(verifier: Verifier, tmp_path: Path) -> None:
    for path in ("a", "b", "c"):
        code = f"__import__('os').mkdir('{tmp_path}/{path}')"
        for answer in (code, rf"\text{{{code}}}", rf"x = {code}", rf"{code} = 1"):
            assert not verifier.equal("3", answer).equal
            assert not verifier.equal(answer, "3").equal
    assert not list(tmp_path.iterdir())


def test_memory_is_bounded() -> None:
    pytest.importorskip("math_verify")
    small = Verifier(workers=1, cpu_s=60.0, memory_mb=4)
    try:
        assert small.equal("x+1", "1+x").equal
        (process,) = small._idle
        before = _peak_kb(process._process.pid)
        # 160 MB, if it were computed.
        assert not small.equal("3", "9^{9^9}").equal
        assert not process._process.poll() and _peak_kb(process._process.pid) < before + 5 * 1024
    finally:
        small.close()


def _peak_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmPeak:")[2].split()[0])


def test_threads_share_the_processes(verifier: Verifier) -> None:
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda n: verifier.equal("x+1", f"x+{n}"), range(16)))
    assert [verdict.equal for verdict in verdicts] == [n == 1 for n in range(16)]


def test_a_process_killed_from_outside_is_replaced_and_no_answer_is_wrong_for_it(verifier: Verifier) -> None:
    assert verifier.equal("x+1", "1+x").equal
    (process,) = verifier._idle
    os.kill(process._process.pid, signal.SIGKILL)
    assert verifier.equal("x+1", "1+x") == Verdict(True)


def test_a_process_that_can_not_start_is_an_error_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site" not in path])
    monkeypatch.setattr(module, "_PROGRAM", "/nonexistent/worker.py")
    broken = Verifier(workers=1)
    with pytest.raises(RewardError, match="verifier's process ended while it started"):
        broken.equal("1", "x")
    broken.close()
    with pytest.raises(RewardError, match="closed"):
        broken.equal("1", "x")


def test_a_missing_library_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentenv-rl\[math\]'"):
        module.require_math_verify()


@pytest.mark.parametrize(
    ("gold", "answer", "grade"),
    [
        ("042", "42", Grade(True, "exact")),
        (r"\frac12", "0.5", Grade(True, "exact")),
        ("42", "43", Grade(False, "exact")),
        ("1/3", "2/6", Grade(True, "exact")),
        (r"\text{Evelyn}", "Evelyn", Grade(True, "text")),
        (r"\dfrac{\pi}{2}", r"$\frac{\pi}{2}$", Grade(True, "text")),
        (r"\left(1, 2\right)", "(1,2)", Grade(True, "text")),
        ("42", "4" * 3000, Grade(False, "size")),
    ],
)
def test_what_is_plain_is_decided_without_the_library(gold: str, answer: str, grade: Grade) -> None:
    closed = Verifier()
    closed.close()
    assert grade_answer(task(gold), answer, verifier=closed) == grade


def test_the_processes_end_with_a_parent_that_was_killed() -> None:
    pytest.importorskip("math_verify")
    program = (
        "import os, signal\nfrom agentenv_envs.math_reasoning.verifier import shared_verifier\n"
        "v = shared_verifier()\nassert v.equal('x', 'x').equal\n"
        "print(v._idle[0]._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_forked_child_has_processes_of_its_own() -> None:
    pytest.importorskip("math_verify")
    assert module.shared_verifier().equal("2x", "x+x").equal
    mine = {process._process.pid for process in module.shared_verifier()._all}
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        equal = module.shared_verifier().equal("2x", "x+x").equal
        queue.put((equal, {process._process.pid for process in module.shared_verifier()._all}))

    process = context.Process(target=child)
    process.start()
    equal, its = queue.get()
    process.join()
    assert equal and process.exitcode == 0 and not its & mine
    assert module.shared_verifier().equal("2x", "x+x").equal


def test_it_works_off_the_main_thread(verifier: Verifier) -> None:
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.append(verifier.equal("2x", "x+x")))
    thread.start()
    thread.join()
    assert found == [Verdict(True)]
