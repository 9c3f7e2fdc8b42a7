"""Virtual time: order, deadlines, deadlocks and ends."""

import asyncio
import threading
import time

import pytest

from agentenv.errors import RolloutError
from agentenv.simulation.clock import VirtualLoop


@pytest.fixture
def runner():
    loop = VirtualLoop()
    yield loop
    loop.stop()


def test_a_sleep_of_a_day_takes_no_time_and_is_exact(runner):
    began = time.monotonic()
    runner.call(asyncio.sleep(3 * 86_400.0))
    assert runner.now == 3 * 86_400.0
    assert time.monotonic() - began < 60.0


def test_what_sleeps_longer_wakes_later_and_time_stands_still_between_calls(runner):
    order = []

    async def sleeper(name, seconds):
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def start():
        return [
            asyncio.ensure_future(sleeper(*item)) for item in (("late", 5.0), ("soon", 1.0), ("mid", 2.5))
        ]

    tasks = runner.call(start())
    assert runner.now == 0.0
    runner.call(asyncio.sleep(3.0))
    assert order == [("soon", 1.0), ("mid", 2.5)]
    assert runner.now == 3.0
    runner.call(asyncio.wait_for(tasks[0], 10.0))
    assert order[-1] == ("late", 5.0)
    assert runner.now == 5.0


def test_timers_of_one_time_all_fire_before_time_goes_on(runner):
    async def together():
        loop = asyncio.get_running_loop()
        fired = []
        for seconds in [2.0, 2.5] * 25:
            loop.call_at(seconds, lambda: fired.append(loop.time()))
        await asyncio.sleep(3.0)
        return fired

    assert runner.call(together()) == [2.0] * 25 + [2.5] * 25


def test_a_timeout_fires_at_its_time_and_not_before(runner):
    async def race():
        async with asyncio.timeout(10.0):
            await asyncio.sleep(9.999)
        async with asyncio.timeout(10.0):
            await asyncio.sleep(10.001)

    with pytest.raises(TimeoutError):
        runner.call(race())
    assert runner.now == pytest.approx(19.999)


def test_timers_fire_after_months_when_a_nanosecond_is_less_than_a_rounding_error(runner):
    async def tick():
        for _ in range(1000):
            await asyncio.sleep(0.1)

    runner.call(asyncio.sleep(3e8))
    runner.call(tick())
    assert runner.now == pytest.approx(3e8 + 100.0)


def test_a_wait_that_nothing_can_end_is_named_a_deadlock_with_its_time_and_task(runner):
    async def hang():
        await asyncio.sleep(7.0)
        await asyncio.Event().wait()

    async def start():
        asyncio.current_task().set_name("the-hanging-one")
        await hang()

    with pytest.raises(RolloutError, match=r"deadlocked at 7 s: .* 1 tasks wait \(the-hanging-one\)"):
        runner.call(start())
    # The hanging call was cancelled; the loop is usable.
    runner.call(asyncio.sleep(1.0))
    assert runner.now == 8.0


def test_a_deadlock_cancels_the_call_that_met_it(runner):
    ended = []

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(RolloutError):
        runner.call(hang())
    assert ended == [True]


def test_what_a_call_raises_arrives(runner):
    async def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        runner.call(fail())


def test_an_interrupted_call_is_cancelled(runner):
    ended = []

    async def interrupted():
        asyncio.get_running_loop().call_later(1.0, _interrupt)
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(asyncio.get_running_loop().time())

    with pytest.raises(KeyboardInterrupt):
        runner.call(interrupted())
    assert ended == [1.0]


def _interrupt():
    raise KeyboardInterrupt


def test_an_executor_runs_in_the_callers_thread_and_takes_no_time(runner):
    async def compute():
        return await asyncio.to_thread(threading.get_ident)

    assert runner.call(compute()) == threading.get_ident()
    assert runner.now == 0.0


def test_an_executors_exception_arrives(runner):
    async def compute():
        return await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        runner.call(compute())


def test_stop_cancels_what_is_left_and_may_be_called_again(runner):
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def start():
        return asyncio.ensure_future(forever())

    runner.call(start())
    runner.call(asyncio.sleep(2.0))
    assert runner.is_running
    runner.stop()
    runner.stop()
    assert ended == [True]
    assert not runner.is_running
    with pytest.raises(RolloutError, match="has ended"):
        runner.call(asyncio.sleep(0))


def test_two_runs_of_the_same_coroutines_give_the_same_events():
    def events():
        loop = VirtualLoop()
        seen = []

        async def worker(number):
            for turn in range(20):
                await asyncio.sleep((number * 7919 + turn * 104_729) % 97 / 10)
                seen.append((round(asyncio.get_running_loop().time(), 9), number))

        async def all_of_them():
            await asyncio.gather(*(worker(number) for number in range(20)))

        loop.call(all_of_them())
        loop.stop()
        return seen

    first = events()
    assert first == events()
    assert [moment for moment, _ in first] == sorted(moment for moment, _ in first)
