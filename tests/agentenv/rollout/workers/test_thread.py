"""Environments in their threads: types, exceptions, deadlines, cancellation, close."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from agentenv import BaseEnv
from agentenv.errors import EnvError, EpisodeTimeoutError, SandboxError, UsageError
from agentenv.rollout.workers.thread import ThreadWorker

_GOOD = ("seen", 0.5, False, False, {})


class Env(BaseEnv):
    """Returns or raises what it is told; ``gate`` holds a step up."""

    def __init__(
        self, step: Any = _GOOD, reset: Any = ("hello", {}), gate: threading.Event | None = None
    ) -> None:
        self.step_result, self.reset_result, self.gate = step, reset, gate
        self.threads: set[int] = set()
        self.closed = 0

    def _give(self, result: Any) -> Any:
        self.threads.add(threading.get_ident())
        if isinstance(result, BaseException):
            raise result
        return result

    def reset(self, **_: Any) -> Any:
        return self._give(self.reset_result)

    def step(self, action: str) -> Any:
        if self.gate is not None:
            self.gate.wait(120)
        return self._give(self.step_result)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


def _soon(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def _run(work: Callable[[ThreadWorker, Env], Awaitable[Any]], env: Env, *, join: bool = True) -> Any:
    async def whole() -> Any:
        worker = ThreadWorker(lambda: env, "worker-under-test")
        try:
            return await work(worker, env)
        finally:
            worker.end()
            assert await worker.join(_soon()) or not join

    return asyncio.run(whole())


async def _reset_and_step(worker: ThreadWorker, env: Env) -> Any:
    await worker.reset(1, _soon())
    return await worker.step("go", _soon())


def test_an_environment_is_made_used_and_closed_in_one_thread() -> None:
    env = Env()
    assert _run(_reset_and_step, env) == _GOOD
    assert env.closed == 1
    assert len(env.threads) == 1 and threading.get_ident() not in env.threads


def test_numpy_scalars_become_plain_python() -> None:
    result = _run(_reset_and_step, Env(("o", np.float32(0.5), np.bool_(True), np.bool_(False), {})))
    assert result == ("o", 0.5, True, False, {})
    assert [type(value) for value in result[1:4]] == [float, bool, bool]


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (
            (b"bytes", 0.0, False, False, {}),
            r"Env.step returned the observation b'bytes' \(bytes\), must be a str",
        ),
        (("o", float("nan"), False, False, {}), "Env.step returned the reward nan"),
        (("o", "1.0", False, False, {}), "Env.step returned the reward '1.0'"),
        (("o", 0.0, 1, False, {}), "terminated = 1"),
        (("o", 0.0, False, None, {}), "truncated = None"),
        (("o", 0.0, False, False, None), "the info None"),
        (("o", 0.0, False, {}), "must be .observation, reward"),
        (None, "Env.step returned None"),
    ],
)
def test_a_wrong_type_from_step_is_named_with_the_environment(result: Any, match: str) -> None:
    with pytest.raises(EnvError, match=match):
        _run(_reset_and_step, Env(result))


@pytest.mark.parametrize(
    ("result", "match"), [("only text", "Env.reset returned"), ((3, {}), "observation 3")]
)
def test_a_wrong_type_from_reset_is_named_with_the_environment(result: Any, match: str) -> None:
    with pytest.raises(EnvError, match=match):
        _run(_reset_and_step, Env(reset=result))


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), SystemExit(3), UsageError("bad row")])
def test_what_an_environment_raises_arrives_as_env_error_with_its_cause(error: BaseException) -> None:
    with pytest.raises(EnvError, match=r"Env.step raised") as caught:
        _run(_reset_and_step, Env(error))
    assert caught.value.__cause__ is error


def test_a_typed_error_of_the_environment_stays_what_it_is() -> None:
    with pytest.raises(SandboxError, match="gone"):
        _run(_reset_and_step, Env(SandboxError("gone")))


def test_bad_input_when_the_environment_is_made_is_a_usage_error() -> None:
    async def work() -> None:
        def broken() -> Env:
            raise UsageError("no such dataset")

        worker = ThreadWorker(broken, "worker-under-test")
        with pytest.raises(UsageError, match="no such dataset"):
            await worker.reset(0, _soon())
        worker.end()
        assert await worker.join(_soon())

    asyncio.run(work())


def test_a_hanging_step_ends_at_its_deadline_and_the_environment_is_closed_when_it_returns() -> None:
    gate = threading.Event()

    async def work(worker: ThreadWorker, env: Env) -> None:
        await worker.reset(1, _soon())
        with pytest.raises(EpisodeTimeoutError, match="step of Env in worker-under-test") as caught:
            await worker.step("go", _soon(0.03))
        assert caught.value.stage == "step"
        with pytest.raises(EnvError, match="has ended"):
            await worker.reset(1, _soon())
        assert not await worker.join(_soon(0.02))
        assert env.closed == 0
        gate.set()
        assert await worker.join(_soon())
        assert env.closed == 1

    _run(work, Env(gate=gate))


def test_a_call_after_a_cancelled_one_waits_for_it() -> None:
    gate = threading.Event()

    async def work(worker: ThreadWorker, env: Env) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("go", _soon()))
        await asyncio.sleep(0.02)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        asyncio.get_running_loop().call_later(0.02, gate.set)
        assert await worker.reset(2, _soon()) == ("hello", {})

    _run(work, Env(gate=gate))


def test_a_call_after_a_cancelled_one_that_hangs_fails_under_the_first_ones_stage() -> None:
    gate = threading.Event()

    async def work(worker: ThreadWorker, env: Env) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("go", _soon(0.5)))
        await asyncio.sleep(0.01)
        stepping.cancel()
        with pytest.raises(EpisodeTimeoutError) as caught:
            await worker.reset(2, _soon())
        assert caught.value.stage == "step"
        gate.set()

    _run(work, Env(gate=gate))


def test_a_failing_close_is_logged_and_the_thread_ends(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Env):
        def close(self) -> None:
            raise OSError("busy")

    _run(_reset_and_step, Sticky())
    assert "closing the environment failed" in caplog.text
