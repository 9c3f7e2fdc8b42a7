"""Several vLLM servers, of which some go: turns go on elsewhere, updates do not wait, and versions stay right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentenv.errors import ModelError
from agentenv.inference import Generation, GenerationRequest, LLMProxy, SamplingParams

_OPTIONS = {"heartbeat_s": 0.1, "restart_timeout_s": 120.0}


@pytest.fixture
def over_two(make_fake: Callable[..., Any], connect_to: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a scenario with a proxy over two servers."""

    def run(scenario: Callable[..., Coroutine[Any, Any, None]], **options: Any) -> None:
        servers = [make_fake(), make_fake()]
        engines = [connect_to(server.url, **{**_OPTIONS, **options}) for server in servers]

        async def work() -> None:
            proxy = LLMProxy(engines)
            try:
                await scenario(proxy, servers, engines)
            finally:
                await proxy.close()

        asyncio.run(work())

    return run


def _requests(small: Any, number: int, name: str = "turn") -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{name}-{index}",
            small.prompt(20, seed=index),
            SamplingParams(max_tokens=30),
            episode_id=f"{name}-{index}",
            seed=index,
        )
        for index in range(number)
    ]


def _check(small: Any, weights: Any, request: GenerationRequest, generation: Generation) -> None:
    assert generation.finish_reason == "length" and len(generation.token_ids) == 30
    expected = small.logprobs(weights, request.prompt_ids, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_turns_at_a_server_that_goes_are_sampled_by_the_other(over_two: Any, small: Any) -> None:
    async def scenario(proxy: LLMProxy, servers: list[Any], engines: list[Any]) -> None:
        requests = _requests(small, 8)
        await asyncio.to_thread(servers[0].hold)  # none of its turns ends before it goes
        turns = [asyncio.create_task(proxy.generate(request)) for request in requests]
        await _until(lambda: all(server.calls.count("/v1/completions") >= 5 for server in servers))
        await asyncio.to_thread(servers[0].crash)
        for request, turn in zip(requests, turns, strict=True):
            _check(small, small.weights, request, await turn)
        assert proxy.engines_in_service == 1 and proxy.engine_losses == 1 and proxy.error is None
        # An episode that lived there has a new home.
        again = _requests(small, 8, "turn")
        for request in again:
            _check(small, small.weights, request, await proxy.generate(request))
        assert proxy.engine_losses == 1

    over_two(scenario)


def test_a_server_that_is_away_during_an_update_comes_back_with_the_newest_weights(
    over_two: Any, small: Any
) -> None:
    async def scenario(proxy: LLMProxy, servers: list[Any], engines: list[Any]) -> None:
        await proxy.generate(_requests(small, 1)[0])
        await asyncio.to_thread(servers[0].crash)
        await _until(lambda: proxy.engines_in_service == 1)
        newest = small.other_weights(2)
        began = time.monotonic()
        await proxy.update_weights(small.other_weights(1), 1)
        await proxy.update_weights(newest, 2)
        assert time.monotonic() - began < 60.0
        assert proxy.version == 2 and engines[0].version == 0
        await asyncio.to_thread(servers[0].start)
        # It has a weight sync of its own here: it was told of both updates while it was away.
        await _until(lambda: proxy.engines_in_service == 2)
        assert engines[0].version == 2
        before = servers[0].calls.count("/v1/completions")
        requests = _requests(small, 6, "later")
        for request, generation in zip(
            requests, await asyncio.gather(*map(proxy.generate, requests)), strict=True
        ):
            _check(small, newest, request, generation)
            assert set(generation.policy_versions) == {2}
        assert servers[0].calls.count("/v1/completions") > before

    over_two(scenario)


def test_a_server_that_takes_no_weights_in_time_holds_up_nobody(over_two: Any, small: Any) -> None:
    async def scenario(proxy: LLMProxy, servers: list[Any], engines: list[Any]) -> None:
        servers[1].answers["/collective_rpc"] = None
        engines[1]._update_timeout_s = 1.0  # the other one may take longer
        newest = small.other_weights(1)
        began = time.monotonic()
        await proxy.update_weights(newest, 1)
        assert 1.0 <= time.monotonic() - began < 60.0
        assert proxy.engines_in_service == 1 and proxy.version == 1
        for request in _requests(small, 4):
            generation = await proxy.generate(request)
            _check(small, newest, request, generation)
            assert set(generation.policy_versions) == {1}
        await asyncio.to_thread(servers[1].crash)
        del servers[1].answers["/collective_rpc"]
        await asyncio.to_thread(servers[1].start)
        await _until(lambda: proxy.engines_in_service == 2)
        assert engines[1].version == 1

    over_two(scenario)


def test_when_no_server_comes_back_the_last_loss_is_the_end(over_two: Any, small: Any) -> None:
    async def scenario(proxy: LLMProxy, servers: list[Any], engines: list[Any]) -> None:
        for server in servers:
            await asyncio.to_thread(server.hold)
            server.calls.clear()
        turn = asyncio.create_task(proxy.generate(_requests(small, 1)[0]))
        await _until(lambda: any("/v1/completions" in server.calls for server in servers))
        for server in servers:
            await asyncio.to_thread(server.crash)
        with pytest.raises(ModelError):
            await turn
        await _until(lambda: proxy.error is not None)
        assert "did not come back within 0.5 s" in str(proxy.error)

    over_two(scenario, restart_timeout_s=0.5)
