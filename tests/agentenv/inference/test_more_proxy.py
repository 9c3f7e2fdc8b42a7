"""Request ids and aborts in the proxy, where two things happen to one request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv.inference import LLMProxy
from agentenv.inference.protocol import GenerationRequest, SamplingParams
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine


def _request() -> GenerationRequest:
    return GenerationRequest("a", [1], SamplingParams(max_tokens=10))


def _engine() -> SimulatedEngine:
    return SimulatedEngine(DecodeModel(1.0), length=lambda request: 10, tokens_per_id=1)


def _run(coroutine: Any) -> None:
    runner = VirtualLoop()
    try:
        runner.call(coroutine)
    finally:
        runner.stop()


def test_the_id_of_an_aborted_request_can_be_used_again() -> None:
    async def main() -> None:
        proxy = LLMProxy([_engine()])
        running = asyncio.create_task(proxy.generate(_request()))
        await asyncio.sleep(3.5)
        await proxy.abort("a")
        assert len((await running).token_ids) == 3
        assert len((await proxy.generate(_request())).token_ids) == 10

    _run(main())


def test_adding_a_request_under_an_id_in_use_is_refused_at_once() -> None:
    async def main() -> None:
        proxy = LLMProxy([_engine()])
        running = asyncio.create_task(proxy.generate(_request()))
        await asyncio.sleep(1.0)
        with pytest.raises(UsageError, match="in use"):
            proxy.add(_request(), lambda request, result: None)
        assert len((await running).token_ids) == 10

    _run(main())


def test_a_request_that_comes_during_a_restarting_update_waits_for_the_new_weights() -> None:
    class Slow(SimulatedEngine):
        updates_while_running = True

        async def update_weights(self, weights: Any, version: int) -> None:
            await asyncio.sleep(20.0)
            await super().update_weights(weights, version)

    async def main() -> None:
        proxy = LLMProxy([Slow(DecodeModel(1.0), length=lambda request: 10, tokens_per_id=1)])
        update = asyncio.create_task(proxy.update_weights({}, 1, restart_turns=True))
        await asyncio.sleep(1.0)
        assert (await proxy.generate(_request())).policy_versions == [1] * 10
        await update

    _run(main())
