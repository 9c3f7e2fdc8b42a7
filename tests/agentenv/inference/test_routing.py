"""The router: least loaded, sticky, affine, and fair to engines of different speed."""

import asyncio
import random
import time
import zlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from agentenv.inference import GenerationRequest, LLMProxy
from agentenv.inference.routing import Router
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine


def _virtual(coroutine: Coroutine[Any, Any, None]) -> None:
    runner = VirtualLoop()
    try:
        runner.call(coroutine)
    finally:
        runner.stop()


def test_a_new_episode_goes_where_the_fewest_requests_are() -> None:
    router = Router(3)
    assert [router.begin(name, "", 0.0) for name in "abc"] == [0, 1, 2]
    router.end(1, 1.0)
    assert router.begin("d", "", 1.0) == 1


def test_among_equally_loaded_engines_the_one_with_the_fewest_episodes_is_taken() -> None:
    router = Router(2)
    for name in "abcd":
        router.end(router.begin(name, "", 0.0), 0.0)  # between turns: no request in flight anywhere
    assert Counter(home for home, _ in router._home.values()) == {0: 2, 1: 2}


def test_an_episode_stays_with_its_engine_until_it_is_released() -> None:
    router = Router(2)
    home = router.begin("a", "", 0.0)
    router.end(home, 0.0)
    others = [router.begin(f"b{i}", "", 0.0) for i in range(6)]
    assert others.count(1 - home) == 3
    for _ in range(5):  # however busy its engine is
        assert router.begin("a", "", 0.0) == home
    for _ in range(5):
        router.end(home, 0.0)
    assert router.release("a") == home
    assert router.release("a") is None
    for index in others:
        router.end(index, 0.0)
    assert router._load == [0, 0]


def test_episodes_of_one_affinity_share_an_engine_until_the_last_is_released() -> None:
    router = Router(4)
    assert len({router.begin(f"a{i}", "group a", 0.0) for i in range(8)}) == 1
    assert len({router.begin(f"b{i}", "group b", 0.0) for i in range(8)}) == 1
    assert len({home for home, _ in router._home.values()}) == 2
    for i in range(8):
        router.release(f"a{i}")
    assert set(router._shared) == {"group b"}
    for i in range(8):
        router.release(f"b{i}")
    assert not router._shared and not router._sharers and not router._home and router._homes == [0] * 4


def test_requests_without_an_episode_leave_no_trace() -> None:
    router = Router(2)
    indices = [router.begin("", "", 0.0) for _ in range(10)]
    assert indices.count(0) == indices.count(1) == 5
    for index in indices:
        router.end(index, 1.0)
    assert not router._home and router._load == [0, 0]


def test_busy_time_is_the_time_with_at_least_one_request() -> None:
    router = Router(2)
    first = router.begin("a", "", 1.0)
    router.begin("a", "", 2.0)
    router.end(first, 4.0)
    assert router.busy_s(5.0) == 4.0  # from 1 to 5, still going on
    router.end(first, 6.0)
    router.begin("b", "", 8.0)
    assert router.busy_s(10.0) == 5.0 + 2.0  # 1 to 6 on one engine, 8 to 10 on the other


@pytest.mark.parametrize(("speeds", "turns"), [((4, 1), 1), ((4, 1), 5), ((4, 2, 1, 1), 1), ((1, 1, 1), 3)])
@pytest.mark.parametrize("env_s", [0.0, 2.0])
def test_each_engine_gets_the_share_of_the_episodes_that_is_its_share_of_the_speed(
    speeds: tuple[int, ...], turns: int, env_s: float
) -> None:
    """Closed loop, as in a rollout: 64 slots, a new episode as one ends, more than the engines can serve."""
    engines = [SimulatedEngine(DecodeModel(base_s=0.1 / speed, knee=4.0), length=_tokens) for speed in speeds]
    served: Counter[int] = Counter()

    async def slot(proxy: LLMProxy, number: int) -> None:
        loop, episode = asyncio.get_running_loop(), 0
        while loop.time() < 2_000.0:
            name = f"{number}-{episode}"
            for turn in range(turns):
                await proxy.generate(GenerationRequest(f"{name}/{turn}", [1], episode_id=name, deadline=1e9))
                await asyncio.sleep(env_s)
            index = await _release(proxy, name)
            if loop.time() > 300.0:  # the filling at the start is equal by design
                served[index] += 1
            episode += 1

    async def scenario() -> None:
        proxy = LLMProxy(engines)
        await asyncio.gather(*(slot(proxy, number) for number in range(64)))
        await proxy.close()

    _virtual(scenario())
    total = sum(served.values())
    shares = [served[index] / total for index in range(len(speeds))]
    expected = [speed / sum(speeds) for speed in speeds]
    assert shares == pytest.approx(expected, abs=0.05)


def _tokens(request: GenerationRequest) -> int:
    """20 on average; of one length they would end, and wait for their environments, all at once."""
    return 5 + zlib.crc32(request.request_id.encode()) % 31


async def _release(proxy: LLMProxy, name: str) -> int:
    index = proxy._router._home[name][0]
    await proxy.release(name)
    return index


def test_a_call_takes_as_long_with_a_hundred_thousand_episodes_as_with_a_hundred() -> None:
    def seconds(episodes: int) -> float:
        router = Router(4)
        for number in range(episodes):
            router.begin(f"old {number}", f"group {number // 8}", 0.0)
        best = 1.0
        for attempt in range(5):
            began = time.thread_time()
            for number in range(1_000):
                name = f"new {attempt} {number}"
                router.end(router.begin(name, f"affinity {number // 8}", 0.0), 0.0)
                router.release(name)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(100_000) < 5.0 * seconds(100)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_engine_chosen_is_the_one_that_a_search_through_all_would_find(
    seed: int,
) -> None:
    chance, router = random.Random(seed), Router(7)
    running: list[int] = []
    out: set[int] = set()
    for number in range(3_000):
        draw = chance.random()
        if draw < 0.45:
            standing = zip(router._load, router._homes, range(7), strict=True)
            candidates = [one for one in standing if one[2] not in out or len(out) == 7]
            running.append(router.begin(f"e{number}", "", 0.0))
            assert running[-1] == min(candidates)[2]
        elif draw < 0.85 and running:
            router.end(running.pop(chance.randrange(len(running))), 0.0)
        elif draw < 0.95:
            router.release(f"e{chance.randrange(number + 1)}")
        elif (index := chance.randrange(7)) in out:
            out.remove(index)
            router.take_in(index)
        else:
            out.add(index)
            router.take_out(index)


def test_a_new_episode_takes_about_as_long_with_a_thousand_engines_as_with_ten() -> None:
    def seconds(engines: int) -> float:
        router, best = Router(engines), 1.0
        for attempt in range(5):
            began = time.thread_time()
            for number in range(1_000):
                router.begin(f"{attempt} {number}", "", 0.0)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(1_000) < 10.0 * seconds(10)
