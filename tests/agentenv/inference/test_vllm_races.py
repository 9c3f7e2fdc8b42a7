"""A vLLM that comes back just as new weights are published, step by step, over a scripted one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from agentenv.inference import GenerationRequest, SamplingParams
from agentenv.inference.vllm import VLLMEngine
from agentenv.inference.vllm.backend import Completion
from agentenv.inference.vllm.json_http import NoAnswerError
from agentenv.inference.weight_sync import WeightSync


class _Skeleton:
    """A model whose log-probs are all minus its one weight."""

    vocab_size, dtype = 100, "torch.float32"

    def check(self, weights: Any) -> None:
        pass

    def logprobs(self, weights: Any, token_ids: Sequence[int]) -> list[float]:
        return [-float(weights["v"])] * (len(token_ids) - 1)


class _Transfer:
    newest: Any = None

    async def publish(self, skeleton: Any, weights: Any) -> None:
        self.newest = weights

    async def load(self, receiver: Any) -> None:
        receiver.weights = self.newest
        receiver.loads += 1
        receiver.is_loading.set()
        await receiver.may_go_on.wait()

    async def close(self) -> None:
        pass


class _Backend:
    name, max_length, incarnation = "scripted", 100, 0

    def __init__(self) -> None:
        self.weights: Any = {"v": 0}
        self.loads = 0
        self.hanging: set[str] = set()
        """Calls without an answer."""
        self.is_loading, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()

    async def _control(self, call: str) -> None:
        if call in self.hanging:
            raise NoAnswerError(f"no answer to {call}")

    async def pause(self) -> None:
        await self._control("pause")

    async def resume(self) -> None:
        await self._control("resume")

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._control("abort")

    async def complete(self, request_id: str, prompt_ids: Any, sampling: Any, seed: Any) -> Completion:
        if self.hanging:
            await asyncio.Event().wait()
        return Completion([1], [-float(self.weights["v"])], "length")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-float(self.weights["v"])] * (len(token_ids) - 1)

    async def reset_prefix_cache(self) -> bool:
        return True

    async def is_alive(self) -> bool:
        return True

    async def recover(self, deadline: float) -> None:
        await asyncio.sleep(0.02)

    async def close(self) -> None:
        pass


def _engine(backend: _Backend, sync: WeightSync) -> VLLMEngine:
    return VLLMEngine(cast(Any, backend), sync)


async def _come_back(engine: VLLMEngine, backend: _Backend) -> None:
    """Until weights are being loaded, whose probe is still to come."""
    backend.is_loading.clear()
    backend.may_go_on.clear()
    engine._lose()
    await backend.is_loading.wait()


async def _sample(engine: VLLMEngine) -> tuple[list[float], list[int]]:
    generation = await engine.generate(GenerationRequest("a", [1, 2], SamplingParams(max_tokens=1)))
    return generation.logprobs, generation.policy_versions


def test_weights_that_are_published_between_a_load_and_its_probe_are_loaded_then() -> None:
    async def work() -> None:
        backend, sync = _Backend(), WeightSync(cast(Any, _Skeleton()), cast(Any, _Transfer()))
        engine = _engine(backend, sync)
        await engine.update_weights(cast(Any, {"v": 1}), 1)
        await _come_back(engine, backend)
        update = asyncio.create_task(engine.update_weights(cast(Any, {"v": 2}), 2))
        while sync.publication is None or sync.publication.version != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        backend.may_go_on.set()
        await update
        assert await _sample(engine) == ([-2.0], [2])
        await engine.close()

    asyncio.run(work())


def test_an_engine_that_comes_back_to_weights_another_one_published_says_their_version() -> None:
    async def work() -> None:
        sync = WeightSync(cast(Any, _Skeleton()), cast(Any, _Transfer()))
        first, second = _Backend(), _Backend()
        engines = [_engine(backend, sync) for backend in (first, second)]
        await asyncio.gather(*(engine.update_weights(cast(Any, {"v": 1}), 1) for engine in engines))
        await engines[0].update_weights(cast(Any, {"v": 2}), 2)
        await _come_back(engines[1], second)
        second.may_go_on.set()
        assert await _sample(engines[1]) == ([-2.0], [2])
        for engine in engines:
            await engine.close()

    asyncio.run(work())


@pytest.mark.parametrize("call", ["pause", "resume", "abort"])
def test_a_vllm_that_answers_no_call_has_gone_where_others_serve_and_is_an_error_where_none_do(
    call: str,
) -> None:
    async def call_it(engine: VLLMEngine) -> None:
        if call != "abort":
            await (engine.suspend() if call == "pause" else engine.resume())
            return
        turn = asyncio.create_task(_sample(engine))
        await asyncio.sleep(0.01)
        try:
            await engine.abort("a")
        finally:
            turn.cancel()

    async def work(do_others_serve: bool) -> None:
        backend, sync = _Backend(), WeightSync(cast(Any, _Skeleton()), cast(Any, _Transfer()))
        engine, changes = _engine(backend, sync), list[bool]()
        if do_others_serve:
            engine.watch(lambda: changes.append(engine.is_away))
        backend.hanging.add(call)
        if do_others_serve:
            await call_it(engine)
            assert changes == [True]
            backend.hanging.clear()
            async with asyncio.timeout(60.0):
                while engine.is_away:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert changes == [True, False] and engine.error is None
        else:
            with pytest.raises(NoAnswerError):
                await call_it(engine)
        await engine.close()

    asyncio.run(work(True))
    asyncio.run(work(False))
