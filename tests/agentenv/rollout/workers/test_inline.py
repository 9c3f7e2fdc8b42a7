"""Environments in the event loop: plain ones and coroutines, deadlines, errors, cancellation and close."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from agentenv import AsyncEnv, BaseEnv
from agentenv.errors import EnvError, EpisodeTimeoutError, SandboxError, UsageError
from agentenv.rollout.workers.inline import InlineWorker

_GOOD = ("seen", 1.0, True, False, {})


class Plain(BaseEnv):
    """Returns or raises what it was given."""

    max_turns = 4

    def __init__(self, result: Any = _GOOD, reset: Any = ("hello", {})) -> None:
        self.result, self.reset_result, self.closed = result, reset, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return _give(self.reset_result)

    def step(self, action: str) -> Any:
        return _give(self.result)

    def close(self) -> None:
        self.closed += 1


class Waiting(AsyncEnv):
    """Coroutines that wait before they answer."""

    def __init__(self, result: Any = _GOOD, wait_s: float = 0.0, close_s: float = 0.0) -> None:
        self.result, self.wait_s, self.close_s = result, wait_s, close_s
        self.cancelled, self.closed = 0, 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return "hello", {"seed": seed}

    async def step(self, action: str) -> Any:
        try:
            await asyncio.sleep(self.wait_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return _give(self.result)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(self.close_s)
        self.closed += 1


def _give(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def _soon(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def _run(env: Any, work: Callable[[InlineWorker], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        worker = InlineWorker(lambda: env, "worker-under-test")
        try:
            return await work(worker)
        finally:
            worker.end()
            assert await worker.join(_soon())
            assert not worker.is_running
            assert env.closed == 1

    return asyncio.run(whole())


async def _reset_and_step(worker: InlineWorker) -> Any:
    await worker.reset(1, _soon())
    return await worker.step("go", _soon())


@pytest.mark.parametrize("env", [Plain(), Waiting()])
def test_plain_and_coroutine_environments_are_played_and_closed_once(env: Any) -> None:
    async def work(worker: InlineWorker) -> None:
        assert worker.max_turns is None
        assert (await worker.reset(1, _soon()))[0] == "hello"
        assert worker.max_turns == env.max_turns
        assert await worker.step("go", _soon()) == _GOOD
        await worker.settle()

    _run(env, work)


def test_numpy_scalars_become_plain_python() -> None:
    result = _run(Plain(("o", np.float32(0.5), np.bool_(True), np.bool_(False), {})), _reset_and_step)
    assert [type(value) for value in result[1:4]] == [float, bool, bool]


@pytest.mark.parametrize("env_type", [Plain, Waiting])
@pytest.mark.parametrize(
    ("result", "match"),
    [
        ((b"bytes", 0.0, False, False, {}), "returned the observation b'bytes'"),
        (("o", float("inf"), False, False, {}), "returned the reward inf"),
        (None, "step returned None"),
    ],
)
def test_a_wrong_type_from_step_is_named(env_type: Any, result: Any, match: str) -> None:
    with pytest.raises(EnvError, match=match):
        _run(env_type(result), _reset_and_step)


def test_a_wrong_type_from_reset_is_named() -> None:
    with pytest.raises(EnvError, match=r"Plain.reset returned 'only text'"):
        _run(Plain(reset="only text"), _reset_and_step)


@pytest.mark.parametrize("env_type", [Plain, Waiting])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("no"), SystemExit(3), UsageError("bad row"), TimeoutError()]
)
def test_what_an_environment_raises_arrives_as_env_error_with_its_cause(
    env_type: Any, error: BaseException
) -> None:
    with pytest.raises(EnvError, match=r"step raised") as caught:
        _run(env_type(error), _reset_and_step)
    assert caught.value.__cause__ is error and caught.value.origin == type(error).__name__


@pytest.mark.parametrize("env_type", [Plain, Waiting])
def test_a_typed_error_stays_what_it_is(env_type: Any) -> None:
    with pytest.raises(SandboxError, match="gone"):
        _run(env_type(SandboxError("gone")), _reset_and_step)


@pytest.mark.parametrize(
    ("error", "expected"), [(UsageError("no such dataset"), UsageError), (OSError("busy"), EnvError)]
)
def test_trouble_in_making_the_environment_is_bad_input_only_where_it_says_so(
    error: Exception, expected: type[Exception]
) -> None:
    async def work() -> None:
        def broken() -> Plain:
            raise error

        worker = InlineWorker(broken, "worker-under-test")
        with pytest.raises(expected, match=str(error)) as caught:
            await worker.reset(0, _soon())
        assert type(caught.value) is expected
        worker.end()
        assert await worker.join(_soon())

    asyncio.run(work())


def test_a_coroutine_that_misses_its_deadline_is_cancelled() -> None:
    env = Waiting(wait_s=1000.0)

    async def work(worker: InlineWorker) -> None:
        await worker.reset(1, _soon())
        with pytest.raises(EpisodeTimeoutError, match="step of Waiting in worker-under-test") as caught:
            await worker.step("go", _soon(0.02))
        assert caught.value.stage == "step" and env.cancelled == 1

    _run(env, work)


def test_cancelling_a_call_cancels_the_coroutine_and_leaves_a_usable_worker() -> None:
    env = Waiting(wait_s=1000.0)

    async def work(worker: InlineWorker) -> None:
        await worker.reset(1, _soon())
        stepping = asyncio.create_task(worker.step("go", _soon()))
        await asyncio.sleep(0.01)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        assert env.cancelled == 1
        await worker.settle()
        env.wait_s = 0.0
        assert await worker.reset(2, _soon()) == ("hello", {"seed": 2})

    _run(env, work)


def test_many_coroutine_environments_wait_side_by_side() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        workers = [InlineWorker(lambda: Waiting(wait_s=0.5), f"w{i}") for i in range(200)]
        before = loop.time()
        await asyncio.gather(*(_reset_and_step(worker) for worker in workers))
        # One after another they would take 100 s.
        assert loop.time() - before < 50.0
        for worker in workers:
            worker.end()

    asyncio.run(work())


def test_a_closing_coroutine_is_waited_for_until_the_deadline() -> None:
    env = Waiting(close_s=0.1)

    async def work(worker: InlineWorker) -> None:
        await worker.reset(1, _soon())
        worker.end()
        worker.end()
        assert worker.is_running
        assert await worker.join(_soon()) and env.closed == 1

    _run(env, work)


def test_a_close_that_hangs_does_not_hold_join_up() -> None:
    async def work() -> None:
        worker = InlineWorker(lambda: Waiting(close_s=1000.0), "worker-under-test")
        await worker.reset(1, _soon())
        worker.end()
        assert not await worker.join(_soon(0.02))

    asyncio.run(work())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failing_close_is_logged(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Plain):
        def close(self) -> Any:
            super().close()

            async def fail() -> None:
                raise OSError("busy")

            if asynchronous:
                return fail()
            raise OSError("busy")

    _run(Sticky(), _reset_and_step)
    assert "closing the environment failed" in caplog.text


def test_an_ended_worker_and_a_step_before_reset_are_refused() -> None:
    async def work(worker: InlineWorker) -> None:
        with pytest.raises(EnvError, match="step before reset"):
            await worker.step("go", _soon())
        await worker.reset(1, _soon())
        worker.end()
        with pytest.raises(EnvError, match="worker-under-test has ended"):
            await worker.reset(1, _soon())

    _run(Plain(), work)
