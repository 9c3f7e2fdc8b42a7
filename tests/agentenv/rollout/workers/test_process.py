"""Environments in processes: calls, deadlines, deaths, what is left behind, and what a process can be made from."""

import asyncio
import contextlib
import errno
import functools
import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import agentenv
from agentenv import BaseEnv
from agentenv.errors import EnvError, EpisodeTimeoutError, MissingExtraError, SandboxError, UsageError
from agentenv.rollout.workers import fork_server
from agentenv.rollout.workers.process import ProcessWorker
from agentenv.testing import EchoEnv

_GOOD = ("seen", 1.0, True, False, {})


class Env(BaseEnv):
    """Does what an action says, in its process."""

    max_turns = 7

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return "hello", {"pid": os.getpid(), "seed": seed, "name": os.environ["AGENTENV_WORKER"]}

    def step(self, action: str) -> Any:
        return getattr(self, action)()

    def go(self) -> Any:
        return _GOOD

    def environment(self) -> Any:
        return *_GOOD[:4], {
            "omp": os.environ["OMP_NUM_THREADS"],
            "variable": os.environ["OF_THE_TEST"],
            "stdin": sys.stdin.read(),
            "cwd": os.getcwd(),
        }

    def numbers(self) -> Any:
        return (
            "o",
            np.float32(0.5),
            np.bool_(True),
            np.bool_(False),
            {"metrics": {"n": np.int64(3)}, 1: (2, {3})},
        )

    def malformed(self) -> Any:
        return b"bytes", 0.0, False, False, {}

    def nothing(self) -> Any:
        return None

    def raises(self) -> Any:
        raise ZeroDivisionError("no")

    def exits_python(self) -> Any:
        raise SystemExit(3)

    def sandbox(self) -> Any:
        raise SandboxError("gone")

    def missing(self) -> Any:
        raise MissingExtraError("docker", "docker")

    def dies(self) -> Any:
        os._exit(3)

    def hangs(self) -> Any:
        time.sleep(1000)

    def waits(self) -> Any:
        """For the file."""
        while self.log is not None and not self.log.exists():
            time.sleep(0.01)
        return _GOOD

    def hangs_for_good(self) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    def prints(self) -> Any:
        print("chatter", flush=True)  # noqa: T201
        os.write(1, b"more chatter\n")
        return _GOOD

    def large(self) -> Any:
        return "é" * 3_000_000, 0.0, False, False, {}

    def too_large(self) -> Any:
        return "x" * 68_000_000, 0.0, False, False, {}

    def half_a_message(self) -> Any:
        _answers().send(b"\x00\x00\x10\x00half")
        time.sleep(1000)

    def announces_too_much(self) -> Any:
        _answers().send(b"\xff\xff\xff\xff")
        time.sleep(1000)

    def answers_and_dies(self) -> Any:
        from agentenv.rollout.workers.wire import encode

        _answers().send(encode(["ok", *_GOOD]))
        os._exit(3)

    def no_message(self) -> Any:
        _answers().send(b"\x00\x00\x00\x02{}")
        time.sleep(1000)

    def interrupted(self) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return _GOOD

    def has_children(self) -> Any:
        child = subprocess.Popen(["sleep", "1000"])
        return str(child.pid), 0.0, False, False, {}

    def draws(self) -> Any:
        return str(np.random.random()), 0.0, False, False, {}

    def close(self) -> None:
        if self.log is not None:
            self.log.write_text("closed")


class StickyClose(Env):
    """Takes for ever to close."""

    def close(self) -> None:
        time.sleep(1000)


class BadInput(Env):
    def __init__(self) -> None:
        raise UsageError("no such dataset")


class Broken(Env):
    def __init__(self) -> None:
        raise ValueError("broken")


def _answers() -> socket.socket:
    """The socket that this process answers on: its only one."""
    sockets = [int(fd) for fd in os.listdir("/proc/self/fd") if _is_socket(int(fd))]
    assert len(sockets) == 1
    return socket.socket(fileno=os.dup(sockets[0]))


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert _until(lambda: not _children(os.getpid())), f"processes were left: {_children(os.getpid())}"
    assert _until(lambda: all(thread.name != "agentenv-fork-server" for thread in threading.enumerate()))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(fork_server, "CLOSE_GRACE_S", 0.3)
    return 0.3


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "CLOSE_GRACE_S", 60.0)


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _children(pid: int) -> list[int]:
    """Ids of all child processes, zombies included."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has just ended
            children += map(int, (task / "children").read_text().split())
    return children


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _soon(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def _run(work: Callable[[ProcessWorker], Awaitable[Any]], env_fn: Any = Env) -> Any:
    async def whole() -> Any:
        worker = ProcessWorker(env_fn, "worker-under-test")
        try:
            return await work(worker)
        finally:
            worker.end()
            assert await worker.join(_soon())
            assert not worker.is_running

    return asyncio.run(whole())


def _step(action: str, env_fn: Any = Env) -> Any:
    async def work(worker: ProcessWorker) -> Any:
        await worker.reset(1, _soon())
        return await worker.step(action, _soon())

    return _run(work, env_fn)


def test_an_environment_is_made_and_used_in_one_other_process() -> None:
    async def work(worker: ProcessWorker) -> None:
        assert worker.max_turns is None and not worker.is_running
        observation, info = await worker.reset(5, _soon())
        assert observation == "hello" and worker.max_turns == 7 and worker.is_running
        assert info == {"pid": worker.pid, "seed": 5, "name": "worker-under-test"}
        assert worker.pid != os.getpid()
        assert await worker.step("go", _soon()) == _GOOD
        assert (await worker.reset(6, _soon()))[1]["pid"] == worker.pid

    _run(work)


def test_the_processs_id_is_known_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slowly_told.py").write_text(
        "import os, sys, time\nfrom agentenv.rollout.workers import process_main\n"
        "def tell(*record, send=process_main._send_record):\n    time.sleep(0.5)\n    send(*record)\n"
        "if 'pytest' not in sys.modules: process_main._send_record = tell\n"
        "from agentenv.testing import EchoEnv as Base\nclass Env(Base):\n"
        "    def reset(self, **_):\n        return 'hello', {'pid': os.getpid()}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import slowly_told  # type: ignore[import-not-found]

    async def work(worker: ProcessWorker) -> None:
        assert (await worker.reset(1, _soon()))[1] == {"pid": worker.pid}

    _run(work, slowly_told.Env)


def test_a_registered_environment_takes_its_registration_along() -> None:
    agentenv.register("ProcessTest-v0", Env, max_turns=3)

    async def work(worker: ProcessWorker) -> None:
        await worker.reset(0, _soon())
        assert worker.max_turns == 3

    _run(work, functools.partial(agentenv.make, "ProcessTest-v0"))


def test_a_lazily_registered_environment_works() -> None:
    async def work(worker: ProcessWorker) -> None:
        assert (await worker.reset(0, _soon()))[0].startswith("Say the word")

    _run(work, functools.partial(agentenv.make, "Echo-v0"))


def test_the_process_has_the_rollouts_surroundings_but_no_stdin_and_one_thread_for_mathematics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())  # the server runs, with the surroundings of before
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        monkeypatch.setenv("OF_THE_TEST", "here")
        other = ProcessWorker(Env, "other")
        await other.reset(1, _soon())
        info = (await other.step("environment", _soon()))[4]
        assert info == {"omp": "1", "stdin": "", "cwd": str(tmp_path), "variable": "here"}
        other.end()
        assert await other.join(_soon())

    _run(work)


def test_a_module_that_can_only_be_found_by_its_file_is_loaded_from_it(tmp_path: Path) -> None:
    file = tmp_path / "found_by_file.py"
    file.write_text("from agentenv.testing import EchoEnv as Base\nclass Env(Base): pass\n")
    spec = importlib.util.spec_from_file_location("found_by_file_only", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    async def work(worker: ProcessWorker) -> None:
        assert (await worker.reset(0, _soon()))[0].startswith("Say the word")

    _run(work, module.Env)


def test_results_become_plain_python() -> None:
    result = _step("numbers")
    assert result == ("o", 0.5, True, False, {"metrics": {"n": 3}, "1": [2, "{3}"]})
    assert [type(value) for value in result[1:4]] == [float, bool, bool]


@pytest.mark.parametrize(
    ("action", "match"),
    [
        ("malformed", r"Env.step returned the observation b'bytes' \(bytes\), must be a str"),
        ("nothing", "Env.step returned None"),
    ],
)
def test_a_wrong_type_is_named_with_the_environment(action: str, match: str) -> None:
    with pytest.raises(EnvError, match=match):
        _step(action)


@pytest.mark.parametrize(
    ("action", "origin"), [("raises", "ZeroDivisionError"), ("exits_python", "SystemExit")]
)
def test_what_an_environment_raises_arrives_with_its_type_and_its_traceback(action: str, origin: str) -> None:
    with pytest.raises(EnvError, match=rf"Env.step raised {origin}") as caught:
        _step(action)
    assert caught.value.origin == origin
    assert any(f"in {action}" in note for note in caught.value.__notes__)


def test_typed_errors_stay_what_they_are() -> None:
    with pytest.raises(SandboxError, match=r"^gone\n"):
        _step("sandbox")
    with pytest.raises(EnvError, match=r"agentenv-rl\[docker\]") as caught:
        _step("missing")
    assert caught.value.origin == "MissingExtraError"


def test_bad_input_when_the_environment_is_made_is_a_usage_error_and_other_trouble_is_not() -> None:
    with pytest.raises(UsageError, match="no such dataset"):
        _step("go", BadInput)
    with pytest.raises(EnvError, match="making the environment raised ValueError: broken") as caught:
        _step("go", Broken)
    assert caught.value.origin == "ValueError"


def test_a_process_that_exits_ends_the_call_at_once_with_its_code() -> None:
    before = time.monotonic()
    with pytest.raises(EnvError, match="process of Env in worker-under-test died: exit code 3") as caught:
        _step("dies")
    assert caught.value.origin == "WorkerDied"
    assert time.monotonic() - before < 50


def test_a_process_killed_from_outside_is_reported_by_its_signal() -> None:
    async def work(worker: ProcessWorker) -> None:
        _, info = await worker.reset(1, _soon())
        asyncio.get_running_loop().call_later(0.05, os.kill, info["pid"], signal.SIGKILL)
        with pytest.raises(EnvError, match="died: signal SIGKILL"):
            await worker.step("hangs", _soon())
        with pytest.raises(EnvError, match="died: signal SIGKILL"):
            await worker.reset(1, _soon())

    _run(work)


def test_an_answer_given_before_death_counts_even_if_the_death_is_noticed_first() -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("answers_and_dies", _soon()))
        await asyncio.sleep(0)
        assert worker.pid is not None
        while _is_alive(worker.pid):
            time.sleep(0.01)  # noqa: ASYNC251 - the loop shall see nothing yet
        while worker.is_running:
            worker._read_control()
        assert await stepping == _GOOD

    _run(work)


def test_a_process_that_dies_between_calls_fails_the_next_one() -> None:
    async def work(worker: ProcessWorker) -> None:
        _, info = await worker.reset(1, _soon())
        os.kill(info["pid"], signal.SIGKILL)
        assert await worker.join(_soon())
        with pytest.raises(EnvError, match="died: signal SIGKILL") as caught:
            await worker.step("go", _soon())
        assert caught.value.origin == "WorkerDied"

    _run(work)


@pytest.mark.parametrize("action", ["hangs", "hangs_for_good", "half_a_message"])
@pytest.mark.usefixtures("short_grace")
def test_a_hanging_step_ends_at_its_deadline_and_its_process_is_killed(action: str) -> None:
    async def work(worker: ProcessWorker) -> None:
        _, info = await worker.reset(1, _soon())
        before = time.monotonic()
        with pytest.raises(EpisodeTimeoutError, match="step of Env in worker-under-test") as caught:
            await worker.step(action, _soon(0.2))
        assert caught.value.stage == "step"
        assert 0.2 <= time.monotonic() - before < 30.0
        with pytest.raises(EpisodeTimeoutError):
            await worker.settle()
        assert await worker.join(_soon())
        assert not _is_alive(info["pid"])

    _run(work)


@pytest.mark.usefixtures("long_grace")
def test_a_hung_environment_is_closed_before_it_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        with pytest.raises(EpisodeTimeoutError):
            await worker.step("hangs", _soon(0.1))

    _run(work, functools.partial(Env, log))
    assert log.read_text() == "closed"


@pytest.mark.usefixtures("long_grace")
def test_an_idle_environment_is_closed_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _step("go", functools.partial(Env, log))
    assert log.read_text() == "closed"


@pytest.mark.usefixtures("short_grace")
def test_a_process_that_does_not_close_is_killed_and_join_does_not_wait_beyond_its_deadline() -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        [server] = _children(os.getpid())
        os.kill(server, signal.SIGSTOP)  # it is the one who kills
        try:
            worker.end()
            worker.end()
            assert not await worker.join(_soon(0.05)) and worker.is_running
        finally:
            os.kill(server, signal.SIGCONT)
        assert await worker.join(_soon()) and not worker.is_running

    _run(work, StickyClose)


@pytest.mark.parametrize(
    ("action", "match"),
    [
        ("announces_too_much", "announced a message of 4,294,967,295 bytes"),
        ("no_message", "what is no message"),
        ("too_large", "a message of 68,.* bytes is too long"),
    ],
)
def test_what_is_no_message_is_an_error(action: str, match: str) -> None:
    with pytest.raises(EnvError, match=match):
        _step(action)


def test_a_large_observation_and_a_large_action_pass() -> None:
    assert _step("large")[0] == "é" * 3_000_000

    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        text = "x" * 5_000_000
        assert (await worker.step(text, _soon()))[0] == f"You said: {text}"

    _run(work, EchoEnv)


def test_printing_disturbs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert _step("prints") == _GOOD
    assert capfd.readouterr().out == "chatter\nmore chatter\n"


def test_interrupts_do_not_reach_the_environment() -> None:
    assert _step("interrupted") == _GOOD


def test_a_call_after_a_cancelled_one_waits_for_it(tmp_path: Path) -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("waits", _soon()))
        await asyncio.sleep(0.02)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        asyncio.get_running_loop().call_later(0.1, (tmp_path / "go").touch)
        assert (await worker.reset(2, _soon()))[1]["seed"] == 2
        assert (tmp_path / "go").exists()

    _run(work, functools.partial(Env, tmp_path / "go"))


def test_a_reset_cancelled_while_the_process_starts_leaves_a_usable_worker() -> None:
    async def work(worker: ProcessWorker) -> None:
        resetting = asyncio.create_task(worker.reset(1, _soon()))
        await asyncio.sleep(0)
        resetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resetting
        await worker.settle()
        assert (await worker.reset(2, _soon()))[1]["seed"] == 2

    _run(work)


def test_cancelling_settle_leaves_a_usable_worker(tmp_path: Path) -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        for _ in range(2):
            waiting = asyncio.create_task(worker.step("waits", _soon()))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        asyncio.get_running_loop().call_later(0.1, (tmp_path / "go").touch)
        assert await worker.step("go", _soon()) == _GOOD
        assert (tmp_path / "go").exists()

    _run(work, functools.partial(Env, tmp_path / "go"))


def test_settle_after_a_cancelled_call_that_hangs_fails_at_that_calls_deadline() -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("hangs", _soon(0.15)))
        await asyncio.sleep(0.02)
        stepping.cancel()
        with pytest.raises(EpisodeTimeoutError) as caught:
            await worker.settle()
        assert caught.value.stage == "step"

    _run(work)


def test_ending_fails_the_call_that_waits() -> None:
    async def work(worker: ProcessWorker) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("hangs", _soon()))
        await asyncio.sleep(0.02)
        worker.end()
        with pytest.raises(EnvError, match="worker-under-test has ended"):
            await stepping
        with pytest.raises(EnvError, match="has ended"):
            await worker.reset(1, _soon())

    _run(work)


def test_a_worker_ended_while_its_process_starts_leaves_nothing() -> None:
    async def work(worker: ProcessWorker) -> None:
        resetting = asyncio.create_task(worker.reset(1, _soon()))
        await asyncio.sleep(0)
        worker.end()
        with pytest.raises(EnvError, match="has ended"):
            await resetting

    _run(work)


def test_a_step_needs_a_reset_first() -> None:
    async def work(worker: ProcessWorker) -> None:
        with pytest.raises(EnvError, match="step before reset"):
            await worker.step("go", _soon())

    _run(work)


@pytest.mark.parametrize("death", ["end", "kill"])
def test_children_of_the_environment_are_killed_with_it(death: str) -> None:
    async def work(worker: ProcessWorker) -> int:
        await worker.reset(1, _soon())
        child = int((await worker.step("has_children", _soon()))[0])
        assert _is_alive(child)
        if death == "kill":
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        return child

    child = _run(work)
    assert _until(lambda: not _is_alive(child))


def test_processes_draw_different_numbers() -> None:
    async def work(worker: ProcessWorker) -> None:
        other = ProcessWorker(Env, "other")
        drawn = []
        for each in (worker, other):
            await each.reset(1, _soon())
            drawn.append((await each.step("draws", _soon()))[0])
        other.end()
        assert drawn[0] != drawn[1]
        assert await other.join(_soon())

    _run(work)


def test_a_killed_fork_server_ends_its_workers_and_is_replaced() -> None:
    async def work(worker: ProcessWorker) -> None:
        _, info = await worker.reset(1, _soon())
        [server] = _children(os.getpid())
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EnvError, match="died with its fork server"):
            await worker.step("hangs", _soon())
        assert _until(lambda: not _is_alive(info["pid"]))
        replacement = ProcessWorker(Env, "replacement")
        await replacement.reset(1, _soon())
        replacement.end()
        assert await replacement.join(_soon())

    _run(work)


def test_starting_a_process_does_not_hold_up_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slowly_imported.py").write_text(
        "import pathlib, sys, time\nhere, deadline = pathlib.Path(__file__).parent, time.monotonic() + 50\n"
        "if 'pytest' not in sys.modules:\n"
        "    (here / 'imports').open('a').write('once ')\n"
        "    while not (here / 'go').exists():\n"
        "        assert time.monotonic() < deadline\n"
        "        time.sleep(0.01)\n"
        "from agentenv.testing import EchoEnv as Base\nclass Slow(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import slowly_imported  # type: ignore[import-not-found]

    async def work(worker: ProcessWorker) -> None:
        resetting = asyncio.create_task(worker.reset(1, _soon()))
        while not (tmp_path / "imports").exists():  # noqa: ASYNC110 - what changes it tells nobody
            await asyncio.sleep(0.01)
        assert not resetting.done()
        (tmp_path / "go").touch()  # the import ends when the loop has come this far
        await resetting
        # The server has imported it: the next process need not.
        other = ProcessWorker(slowly_imported.Slow, "other")
        await other.reset(1, _soon())
        assert (tmp_path / "imports").read_text() == "once "
        other.end()
        assert await other.join(_soon())

    _run(work, slowly_imported.Slow)


def test_a_module_that_starts_threads_is_imported_after_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "starts_threads.py").write_text(
        "import os, threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "importer = os.getpid()\n"
        "from agentenv.testing import EchoEnv as Base\nclass Env(Base):\n"
        "    def reset(self, **_):\n        return str(importer == os.getpid()), {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    import starts_threads  # type: ignore[import-not-found]

    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)

    async def work(worker: ProcessWorker) -> None:
        assert (await worker.reset(1, _soon()))[0] == "True"

    _run(work, starts_threads.Env)
    assert "starts threads" in capfd.readouterr().err


def test_what_cannot_be_pickled_is_refused_with_advice() -> None:
    with pytest.raises(
        UsageError, match=r"env_fn <function .*<lambda>.* can't be pickled.*top level.*partial"
    ):
        ProcessWorker(lambda: Env(), "worker")


def test_a_registration_that_cannot_be_pickled_is_refused_with_advice() -> None:
    agentenv.register("MadeByLambda-v0", lambda: Env())
    try:
        with pytest.raises(
            UsageError, match=r"the registration of MadeByLambda-v0 can't be pickled.*\"module:Class\""
        ):
            ProcessWorker(functools.partial(agentenv.make, "MadeByLambda-v0"), "worker")
    finally:
        del gymnasium.registry["agentenv/MadeByLambda-v0"]


def test_no_server_starts_for_a_worker_that_is_never_used() -> None:
    worker = ProcessWorker(Env, "worker")
    assert not worker.is_running
    worker.end()
    assert asyncio.run(worker.join(0.0))
    assert not _children(os.getpid())


_SCRIPT = """
    import asyncio, os, sys
    import agentenv
    from agentenv.rollout.workers.process import ProcessWorker
    from agentenv.testing import EchoEnv

    print("top", flush=True)

    class Mine(EchoEnv):
        pass

    async def play(env_fn):
        worker = ProcessWorker(env_fn, "worker")
        try:
            loop = asyncio.get_running_loop()
            print((await worker.reset(1, loop.time() + 60))[0], flush=True)
        except agentenv.errors.UsageError as error:
            print("UsageError:", error, flush=True)
        worker.end()
        await worker.join(loop.time() + 60)
"""


def _script(tmp_path: Path, end: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(_SCRIPT) + end)
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=True)
    assert run.stderr == ""
    return run.stdout


def test_a_class_of_the_main_script_works_behind_a_guard(tmp_path: Path) -> None:
    out = _script(tmp_path, "if __name__ == '__main__':\n    asyncio.run(play(Mine))\n")
    assert out == "top\ntop\nSay the word delta.\n"


def test_the_main_script_is_not_imported_where_it_is_not_needed(tmp_path: Path) -> None:
    assert _script(tmp_path, "asyncio.run(play(EchoEnv))\n") == "top\nSay the word delta.\n"


def test_a_main_script_without_a_guard_gets_a_clear_error(tmp_path: Path) -> None:
    out = _script(tmp_path, "asyncio.run(play(Mine))\n")
    assert out.count("top\n") == 2
    assert "UsageError: the main script, imported in a process" in out and "if __name__ == '__main__'" in out


def test_a_class_typed_in_python_c_is_refused(tmp_path: Path) -> None:
    code = (
        textwrap.dedent(_SCRIPT)
        + "\ntry:\n    ProcessWorker(Mine, 'w')\nexcept ValueError as e:\n    print(e)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "interactive session or in `python -c`" in run.stdout


_KILLED = """
    import asyncio, os
    from agentenv.rollout.workers.process import ProcessWorker
    from {module} import Env

    async def main():
        loop = asyncio.get_running_loop()
        workers = [ProcessWorker(Env, f"w{{i}}") for i in range(3)]
        pids = [os.getpid()]
        for worker in workers:
            await worker.reset(1, loop.time() + 60)
            pids += [worker.pid, int((await worker.step("has_children", loop.time() + 60))[0])]
        hung = asyncio.create_task(workers[0].step("hangs", loop.time() + 1000))
        stubborn = asyncio.create_task(workers[1].step("hangs_for_good", loop.time() + 1000))
        await asyncio.sleep(0.2)
        print(*pids, flush=True)
        await asyncio.sleep(1000)

    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_rollout(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "killed_env.py").write_text(Path(__file__).read_text())
    script = tmp_path / "script.py"
    script.write_text(
        "import agentenv.rollout.workers.fork_server as f\nf.CLOSE_GRACE_S = 0.5\n"
        + textwrap.dedent(_KILLED).format(module="killed_env")
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 7
        pids += _children(parent.pid)
        assert len(pids) == 8 and all(map(_is_alive, pids))
        parent.send_signal(number)
        parent.wait(60)
        assert _until(lambda: not any(map(_is_alive, pids))), [pid for pid in pids if _is_alive(pid)]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_too_many_open_files_are_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[socket.socket, socket.socket]] = []
    real = socket.socketpair

    def second_one_fails() -> tuple[socket.socket, socket.socket]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(real())
        return made[0]

    async def work(worker: ProcessWorker) -> None:
        monkeypatch.setattr(socket, "socketpair", second_one_fails)
        with pytest.raises(UsageError, match=r"too many open files.*ulimit -n.*num_envs"):
            await worker.reset(1, _soon())
        monkeypatch.undo()
        assert all(end.fileno() == -1 for end in made[0])
        await worker.reset(1, _soon())

    _run(work)


def test_a_fork_server_that_cannot_be_started_fails_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(worker: ProcessWorker) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(EnvError, match="could not be started: no fork server"):
            await worker.reset(1, _soon())

    _run(work)


def test_a_platform_without_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "waitid")
    with pytest.raises(UsageError, match="use worker 'thread'"):
        ProcessWorker(Env, "worker")


def test_a_worker_can_be_ended_after_its_loop() -> None:
    async def start() -> ProcessWorker:
        worker = ProcessWorker(Env, "worker")
        await worker.reset(1, _soon())
        return worker

    worker = asyncio.run(start())
    assert worker.is_running
    worker.end()
    assert _until(lambda: not worker.is_running)
