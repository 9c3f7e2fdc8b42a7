"""The proxy: routing, deadlines, updates and death over several engines."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentenv.errors import EpisodeTimeoutError, ModelError, UsageError
from agentenv.inference import Engine, GenerationRequest, LLMProxy
from agentenv.simulation.clock import VirtualLoop
from agentenv.testing import ScriptedModel


class RecordingModel(ScriptedModel):
    """Notes the order of suspend, update and resume, and the episodes released."""

    def __init__(self, **options: Any) -> None:
        super().__init__(["ok"], repeat=True, **options)
        self.calls: list[str] = []
        self.released: list[str] = []

    async def suspend(self) -> None:
        self.calls.append("suspend")
        await super().suspend()

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self.calls.append(f"update {version}")
        await super().update_weights(weights, version)

    async def resume(self) -> None:
        self.calls.append("resume")
        await super().resume()

    async def release(self, episode_id: str) -> None:
        self.released.append(episode_id)


def _request(name: str, episode: str = "", deadline: float | None = None) -> GenerationRequest:
    return GenerationRequest(name, [1, 2], episode_id=episode, deadline=deadline)


def test_the_fakes_are_engines() -> None:
    assert isinstance(RecordingModel(), Engine)


def test_no_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        LLMProxy([])


def test_an_episode_stays_with_its_engine_and_new_ones_spread() -> None:
    engines = [RecordingModel(), RecordingModel()]
    proxy = LLMProxy(engines)

    async def work() -> None:
        for turn in range(3):
            await asyncio.gather(*(proxy.generate(_request(f"{e}/{turn}", e)) for e in "abcd"))
        await proxy.release("a")
        await proxy.release("unknown")

    asyncio.run(work())
    served = [{request.episode_id for request in engine.requests} for engine in engines]
    assert served[0] | served[1] == set("abcd") and not served[0] & served[1]
    assert len(served[0]) == len(served[1]) == 2
    assert [engine.released for engine in engines] == [["a"], []]


def test_an_update_reaches_all_engines_between_suspend_and_resume() -> None:
    engines = [RecordingModel(), RecordingModel()]
    proxy = LLMProxy(engines)
    asyncio.run(proxy.update_weights({}, 5))
    assert [engine.calls for engine in engines] == [["suspend", "update 5", "resume"]] * 2
    assert proxy.version == 5


def test_an_engine_that_updates_while_running_is_not_suspended() -> None:
    engine = RecordingModel()
    engine.updates_while_running = True  # type: ignore[attr-defined]
    asyncio.run(LLMProxy([engine]).update_weights({}, 1))
    assert engine.calls == ["update 1"]


@pytest.mark.parametrize("suspended", [False, True])
def test_a_request_ends_at_its_deadline(suspended: bool) -> None:
    engine = RecordingModel(token_s=0.0 if suspended else 60.0)
    proxy = LLMProxy([engine])

    async def work() -> None:
        if suspended:
            await proxy.suspend()
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(EpisodeTimeoutError, match="'r'") as caught:
            await proxy.generate(_request("r", deadline=started + 0.05))
        assert caught.value.stage == "generate"
        assert loop.time() - started < 30.0
        await proxy.resume()
        if suspended:
            await proxy.generate(_request("r"))  # the id is free again

    asyncio.run(work())


def test_an_aborted_request_gives_its_partial_tokens() -> None:
    proxy = LLMProxy([RecordingModel(token_s=1.0)])

    async def work() -> None:
        turn = asyncio.create_task(proxy.generate(_request("r")))
        await asyncio.sleep(1.5)
        with pytest.raises(UsageError, match="in use"):
            await proxy.generate(_request("r"))
        await proxy.abort("r")
        await proxy.abort("unknown")
        generation = await turn
        assert generation.finish_reason == "abort" and len(generation.token_ids) == 1

    loop = VirtualLoop()
    try:
        loop.call(work())
    finally:
        loop.stop()


def test_the_engines_are_lost_when_the_last_one_has_died() -> None:
    first, second = RecordingModel(), RecordingModel()
    proxy = LLMProxy([first, second])
    assert proxy.error is None
    second.error = ModelError("out of memory")  # type: ignore[attr-defined]
    assert proxy.error is None and proxy.engines_in_service == 1
    first.error = ModelError("killed")  # type: ignore[attr-defined]
    assert str(proxy.error) == "killed" and proxy.engines_in_service == 0


def test_close_closes_all_and_may_be_called_again() -> None:
    engines = [RecordingModel(), RecordingModel()]
    proxy = LLMProxy(engines)

    async def work() -> None:
        await proxy.close()
        await proxy.close()
        for engine in engines:
            with pytest.raises(ModelError):
                await engine.generate(_request("r"))

    asyncio.run(work())
