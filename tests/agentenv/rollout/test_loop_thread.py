"""The loop in a thread: calls end when the loop is gone or blocked."""

import asyncio
import threading
import time

import pytest

from agentenv.errors import RolloutError
from agentenv.rollout.loop_thread import LoopThread


async def _answer(value: int) -> int:
    await asyncio.sleep(0.01)
    return value


def test_a_call_returns_what_the_coroutine_returns() -> None:
    thread = LoopThread("loop-under-test")
    assert thread.call(_answer(3)) == 3
    thread.stop()
    thread.stop()
    assert not thread.is_running
    with pytest.raises(RolloutError, match="has ended"):
        thread.call(_answer(4))


def test_a_blocked_loop_is_given_up_and_left_behind() -> None:
    gate = threading.Event()

    async def blocking() -> None:
        gate.wait(120)

    thread = LoopThread("loop-under-test", unresponsive_s=0.7)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"did not respond for 0\.7 s"):
        thread.call(blocking())
    thread.stop()
    assert 0.7 < time.monotonic() - started < 60.0
    assert thread.is_running  # still blocked: nobody waits for it
    gate.set()


def test_a_loop_that_responds_is_waited_for_as_long_as_the_call_takes() -> None:
    thread = LoopThread("loop-under-test", unresponsive_s=0.7)

    async def long() -> str:
        await asyncio.sleep(2.2)
        return "done"

    assert thread.call(long()) == "done"
    thread.stop()


def test_a_loop_that_ends_while_a_call_waits_is_noticed() -> None:
    thread = LoopThread("loop-under-test")

    async def ending() -> None:
        asyncio.get_running_loop().call_later(0.05, asyncio.get_running_loop().stop)
        await asyncio.sleep(300)

    started = time.monotonic()
    with pytest.raises(RolloutError):
        thread.call(ending())
    assert time.monotonic() - started < 60.0


def test_stop_takes_a_loop_that_has_closed_while_its_thread_still_lives() -> None:
    closed, leave = threading.Event(), threading.Event()

    class Lingering(LoopThread):
        def _run(self) -> None:
            super()._run()
            closed.set()
            leave.wait(120)

    thread = Lingering("loop-under-test", unresponsive_s=0.2)
    thread._loop.call_soon_threadsafe(thread._loop.stop)
    assert closed.wait(60)
    thread.stop()
    assert thread.is_running
    leave.set()
    thread._thread.join(60)
    thread.stop()
    assert not thread.is_running
