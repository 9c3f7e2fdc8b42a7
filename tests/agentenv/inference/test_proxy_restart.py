"""Weight updates in the middle of turns, requests with a callback, and engines that fail or hang at an update."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from agentenv.errors import EpisodeTimeoutError, ModelError, UsageError
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.inference.protocol import SamplingParams
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine


class Engine(SimulatedEngine):
    """A token a second; an update takes ``update_s``, during which nothing is sampled."""

    def __init__(self, *, update_s: float = 0.0, fails: Exception | None = None) -> None:
        super().__init__(DecodeModel(1.0), tokens_per_id=1)
        self.update_s = update_s
        self.fails = fails
        self.aborted: list[str] = []

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await super().abort(request_id)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        await asyncio.sleep(self.update_s)
        if self.fails is not None:
            raise self.fails
        await super().update_weights(weights, version)


def _run(coroutine: Coroutine[Any, Any, Any]) -> None:
    loop = VirtualLoop()
    try:
        loop.call(coroutine)
    finally:
        loop.stop()


def _request(name: str, tokens: int, deadline: float | None = None) -> GenerationRequest:
    return GenerationRequest(
        name, [tokens], sampling=SamplingParams(max_tokens=1000), episode_id=name, deadline=deadline
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_a_turn_that_goes_on_keeps_its_tokens_with_their_own_versions() -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine(update_s=2.0)])
        turn = asyncio.create_task(proxy.generate(_request("a", 10)))
        await asyncio.sleep(4.5)
        await proxy.update_weights({}, 1)
        generation = await turn
        # Four tokens and a half before the update, the other half after it: the fifth is the new version's.
        assert generation.policy_versions in ([0] * 4 + [1] * 6, [0] * 5 + [1] * 5)
        assert generation.finish_reason == "stop" and _now() == 12.0
        assert proxy.restarted_tokens == 0

    _run(work())


def test_a_turn_that_restarts_is_sampled_by_the_new_version_alone() -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine(update_s=2.0)])
        turn = asyncio.create_task(proxy.generate(_request("a", 10)))
        await asyncio.sleep(4.5)
        await proxy.update_weights({}, 1, restart_turns=True)
        generation = await turn
        assert generation.policy_versions == [1] * 10 and generation.finish_reason == "stop"
        assert _now() == 16.5
        assert proxy.restarted_tokens == 4

    _run(work())


def test_turns_restart_at_every_update_and_only_those_that_were_being_sampled() -> None:
    async def work() -> None:
        engines = [Engine(), Engine()]
        proxy = LLMProxy(engines)
        turns = {name: asyncio.create_task(proxy.generate(_request(name, 3))) for name in ("a", "b", "c")}
        await asyncio.sleep(2.0)
        await proxy.update_weights({}, 1, restart_turns=True)
        await asyncio.sleep(2.0)
        await proxy.update_weights({}, 2, restart_turns=True)
        assert {tuple((await turn).policy_versions) for turn in turns.values()} == {(2, 2, 2)}
        assert proxy.restarted_tokens == 3 * 2 * 2
        await proxy.update_weights({}, 3, restart_turns=True)
        assert proxy.restarted_tokens == 12 and not proxy._to_restart and not proxy._serving

    _run(work())


def test_a_request_that_comes_during_an_update_waits_and_is_sampled_by_the_new_version() -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine(update_s=5.0)])
        update = asyncio.create_task(proxy.update_weights({}, 1, restart_turns=True))
        await asyncio.sleep(1.0)
        generation = await proxy.generate(_request("a", 2))
        assert generation.policy_versions == [1, 1] and _now() == 7.0
        await update

    _run(work())


def test_an_update_that_restarts_does_not_hide_an_abort_that_came_before() -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine()])
        turn = asyncio.create_task(proxy.generate(_request("a", 10)))
        await asyncio.sleep(3.0)
        await proxy.abort("a")
        await proxy.update_weights({}, 1, restart_turns=True)
        generation = await turn
        assert (generation.finish_reason, len(generation.token_ids)) == ("abort", 3)
        assert proxy.restarted_tokens == 0

    _run(work())


@pytest.mark.parametrize("began_before", [True, False])
def test_a_turn_that_waits_for_the_end_of_an_update_can_be_aborted(began_before: bool) -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine(update_s=5.0)])
        turns = []
        if began_before:
            turns.append(asyncio.create_task(proxy.generate(_request("a", 10))))
            await asyncio.sleep(3.0)
        update = asyncio.create_task(proxy.update_weights({}, 1, restart_turns=True))
        await asyncio.sleep(1.0)
        if not began_before:
            turns.append(asyncio.create_task(proxy.generate(_request("a", 10))))
            await asyncio.sleep(1.0)
        await proxy.abort("a")
        assert (await turns[0]).finish_reason == "abort"
        await update

    _run(work())


@pytest.mark.parametrize("restart", [False, True])
def test_a_deadline_ends_a_turn_that_waits_for_an_update(restart: bool) -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine(update_s=100.0)])
        turn = asyncio.create_task(proxy.generate(_request("a", 10, deadline=20.0)))
        await asyncio.sleep(3.0)
        update = asyncio.create_task(proxy.update_weights({}, 1, restart_turns=restart))
        with pytest.raises(EpisodeTimeoutError):
            await turn
        assert _now() == 20.0
        await update
        # The id is free again, and nothing of the old turn restarts.
        assert (await proxy.generate(_request("a", 2))).policy_versions == [1, 1]

    _run(work())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_update_that_fails_on_one_engine_raises_and_locks_nobody_out(failing: int, restart: bool) -> None:
    async def work() -> None:
        engines = [Engine(), Engine()]
        engines[failing].fails = ModelError("out of memory")
        proxy = LLMProxy(engines)
        turns = [asyncio.create_task(proxy.generate(_request(name, 4))) for name in ("a", "b")]
        await asyncio.sleep(1.0)
        with pytest.raises(ModelError, match="out of memory"):
            await proxy.update_weights({}, 1, restart_turns=restart)
        # The oldest version in use is what the failed one has.
        assert proxy.version == 0
        for turn in turns:
            assert len((await turn).token_ids) == 4
        assert not any(engine._suspended for engine in engines)

    _run(work())


def test_suspend_and_resume_reach_all_engines_and_no_token_is_sampled_between() -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine(), Engine()])
        turns = [asyncio.create_task(proxy.generate(_request(name, 6))) for name in ("a", "b")]
        await asyncio.sleep(2.0)
        await proxy.suspend()
        late = asyncio.create_task(proxy.generate(_request("c", 1)))
        await asyncio.sleep(50.0)
        assert not any(turn.done() for turn in [*turns, late])
        await proxy.resume()
        await asyncio.gather(*turns)
        assert _now() == 56.0 and late.done()

    _run(work())


def test_engines_that_were_suspended_before_an_update_stay_so() -> None:
    async def work() -> None:
        proxy = LLMProxy([Engine()])
        turn = asyncio.create_task(proxy.generate(_request("a", 6)))
        await asyncio.sleep(2.0)
        await proxy.suspend()
        await proxy.update_weights({}, 1)
        await asyncio.sleep(50.0)
        assert not turn.done()
        await proxy.resume()
        assert (await turn).policy_versions == [0, 0, 1, 1, 1, 1]

    _run(work())


class Heard:
    """What the callback was called with, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Generation | BaseException, float]] = []

    def __call__(self, request: GenerationRequest, result: Generation | BaseException) -> None:
        self.calls.append((request.request_id, result, _now()))


def test_an_added_request_calls_back_once_with_its_tokens() -> None:
    async def work() -> None:
        proxy, heard = LLMProxy([Engine()]), Heard()
        proxy.add(_request("a", 3), heard)
        proxy.add(_request("b", 5), heard)
        assert not heard.calls
        await asyncio.sleep(10.0)
        assert [(name, len(result.token_ids), at) for name, result, at in heard.calls] == [  # type: ignore[union-attr]
            ("a", 3, 3.0),
            ("b", 5, 5.0),
        ]
        assert not proxy._added

    _run(work())


def test_an_added_request_that_is_aborted_calls_back_with_its_partial_tokens() -> None:
    async def work() -> None:
        proxy, heard = LLMProxy([Engine()]), Heard()
        proxy.add(_request("a", 30), heard)
        await asyncio.sleep(4.0)
        await proxy.abort("a")
        await asyncio.sleep(1.0)
        [(_, result, at)] = heard.calls
        assert isinstance(result, Generation) and result.finish_reason == "abort"
        assert len(result.token_ids) == len(result.logprobs) == len(result.policy_versions) == 4 and at == 4.0

    _run(work())


def test_an_added_request_restarts_like_any_other() -> None:
    async def work() -> None:
        proxy, heard = LLMProxy([Engine()]), Heard()
        proxy.add(_request("a", 4), heard)
        await asyncio.sleep(3.0)
        await proxy.update_weights({}, 1, restart_turns=True)
        await asyncio.sleep(10.0)
        [(_, result, at)] = heard.calls
        assert isinstance(result, Generation) and result.policy_versions == [1] * 4 and at == 7.0

    _run(work())


def test_an_added_request_calls_back_with_what_ended_it() -> None:
    async def work() -> None:
        engine = Engine()
        proxy, heard = LLMProxy([engine]), Heard()
        proxy.add(_request("late", 30, deadline=2.0), heard)
        proxy.add(_request("a", 30), heard)
        await asyncio.sleep(1.0)
        with pytest.raises(UsageError, match="'a' is in use"):
            proxy.add(_request("a", 30), heard)
        await asyncio.sleep(5.0)
        await proxy.close()
        await asyncio.sleep(0.0)
        proxy.add(_request("after", 1), heard)
        await asyncio.sleep(1.0)
        assert [(name, type(result), at) for name, result, at in heard.calls] == [
            ("late", EpisodeTimeoutError, 2.0),
            ("a", asyncio.CancelledError, 6.0),
            ("after", ModelError, 6.0),
        ]
        assert not proxy._serving and not proxy._added

    _run(work())
