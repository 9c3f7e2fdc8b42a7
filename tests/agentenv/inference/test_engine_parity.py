"""What every engine must do, whatever samples behind it: see :mod:`agentenv.inference.protocol`."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv.errors import ModelError, UsageError
from agentenv.inference import Engine, Generation, GenerationRequest, LLMProxy, SamplingParams
from agentenv.inference.weight_transfer import open_transfer

OpenEngine = Callable[..., Engine]
_TOLERANCE = 1e-4


_runner: asyncio.Runner


@pytest.fixture(autouse=True)
def _one_loop(loop_runner: asyncio.Runner) -> None:
    """vLLM in this process lives in one event loop through all tests."""
    global _runner
    _runner = loop_runner


def _run(engine: Engine, work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            async with asyncio.timeout(300):
                return await work()
        finally:
            await engine.close()

    return _runner.run(whole())


async def _sample(engine: Any, prompt: list[int], name: str = "r", **options: Any) -> Generation:
    episode, seed = options.pop("episode_id", ""), options.pop("seed", None)
    request = GenerationRequest(name, prompt, SamplingParams(**options), episode_id=episode, seed=seed)
    return await engine.generate(request)


async def _end(engine: Any, turn: asyncio.Task[Generation], name: str = "long") -> Generation:
    await engine.abort(name)
    return await turn


@pytest.fixture
def engine(open_engine: OpenEngine) -> Engine:
    return open_engine()


def test_log_probs_over_turns_of_episodes_side_by_side_are_those_of_a_forward_pass(
    engine: Engine, small: Any
) -> None:
    async def episode(number: int) -> None:
        ids = small.prompt(5 + 13 * number, seed=number)
        for turn in range(3):
            generation = await _sample(
                engine, ids, f"{number}/{turn}", max_tokens=4 + 2 * number, episode_id=f"e{number}"
            )
            expected = small.logprobs(small.weights, ids, generation.token_ids)
            assert generation.logprobs == pytest.approx(expected, abs=_TOLERANCE)
            assert generation.policy_versions == [0] * len(generation.token_ids)
            ids = ids + generation.token_ids + small.prompt(1 + 4 * number, seed=100 * number + turn)

    async def work() -> None:
        await asyncio.gather(*(episode(number) for number in range(6)))

    _run(engine, work)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.4}, {"repetition_penalty": 1.5}],
    ids=lambda options: next(iter(options)),
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    engine: Engine, small: Any, options: dict[str, Any]
) -> None:
    prompt = small.prompt(20)
    generation = _run(engine, lambda: _sample(engine, prompt, max_tokens=12, **options))
    sampling = SamplingParams(**options)
    ids = [*prompt, *generation.token_ids]
    for index, (token, logprob) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
        before = ids[: len(prompt) + index]
        row = small.logits(small.weights, before)[-1]
        seen = torch.tensor(sorted(set(before)))
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        row = row / sampling.temperature
        if sampling.top_k:
            row[row < row.topk(sampling.top_k).values[-1]] = -torch.inf
        ordered, order = row.softmax(-1).sort(descending=True)
        row[order[ordered.cumsum(-1) - ordered >= sampling.top_p]] = -torch.inf
        assert logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=_TOLERANCE)


def test_greedy_takes_the_likeliest_token_with_log_prob_0(engine: Engine, small: Any) -> None:
    prompt = small.prompt(30)
    generation = _run(engine, lambda: _sample(engine, prompt, max_tokens=10, temperature=0.0))
    rows = small.logits(small.weights, [*prompt, *generation.token_ids])[len(prompt) - 1 : -1]
    assert generation.token_ids == rows.argmax(-1).tolist()
    assert generation.logprobs == [0.0] * len(generation.token_ids)


def test_a_stop_token_ends_the_turn_and_is_part_of_it(engine: Engine, small: Any) -> None:
    prompt = small.prompt(10)

    async def work() -> tuple[Generation, Generation]:
        free = await _sample(engine, prompt, max_tokens=20, seed=5)
        stop = free.token_ids[8]
        return free, await _sample(engine, prompt, max_tokens=20, seed=5, stop_token_ids=(stop,))

    free, stopped = _run(engine, work)
    first = free.token_ids.index(free.token_ids[8])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert free.finish_reason == "length" and len(free.token_ids) == 20


def test_the_end_of_sequence_token_ends_a_turn_unasked(open_engine: OpenEngine, small: Any) -> None:
    prompt = ids = small.prompt(10)
    for _ in range(8):
        ids = [*ids, int(small.logits(small.weights, ids)[-1].argmax())]
    likeliest = ids[len(prompt) :]
    engine = open_engine(end=likeliest[-1])
    generation = _run(engine, lambda: _sample(engine, prompt, max_tokens=20, temperature=0.0))
    assert generation.token_ids == likeliest[: likeliest.index(likeliest[-1]) + 1]
    assert generation.finish_reason == "stop"


def test_a_seed_repeats_whatever_else_runs(engine: Engine, small: Any) -> None:
    prompt = small.prompt(10)

    async def work() -> tuple[Generation, Generation, Generation]:
        alone = await _sample(engine, prompt, max_tokens=20, seed=7)
        others = [
            asyncio.create_task(_sample(engine, small.prompt(30, n), f"o{n}", max_tokens=25))
            for n in range(3)
        ]
        beside = await _sample(engine, prompt, max_tokens=20, seed=7)
        other = await _sample(engine, prompt, max_tokens=20, seed=8)
        await asyncio.gather(*others)
        return alone, beside, other

    alone, beside, other = _run(engine, work)
    assert alone.token_ids == beside.token_ids
    assert alone.token_ids != other.token_ids


def test_the_longest_sequence_ends_the_turn_and_a_longer_prompt_is_refused(
    open_engine: OpenEngine, small: Any
) -> None:
    engine = open_engine(max_length=40)

    async def work() -> Generation:
        with pytest.raises(UsageError, match="max_length 40"):
            await _sample(engine, small.prompt(40), "full")
        with pytest.raises(UsageError):
            await _sample(engine, [], "empty")
        return await _sample(engine, small.prompt(30), max_tokens=100, seed=1)

    generation = _run(engine, work)
    assert len(generation.token_ids) == 10 and generation.finish_reason == "length"


def test_an_aborted_turn_gives_its_tokens_so_far(engine: Any, small: Any, begin_long_turn: Any) -> None:
    prompt = small.prompt(12)

    async def work() -> Generation:
        turn = await begin_long_turn(engine, prompt)
        await engine.abort("nobody")
        aborted = await _end(engine, turn)
        await engine.abort("long")
        return aborted

    generation = _run(engine, work)
    assert generation.finish_reason == "abort"
    assert 1 <= len(generation.token_ids) < engine.max_length - len(prompt)
    expected = small.logprobs(small.weights, prompt, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=_TOLERANCE)


def test_a_cancelled_request_leaves_the_engine_to_others(
    engine: Engine, small: Any, begin_long_turn: Any
) -> None:
    async def work() -> Generation:
        turn = await begin_long_turn(engine, small.prompt(12))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        return await _sample(engine, small.prompt(9), "long", max_tokens=5, seed=2)

    assert len(_run(engine, work).token_ids) == 5


def test_nothing_is_sampled_while_suspended(engine: Engine, small: Any, begin_long_turn: Any) -> None:
    prompt = small.prompt(12)

    async def work() -> tuple[Generation, Generation]:
        turn = await begin_long_turn(engine, prompt)
        await engine.suspend()
        new = asyncio.create_task(_sample(engine, prompt, "new", max_tokens=3, seed=1))
        done, _ = await asyncio.wait({turn, new}, timeout=0.5)
        assert not done
        await engine.resume()
        sampled = await new
        return sampled, await _end(engine, turn)

    new, turn = _run(engine, work)
    assert len(new.token_ids) == 3
    expected = small.logprobs(small.weights, prompt, turn.token_ids)
    assert turn.logprobs == pytest.approx(expected, abs=_TOLERANCE)


def test_after_an_update_log_probs_are_those_of_the_new_weights(engine: Engine, small: Any) -> None:
    prompt, new = small.prompt(25), small.other_weights(1)

    async def work() -> tuple[Generation, Generation]:
        before = await _sample(engine, prompt, max_tokens=20)
        await engine.update_weights(new, 3)
        assert engine.version == 3
        return before, await _sample(engine, prompt, max_tokens=20)

    before, after = _run(engine, work)
    assert before.logprobs == pytest.approx(
        small.logprobs(small.weights, prompt, before.token_ids), abs=_TOLERANCE
    )
    expected = small.logprobs(new, prompt, after.token_ids)
    assert after.logprobs == pytest.approx(expected, abs=_TOLERANCE)
    assert after.policy_versions == [3] * len(after.token_ids)
    stale = small.logprobs(small.weights, prompt, after.token_ids)
    assert max(abs(a - b) for a, b in zip(stale, expected, strict=True)) > 100 * _TOLERANCE


def test_a_turn_goes_on_through_updates_with_a_version_for_each_token(
    engine: Engine, small: Any, begin_long_turn: Any, sample_past: Any
) -> None:
    prompt = small.prompt(15)

    async def work() -> Generation:
        turn = await begin_long_turn(engine, prompt)
        for version in (1, 2):
            await engine.update_weights(small.other_weights(version), version)
            await sample_past(engine, prompt, f"v{version}")
        return await _end(engine, turn)

    generation = _run(engine, work)
    versions = generation.policy_versions
    assert versions == sorted(versions) and len(versions) == len(generation.logprobs)
    assert versions[0] == 0 and versions[-1] >= 1
    first = versions.count(0)
    expected = small.logprobs(small.weights, prompt, generation.token_ids[:first])
    assert generation.logprobs[:first] == pytest.approx(expected, abs=_TOLERANCE)


def test_an_update_while_suspended_waits_for_resume(engine: Engine, small: Any, begin_long_turn: Any) -> None:
    prompt, new = small.prompt(15), small.other_weights(4)

    async def work() -> tuple[Generation, Generation]:
        turn = await begin_long_turn(engine, prompt)
        await engine.suspend()
        await engine.update_weights(new, 1)
        fresh = asyncio.create_task(_sample(engine, prompt, "new", max_tokens=5))
        done, _ = await asyncio.wait({turn, fresh}, timeout=0.3)
        assert not done
        await engine.resume()
        sampled = await fresh
        return sampled, await _end(engine, turn)

    fresh, turn = _run(engine, work)
    assert fresh.policy_versions == [1] * 5
    assert fresh.logprobs == pytest.approx(small.logprobs(new, prompt, fresh.token_ids), abs=_TOLERANCE)
    assert set(turn.policy_versions) <= {0, 1}


def test_a_turn_that_is_restarted_by_an_update_has_new_tokens_alone(
    engine: Engine, small: Any, begin_long_turn: Any, sample_past: Any
) -> None:
    prompt, new = small.prompt(15), small.other_weights(5)
    proxy = LLMProxy([engine])

    async def work() -> Generation:
        turn = await begin_long_turn(proxy, prompt)
        await proxy.update_weights(new, 1, restart_turns=True)
        await sample_past(engine, prompt, "after")
        return await _end(proxy, turn)

    generation = _run(engine, work)
    assert set(generation.policy_versions) == {1}
    assert proxy.restarted_tokens >= 1
    expected = small.logprobs(new, prompt, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=_TOLERANCE)


def test_weights_that_do_not_fit_or_are_older_are_refused_and_change_nothing(
    engine: Engine, small: Any
) -> None:
    prompt, new = small.prompt(15), small.other_weights(6)
    name = "model.layers.0.mlp.up_proj.weight"

    async def work() -> Generation:
        await engine.update_weights(new, 2)
        with pytest.raises(UsageError, match="version 1 is older than the current 2"):
            await engine.update_weights(small.weights, 1)
        with pytest.raises(UsageError, match="missing names"):
            await engine.update_weights({k: v for k, v in small.weights.items() if k != name}, 3)
        with pytest.raises(UsageError, match="unknown names"):
            await engine.update_weights({**small.weights, "extra": torch.zeros(1)}, 3)
        with pytest.raises(UsageError, match="must be"):
            await engine.update_weights({**small.weights, name: torch.zeros(3, 3)}, 3)
        return await _sample(engine, prompt, max_tokens=8)

    generation = _run(engine, work)
    assert generation.policy_versions == [2] * 8
    assert generation.logprobs == pytest.approx(
        small.logprobs(new, prompt, generation.token_ids), abs=_TOLERANCE
    )


@pytest.mark.vllm
def test_weights_by_a_folder_on_disk_arrive_at_a_real_server(
    vllm_server_url: str, connect_to: Callable[..., Engine], small: Any, tmp_path: Path
) -> None:
    transfer = open_transfer("filesystem", folder=str(tmp_path))
    engine = connect_to(vllm_server_url, transfer=transfer)
    prompt, new = small.prompt(15), small.other_weights(7)

    async def work() -> Generation:
        await engine.update_weights(new, 1)
        assert await asyncio.to_thread(os.listdir, tmp_path)
        return await _sample(engine, prompt, max_tokens=8)

    generation = _run(engine, work)
    assert generation.logprobs == pytest.approx(
        small.logprobs(new, prompt, generation.token_ids), abs=_TOLERANCE
    )
    assert not list(tmp_path.iterdir())


def test_64_seeded_requests_at_once_all_end_as_asked(engine: Engine, small: Any) -> None:
    async def work() -> list[Generation]:
        # More tokens than vLLM computes in a step: prompts wait, or come in pieces.
        turns = (
            _sample(engine, small.prompt(4 + 4 * n, n), f"{n}", max_tokens=1 + n % 7, seed=n)
            for n in range(64)
        )
        return await asyncio.gather(*turns)

    for n, generation in enumerate(_run(engine, work)):
        assert len(generation.token_ids) == 1 + n % 7
        assert len(generation.token_ids) == len(generation.logprobs) == len(generation.policy_versions)


def test_close_ends_what_runs_and_what_waits(engine: Engine, small: Any, begin_long_turn: Any) -> None:
    async def work() -> None:
        turn = await begin_long_turn(engine, small.prompt(12))
        await engine.suspend()
        new = asyncio.create_task(_sample(engine, small.prompt(5), "new"))
        await asyncio.sleep(0)
        await engine.close()
        for task in (turn, new):
            with pytest.raises(ModelError):
                await task
        with pytest.raises(ModelError):
            await _sample(engine, small.prompt(5), "late")

    _run(engine, work)
