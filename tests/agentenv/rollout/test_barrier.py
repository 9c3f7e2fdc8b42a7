"""The barrier of batch rollout: parties go on together, and whoever leaves holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from agentenv.rollout.barrier import TurnBarrier
from agentenv.simulation.clock import VirtualLoop


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.call(coroutine)
    finally:
        loop.stop()


async def _party(barrier: TurnBarrier, seconds: list[float]) -> list[float]:
    """Joins, then works and arrives again and again; returns when it went on."""
    time = asyncio.get_running_loop().time
    barrier.join()
    went_on = []
    try:
        for work_s in seconds:
            await asyncio.sleep(work_s)
            await barrier.arrive()
            went_on.append(time())
    finally:
        barrier.leave()
    return went_on


def test_all_go_on_when_the_slowest_has_arrived() -> None:
    async def work() -> None:
        barrier = TurnBarrier()
        parties = [[1.0, 5.0], [4.0, 1.0], [2.0, 2.0]]
        assert await asyncio.gather(*(_party(barrier, seconds) for seconds in parties)) == [[4.0, 9.0]] * 3

    _run(work())


def test_one_that_leaves_releases_those_that_wait() -> None:
    async def work() -> None:
        barrier = TurnBarrier()
        went_on = await asyncio.gather(_party(barrier, [1.0, 1.0, 1.0]), _party(barrier, [3.0]))
        assert went_on == [[3.0, 4.0, 5.0], [3.0]]

    _run(work())


def test_one_that_leaves_instead_of_arriving_releases_those_that_wait() -> None:
    async def work() -> None:
        barrier = TurnBarrier()
        waiting = [asyncio.create_task(_party(barrier, [1.0])) for _ in range(2)]
        barrier.join()
        await asyncio.sleep(5.0)
        assert not any(party.done() for party in waiting)
        barrier.leave()
        assert [await party for party in waiting] == [[5.0], [5.0]]

    _run(work())


def test_one_that_is_cancelled_while_waiting_or_working_holds_up_nobody() -> None:
    async def work() -> None:
        for cancelled_at in (0.5, 1.5):  # while it works, and while it waits
            barrier = TurnBarrier()
            start = asyncio.get_running_loop().time()
            cancelled = asyncio.create_task(_party(barrier, [1.0, 1.0]))
            others = [asyncio.create_task(_party(barrier, [2.0, 1.0])) for _ in range(2)]
            await asyncio.sleep(cancelled_at)
            cancelled.cancel()
            assert [[t - start for t in await other] for other in others] == [[2.0, 3.0]] * 2
            assert cancelled.cancelled()

    _run(work())


def test_one_that_is_cancelled_in_the_moment_of_its_release_is_not_waited_for_again() -> None:
    async def work() -> None:
        barrier = TurnBarrier()
        first = asyncio.create_task(_party(barrier, [1.0, 1.0]))
        second = asyncio.create_task(_party(barrier, [2.0, 1.0]))
        asyncio.get_running_loop().call_at(2.0, first.cancel)
        assert await second == [2.0, 3.0]

    _run(work())


def test_one_that_joins_late_is_waited_for() -> None:
    async def work() -> None:
        barrier = TurnBarrier()
        early = asyncio.create_task(_party(barrier, [2.0]))
        await asyncio.sleep(1.0)
        late = asyncio.create_task(_party(barrier, [5.0]))
        assert await early == [6.0] and await late == [6.0]

    _run(work())


def test_a_single_party_never_waits() -> None:
    async def work() -> None:
        assert await _party(TurnBarrier(), [1.0, 1.0]) == [1.0, 2.0]

    _run(work())
