"""The engine over vLLM's protocol as servers go, come back, are busy, or have other weights than they should."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentenv.errors import ModelError, UsageError
from agentenv.inference import Generation, GenerationRequest, LLMProxy, SamplingParams
from agentenv.inference.vllm import VLLMEngine

_TOLERANCE = 1e-4


def _run(engine: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            async with asyncio.timeout(120):
                return await work()
        finally:
            await engine.close()

    return asyncio.run(whole())


async def _sample(engine: Any, prompt: list[int], name: str, max_tokens: int) -> Generation:
    return await engine.generate(GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens)))


def _check(small: Any, weights: Any, prompt: list[int], generation: Generation, first: int = 0) -> None:
    """Whether log-probs from one token on are those of the weights."""
    tokens = generation.token_ids
    expected = small.logprobs(weights, [*prompt, *tokens[:first]], tokens[first:])
    assert generation.logprobs[first:] == pytest.approx(expected, abs=_TOLERANCE)


def test_tokens_after_an_update_in_mid_turn_are_those_of_a_forward_with_the_new_weights(
    fake_vllm: Any, connect_to: Any, small: Any, begin_long_turn: Any, sample_past: Any
) -> None:
    engine, prompt, new = connect_to(fake_vllm.url), small.prompt(15), small.other_weights(1)

    async def work() -> Generation:
        turn = await begin_long_turn(engine, prompt)
        await engine.update_weights(new, 1)
        await sample_past(engine, prompt, "after")
        await engine.abort("long")
        return await turn

    generation = _run(engine, work)
    first = generation.policy_versions.count(0)
    assert 0 < first < len(generation.token_ids)
    _check(small, new, prompt, generation, first)
    assert engine.stats()["interrupted_turns"] == 1


def test_a_server_that_comes_back_is_given_the_newest_weights_before_any_request(
    fake_vllm: Any, connect_to: Any, small: Any, begin_long_turn: Any, sample_past: Any
) -> None:
    engine = connect_to(fake_vllm.url, heartbeat_s=0.05)
    prompt, new = small.prompt(15), small.other_weights(2)

    async def work() -> tuple[Generation, Generation]:
        await engine.update_weights(new, 4)
        turn = await begin_long_turn(engine, prompt)
        await asyncio.to_thread(fake_vllm.crash)
        waiting = asyncio.create_task(_sample(engine, prompt, "waits", 6))
        await asyncio.sleep(0.3)
        assert not waiting.done() and not turn.done()
        fake_vllm.calls.clear()
        await asyncio.to_thread(fake_vllm.start)
        sampled = await waiting
        await sample_past(engine, prompt, "after")
        await engine.abort("long")
        return await turn, sampled

    for generation in _run(engine, work):
        _check(small, new, prompt, generation)
        assert set(generation.policy_versions) == {4}
    assert engine.stats()["lost_servers"] == 1
    loaded = fake_vllm.calls.index("/collective_rpc")
    assert "/v1/completions" not in fake_vllm.calls[:loaded]


def test_a_server_that_goes_during_an_update_has_it_when_it_comes_back(
    fake_vllm: Any, connect_to: Any, small: Any
) -> None:
    engine = connect_to(fake_vllm.url, heartbeat_s=0.05)
    prompt, new = small.prompt(15), small.other_weights(3)

    async def work() -> Generation:
        await asyncio.to_thread(fake_vllm.crash)
        update = asyncio.create_task(engine.update_weights(new, 1))
        await asyncio.sleep(0.3)
        assert not update.done()
        await asyncio.to_thread(fake_vllm.start)
        await update
        return await _sample(engine, prompt, "after", 6)

    generation = _run(engine, work)
    _check(small, new, prompt, generation)
    assert generation.policy_versions == [1] * 6


def test_a_server_that_stays_away_is_the_death_of_its_engine_and_of_all_its_requests(
    fake_vllm: Any, connect_to: Any, small: Any, begin_long_turn: Any
) -> None:
    engine = connect_to(fake_vllm.url, heartbeat_s=0.05, restart_timeout_s=0.5)
    proxy = LLMProxy([engine])

    async def work() -> None:
        turn = await begin_long_turn(proxy, small.prompt(15))
        await asyncio.to_thread(fake_vllm.crash)
        with pytest.raises(ModelError, match=f"{fake_vllm.url} was lost"):
            await turn
        assert proxy.error is not None
        with pytest.raises(ModelError, match="the engine died"):
            await _sample(proxy, small.prompt(5), "late", 2)
        with pytest.raises(ModelError, match="the engine died"):
            await proxy.update_weights(small.weights, 1)

    _run(engine, work)


def test_a_turn_that_kills_its_servers_is_given_up(fake_vllm: Any, connect_to: Any, small: Any) -> None:
    engine = connect_to(fake_vllm.url, heartbeat_s=0.05)

    async def work() -> None:
        turn = asyncio.create_task(_sample(engine, small.prompt(15), "long", 4000))
        for losses in range(1, 4):
            while "/v1/completions" not in fake_vllm.calls:  # noqa: ASYNC110 - another thread changes it
                await asyncio.sleep(0.01)
            await asyncio.to_thread(fake_vllm.crash)
            fake_vllm.calls.clear()
            while engine.stats()["lost_servers"] < losses:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.to_thread(fake_vllm.start)
        with pytest.raises(ModelError, match="lost 3 times during request 'long'"):
            await turn
        assert len((await _sample(engine, small.prompt(5), "another", 2)).token_ids) == 2

    _run(engine, work)


def test_an_update_that_does_not_arrive_stops_the_engine(fake_vllm: Any, connect_to: Any, small: Any) -> None:
    engine = connect_to(fake_vllm.url)

    async def work() -> None:
        fake_vllm.shift = 0.01
        with pytest.raises(ModelError, match=r"does not have the trainer's weights.*0\.01 on average"):
            await engine.update_weights(small.other_weights(1), 1)
        with pytest.raises(ModelError, match="does not have the trainer's weights"):
            await _sample(engine, small.prompt(5), "late", 2)

    _run(engine, work)


def test_weights_that_are_not_finite_stop_the_engine(fake_vllm: Any, connect_to: Any, small: Any) -> None:
    engine = connect_to(fake_vllm.url)
    broken = {name: tensor * float("nan") for name, tensor in small.weights.items()}

    async def work() -> None:
        with pytest.raises(ModelError, match="differ by nan"):
            await engine.update_weights(broken, 1)

    _run(engine, work)


def test_several_servers_share_one_publication_and_have_one_version(
    make_fake: Any, small: Any, connect_to: Any
) -> None:
    first = connect_to(make_fake().url)
    other = connect_to(make_fake().url)
    asyncio.run(other._weight_sync.close())
    second = VLLMEngine(other._backend, first._weight_sync)
    proxy, new, prompt = LLMProxy([first, second]), small.other_weights(1), small.prompt(8)
    saved = []
    save = small.skeleton.save

    async def work() -> list[Generation]:
        small.skeleton.save = lambda *arguments: (saved.append(1), save(*arguments))
        try:
            await proxy.update_weights(new, 1)
        finally:
            del small.skeleton.save
        return await asyncio.gather(*(_sample(proxy, prompt, f"{n}", 5) for n in range(4)))

    for generation in _run(proxy, work):
        _check(small, new, prompt, generation)
    assert len(saved) == 1
    assert first.version == second.version == proxy.version == 1


def test_no_more_requests_than_allowed_are_at_the_server(fake_vllm: Any, connect_to: Any, small: Any) -> None:
    engine = connect_to(fake_vllm.url, max_requests=3)
    fake_vllm.most_requests = 0

    async def work() -> list[Generation]:
        waiting = asyncio.create_task(_sample(engine, small.prompt(4), "last", 4000))
        turns = [_sample(engine, small.prompt(4 + n), f"{n}", 20) for n in range(9)]
        generations = await asyncio.gather(*turns)
        await engine.abort("last")
        assert (await waiting).finish_reason == "abort"
        return generations

    assert [len(generation.token_ids) for generation in _run(engine, work)] == [20] * 9
    assert fake_vllm.most_requests == 3


def test_a_turn_that_waits_for_its_place_can_be_aborted(fake_vllm: Any, connect_to: Any, small: Any) -> None:
    engine = connect_to(fake_vllm.url, max_requests=1)

    async def work() -> tuple[Generation, Generation]:
        running = asyncio.create_task(_sample(engine, small.prompt(4), "running", 60))
        waiting = asyncio.create_task(_sample(engine, small.prompt(4), "waiting", 60))
        await asyncio.sleep(0)  # both have begun
        await engine.abort("waiting")
        return await waiting, await running

    waiting, running = _run(engine, work)
    assert waiting.finish_reason == "abort" and waiting.token_ids == []
    assert len(running.token_ids) == 60


def test_a_busy_server_is_asked_again(fake_vllm: Any, connect_to: Any, small: Any) -> None:
    engine = connect_to(fake_vllm.url)

    async def work() -> Generation:
        fake_vllm.answers["/v1/completions"] = (429, {"error": {"message": "busy"}})
        turn = asyncio.create_task(_sample(engine, small.prompt(4), "r", 3))
        await asyncio.sleep(0.7)
        assert not turn.done()
        del fake_vllm.answers["/v1/completions"]
        return await turn

    assert len(_run(engine, work).token_ids) == 3


@pytest.mark.parametrize(
    ("status", "error"), [(500, ModelError), (400, UsageError)], ids=["fails", "refuses"]
)
def test_what_a_living_server_says_of_a_request_reaches_the_caller(
    fake_vllm: Any, connect_to: Any, small: Any, status: int, error: type[Exception]
) -> None:
    engine = connect_to(fake_vllm.url)

    async def work() -> None:
        fake_vllm.answers["/v1/completions"] = (status, {"error": {"message": "the reason"}})
        with pytest.raises(error, match=f"answered {status}: the reason"):
            await _sample(engine, small.prompt(4), "r", 3)
        assert engine.error is None

    _run(engine, work)


def test_a_server_that_hangs_counts_as_gone(
    fake_vllm: Any, connect_to: Any, monkeypatch: Any, small: Any, begin_long_turn: Any
) -> None:
    engine = connect_to(fake_vllm.url, heartbeat_s=0.05, restart_timeout_s=0.5)

    async def work() -> None:
        turn = await begin_long_turn(engine, small.prompt(15))
        fake_vllm.answers["/health"] = None
        # Not before: a server that is slow at first has not gone.
        monkeypatch.setattr("agentenv.inference.vllm.server._HEALTH_TIMEOUT_S", 0.1)
        engine._hang_timeout_s = 0.3
        with pytest.raises(ModelError, match="was lost: it did not come back within 0"):
            await turn

    _run(engine, work)


@pytest.mark.parametrize("option", ["max_requests", "restart_timeout_s", "hang_timeout_s", "heartbeat_s"])
def test_options_outside_their_range_are_refused(fake_vllm: Any, connect_to: Any, option: str) -> None:
    engine = connect_to(fake_vllm.url)
    with pytest.raises(UsageError, match=option):
        VLLMEngine(engine._backend, engine._weight_sync, **{option: 0})
    asyncio.run(engine.close())
