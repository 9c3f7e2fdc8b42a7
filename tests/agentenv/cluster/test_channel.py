"""Messages in batches between two loops, over an actor that is only a function: order, ends of calls, losses."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.cluster import channel as channel_module
from agentenv.cluster.channel import ActorChannel, ActorEnd, ActorLostError
from agentenv.errors import AgentEnvError, EnvError, InfrastructureError, SandboxError
from agentenv.simulation.clock import VirtualLoop


class _Reference:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class FakeActor:
    """An actor in the same loop, whose calls are delayed as told and whose messages are pickled on their ways."""

    def __init__(self, end: ActorEnd, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._end, self._delay_s = end, delay_s
        self.under_way = self.most_under_way = self.num_calls = 0
        self.dies: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.exchange = self

    def remote(self, number: int, messages: Any) -> _Reference:
        if self.dies is not None:
            raise self.dies
        future: Future[Any] = Future()
        self.num_calls += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        task = asyncio.create_task(self._call(number, pickle.dumps(messages), future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _Reference(future)

    async def _call(self, number: int, messages: bytes, future: Future[Any]) -> None:
        await asyncio.sleep(self._delay_s())
        answer = asyncio.ensure_future(self._end.exchange(number, pickle.loads(messages)))
        while not answer.done() and self.dies is None:
            await asyncio.wait({answer}, timeout=0.005)
        self.under_way -= 1
        if self.dies is not None:
            answer.cancel()
            future.set_exception(self.dies)
            return
        data = pickle.dumps(answer.result())
        await asyncio.sleep(self._delay_s())
        future.set_result(pickle.loads(data))


def _run(scenario: Coroutine[Any, Any, None]) -> None:
    """In virtual time, which the machine's load does not change."""

    async def limited() -> None:
        async with asyncio.timeout(20.0):
            await scenario

    loop = VirtualLoop()
    try:
        loop.call(limited())
    finally:
        loop.stop()


def _now() -> float:
    return asyncio.get_running_loop().time()


class Pair:
    """Both ends; inside a loop."""

    def __init__(
        self, handler: Any, delay_s: Callable[[], float] = lambda: 0.0, answering: Any = None
    ) -> None:
        self.end = ActorEnd(handler)
        self.actor = FakeActor(self.end, delay_s)
        self.losses: list[ActorLostError] = []
        self.channel = ActorChannel(self.actor, self.losses.append, answering)
        self.call = self.channel.mailbox.call


async def _echo(method: str, *arguments: Any) -> Any:
    if method == "sleep":
        await asyncio.sleep(arguments[0])
    if method == "raise":
        raise arguments[0]
    return arguments


def test_calls_are_answered_with_results_and_exceptions() -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        assert await pair.call("echo", 1, "two") == (1, "two")
        error = EnvError("it broke")
        error.origin = "ZeroDivisionError"
        with pytest.raises(EnvError, match="it broke") as caught:
            await pair.call("raise", error)
        assert caught.value.origin == "ZeroDivisionError"
        assert "In an actor" in "".join(caught.value.__notes__)

    _run(scenario())


def test_an_exception_that_cannot_be_pickled_arrives_as_its_text() -> None:
    class LocalError(Exception):
        pass

    async def handler(method: str) -> None:
        raise LocalError("only here")

    async def scenario() -> None:
        with pytest.raises(AgentEnvError, match="LocalError: only here"):
            await Pair(handler).call("go")

    _run(scenario())


def test_a_class_of_errors_that_only_the_actor_has_arrives_as_the_nearest_that_both_have() -> None:
    class DiskError(SandboxError):
        def __init__(self, disk: int) -> None:
            super().__init__(f"disk {disk} is full")

    async def handler(method: str) -> None:
        error = DiskError(3)
        error.add_note("said the environment")
        raise error

    async def scenario() -> None:
        with pytest.raises(SandboxError, match=r"^disk 3 is full") as caught:
            await Pair(handler).call("go")
        assert type(caught.value) is SandboxError
        assert "said the environment" in caught.value.__notes__

    _run(scenario())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_calls_begin_in_the_order_in_which_they_were_made_whatever_the_way_does(
    seed: int, calls: int
) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)
        begun: list[int] = []

        async def handler(method: str, number: int) -> int:
            begun.append(number)
            await asyncio.sleep(chance.choice([0.0, 0.001, 0.004]))
            return number

        pair = Pair(handler, lambda: chance.choice([0.0, 0.0, 0.002]))
        made = []
        for number in range(calls):
            made.append(pair.channel.mailbox.start("go", number))
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice([0.0, 0.003]))
        assert await asyncio.gather(*made) == list(range(calls))
        assert begun == list(range(calls))
        assert pair.actor.most_under_way <= 2

    _run(scenario())


def test_many_calls_share_few_calls_of_the_actor() -> None:
    async def scenario() -> None:
        pair = Pair(_echo, lambda: 0.005)
        await asyncio.gather(*(pair.call("sleep", 0.001) for _ in range(500)))
        assert pair.actor.num_calls <= 10
        assert pair.channel.num_calls == pair.actor.num_calls

    _run(scenario())


def test_a_quick_answer_does_not_wait_for_a_slow_one() -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        slow = pair.channel.mailbox.start("sleep", 5.0)
        await asyncio.sleep(0.05)
        began = _now()
        for _ in range(5):
            await pair.call("sleep", 0.001)
        assert _now() - began < 1.0
        assert not slow.done()

    _run(scenario())


def test_with_nothing_to_say_a_call_stays_and_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "LONGEST_STAY_S", 0.05)

    async def scenario() -> None:
        pair = Pair(_echo)
        assert await pair.call("sleep", 0.3) == (0.3,)
        assert 3 <= pair.actor.num_calls <= 12

    _run(scenario())


def test_without_a_call_to_answer_nothing_is_under_way() -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        await pair.call("echo")
        before = pair.actor.num_calls
        await asyncio.sleep(0.05)
        assert pair.actor.num_calls == before and pair.actor.under_way == 0

    _run(scenario())


def test_a_cancelled_call_is_cancelled_on_the_other_side_and_a_started_one_is_not() -> None:
    async def scenario() -> None:
        ended: list[str] = []

        async def handler(method: str) -> None:
            try:
                await asyncio.sleep(0.2)
                ended.append(f"{method} done")
            except asyncio.CancelledError:
                ended.append(f"{method} cancelled")
                raise

        pair = Pair(handler)
        called = asyncio.create_task(pair.call("called"))
        started = pair.channel.mailbox.start("started")
        waiting = asyncio.create_task(asyncio.wait({started}))
        await asyncio.sleep(0.05)
        called.cancel()
        waiting.cancel()
        await asyncio.sleep(0.3)
        assert sorted(ended) == ["called cancelled", "started done"]
        assert called.cancelled() and started.done()

    _run(scenario())


def test_the_actor_calls_too_and_is_answered_while_it_answers() -> None:
    async def scenario() -> None:
        async def answering(method: str, number: int) -> int:
            await asyncio.sleep(0.001)
            return 2 * number

        async def handler(method: str, number: int) -> Any:
            return await pair.end.mailbox.call("double", number)

        pair = Pair(handler, lambda: 0.001, answering)
        pair.channel.open()
        began = _now()
        assert await asyncio.gather(*(pair.call("go", n) for n in range(50))) == [2 * n for n in range(50)]
        for number in range(10):
            assert await pair.end.mailbox.call("double", number) == 2 * number
        assert _now() - began < 2.0
        assert pair.actor.most_under_way <= 2

    _run(scenario())


@pytest.mark.parametrize("when", ["while it answers", "before it is asked"])
def test_the_loss_of_the_actor_ends_every_call_and_every_later_one(when: str) -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        await pair.call("echo")
        if when == "before it is asked":
            pair.actor.dies = RuntimeError("gone")
        calls = [pair.channel.mailbox.start("sleep", 10.0) for _ in range(3)]
        await asyncio.sleep(0.03)
        pair.actor.dies = RuntimeError("gone")
        for call in calls:
            with pytest.raises(ActorLostError, match="RuntimeError"):
                await call
        with pytest.raises(ActorLostError):
            await pair.call("echo")
        assert len(pair.losses) == 1

    _run(scenario())


def test_an_actor_that_lives_and_says_nothing_is_lost_and_one_that_says_little_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "LONGEST_STAY_S", 0.05)
    monkeypatch.setattr(channel_module, "LONGEST_SILENCE_S", 0.3)

    async def scenario() -> None:
        pair = Pair(_echo)
        assert await pair.call("sleep", 0.9) == (0.9,)
        await asyncio.sleep(0.4)  # nothing is asked, so no answer is due
        assert await pair.call("echo") == () and not pair.losses
        pair.actor.remote = lambda *batch: _Reference(Future())  # type: ignore[method-assign]
        began = _now()
        with pytest.raises(ActorLostError, match=r"no answer for 0\.3 s"):
            await pair.call("echo")
        assert 0.25 < _now() - began < 2.0
        assert len(pair.losses) == 1

    _run(scenario())


def test_an_answer_that_comes_after_the_loss_changes_nothing() -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        kept: Future[Any] = Future()
        futures = iter([kept])
        remote = pair.actor.remote
        pair.actor.remote = lambda *batch: _Reference(next(futures))  # type: ignore[method-assign]
        first = pair.channel.mailbox.start("echo", 1)
        await asyncio.sleep(0.01)
        pair.actor.remote, pair.actor.dies = remote, RuntimeError("gone")  # type: ignore[method-assign]
        second = pair.channel.mailbox.start("echo", 2)
        for call in (first, second):
            with pytest.raises(ActorLostError):
                await call
        kept.set_result([("done", 0, True, "late")])
        await asyncio.sleep(0.02)
        assert isinstance(first.exception(), ActorLostError) and len(pair.losses) == 1

    _run(scenario())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 12))
def test_every_call_ends_wherever_the_actor_dies_and_whatever_is_cancelled(
    seed: int, calls: int, dies_after: int
) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)

        async def handler(method: str, number: int) -> int:
            await asyncio.sleep(chance.choice([0.0, 0.001, 0.004]))
            return number

        pair = Pair(handler, lambda: chance.choice([0.0, 0.0, 0.002]))
        made = []
        for number in range(calls):
            made.append(asyncio.create_task(pair.call("go", number)))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.choice([0.0, 0.002]))
            if chance.random() < 0.2:
                chance.choice(made).cancel()
            if number == dies_after:
                pair.actor.dies = RuntimeError("gone")
        ends = await asyncio.gather(*made, return_exceptions=True)
        for number, end in enumerate(ends):
            assert end == number or isinstance(end, (ActorLostError, asyncio.CancelledError))
        if dies_after >= calls:
            assert not pair.losses and not any(isinstance(end, ActorLostError) for end in ends)

    _run(scenario())


def test_what_the_rollout_was_answering_is_cancelled_with_the_loss() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def answering(method: str) -> None:
            try:
                await asyncio.sleep(10.0)
            finally:
                ended.set()

        pair = Pair(_echo, answering=answering)
        pair.channel.open()
        asked = asyncio.create_task(pair.end.mailbox.call("generate"))
        await asyncio.sleep(0.05)
        pair.actor.dies = RuntimeError("gone")
        await ended.wait()
        asked.cancel()

    _run(scenario())


def test_a_closed_channel_sends_nothing_and_tells_nobody() -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        call = pair.channel.mailbox.start("sleep", 10.0)
        await asyncio.sleep(0.02)
        pair.channel.close()
        with pytest.raises(InfrastructureError, match="closed"):
            await call
        before = pair.actor.num_calls
        pair.actor.dies = RuntimeError("gone")
        await asyncio.sleep(0.05)
        assert pair.actor.num_calls == before and not pair.losses

    _run(scenario())


def test_a_call_that_nobody_answers_is_refused() -> None:
    async def scenario() -> None:
        pair = Pair(_echo)
        pair.channel.mailbox.start("sleep", 0.2)
        with pytest.raises(InfrastructureError, match="'generate', which nothing here answers"):
            await pair.end.mailbox.call("generate")

    _run(scenario())
