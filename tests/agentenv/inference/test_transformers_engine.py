"""The transformers engine against plain forward passes, and through updates, aborts, death and close."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from agentenv.errors import ModelError, UsageError
from agentenv.inference import Generation, GenerationRequest, SamplingParams
from agentenv.inference.transformers_engine import TransformersEngine

_VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 600,
    "tie_word_embeddings": True,
}
_FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, head_dim=8)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
    "mistral with a sliding window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**_SIZES, sliding_window=16)
    ),
    "qwen3 mixture of experts": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **_SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
    ),
}


def _model(family: str = "qwen3", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = _FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)  # far from uniform, so that a wrong mask or position shows
    return model


def _run(engine: TransformersEngine, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run in a loop of its own and close the engine."""

    async def whole() -> Any:
        try:
            async with asyncio.timeout(300):
                return await work()
        finally:
            await engine.close()

    return asyncio.run(whole())


def _prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + index).randrange(_VOCABULARY) for index in range(length)]


def _forward_logprobs(model: nn.Module, prompt: list[int], completion: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0].float()
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()


async def _sample(
    engine: TransformersEngine, prompt: list[int], name: str = "r", **options: Any
) -> Generation:
    episode = options.pop("episode_id", "")
    seed = options.pop("seed", None)
    request = GenerationRequest(name, prompt, SamplingParams(**options), episode_id=episode, seed=seed)
    return await engine.generate(request)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the engine's own thread changes it
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("family", list(_FAMILIES))
def test_log_probs_over_turns_of_many_episodes_are_those_of_a_forward_pass(family: str) -> None:
    model = _model(family)
    engine = TransformersEngine(model, max_batch=4, max_prefill_tokens=40)

    async def episode(number: int) -> None:
        ids = _prompt(5 + 13 * number, seed=number)
        for turn in range(3):
            generation = await _sample(
                engine, ids, f"{number}/{turn}", max_tokens=3 + 2 * number, episode_id=f"e{number}"
            )
            expected = _forward_logprobs(model, ids, generation.token_ids)
            assert generation.logprobs == pytest.approx(expected, abs=1e-4)
            assert len(generation.token_ids) == 3 + 2 * number
            assert generation.finish_reason == "length"
            ids = ids + generation.token_ids + _prompt(1 + 4 * number, seed=100 * number + turn)

    async def work() -> None:
        await asyncio.gather(*(episode(number) for number in range(6)))

    _run(engine, work)
    assert engine.stats()["reused_tokens"] > 0


def test_rows_grow_past_the_first_capacity_of_the_cache() -> None:
    model = _model()
    engine = TransformersEngine(model, max_batch=2)
    prompt = _prompt(200)
    generation = _run(engine, lambda: _sample(engine, prompt, max_tokens=150))
    assert generation.logprobs == pytest.approx(
        _forward_logprobs(model, prompt, generation.token_ids), abs=1e-4
    )


def test_a_seed_repeats_whatever_else_runs() -> None:
    engine = TransformersEngine(_model(), max_batch=4)
    prompt = _prompt(10)

    async def work() -> tuple[Generation, Generation, Generation]:
        alone = await _sample(engine, prompt, max_tokens=20, seed=7)
        others = [
            asyncio.create_task(_sample(engine, _prompt(30, n), f"o{n}", max_tokens=25)) for n in range(3)
        ]
        beside = await _sample(engine, prompt, max_tokens=20, seed=7)
        other = await _sample(engine, prompt, max_tokens=20, seed=8)
        await asyncio.gather(*others)
        return alone, beside, other

    alone, beside, other = _run(engine, work)
    assert alone.token_ids == beside.token_ids
    assert alone.token_ids != other.token_ids


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    model = _model()
    engine = TransformersEngine(model, max_batch=2)
    prompt = _prompt(9)
    generation = _run(engine, lambda: _sample(engine, prompt, max_tokens=12, temperature=0.0))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + generation.token_ids])).logits[0]
    assert generation.token_ids == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert generation.logprobs == [0.0] * 12


def test_a_stop_token_ends_the_turn_and_is_part_of_it() -> None:
    class Tokenizer:
        eos_token_id = 5

    engine = TransformersEngine(_model(), Tokenizer(), max_batch=2)

    async def work() -> list[Generation]:
        return [
            await _sample(engine, _prompt(4, seed), max_tokens=400, stop_token_ids=(11, 12))
            for seed in range(6)
        ]

    for generation in _run(engine, work):
        assert generation.finish_reason == "stop"
        assert generation.token_ids[-1] in (5, 11, 12)
        assert not {5, 11, 12} & set(generation.token_ids[:-1])


def test_the_longest_sequence_ends_the_turn() -> None:
    engine = TransformersEngine(_model(), max_batch=1, max_length=30)

    async def work() -> Generation:
        with pytest.raises(UsageError, match="prompt of 30 tokens"):
            await _sample(engine, _prompt(30))
        with pytest.raises(UsageError, match="empty prompt"):
            await _sample(engine, [])
        with pytest.raises(UsageError, match="from 3 to 64, the model's vocabulary has 64"):
            await _sample(engine, [3, 64])
        return await _sample(engine, _prompt(20), max_tokens=50)

    generation = _run(engine, work)
    assert (len(generation.token_ids), generation.finish_reason) == (10, "length")


def test_all_of_more_requests_than_rows_end() -> None:
    engine = TransformersEngine(_model(), max_batch=3)

    async def work() -> list[Generation]:
        return await asyncio.gather(
            *(_sample(engine, _prompt(3 + n), f"r{n}", max_tokens=4, episode_id=f"e{n}") for n in range(20))
        )

    assert [len(generation.token_ids) for generation in _run(engine, work)] == [4] * 20


def test_an_update_in_the_middle_of_a_turn_keeps_tokens_with_their_versions() -> None:
    old, new = _model(seed=0), _model(seed=1)
    engine = TransformersEngine(old, max_batch=2)
    prompt = _prompt(12)

    async def work() -> Generation:
        turn = asyncio.create_task(_sample(engine, prompt, max_tokens=500))
        await _until(lambda: engine.stats()["sampled_tokens"] >= 5)
        await engine.update_weights(new.state_dict(), 1)
        assert engine.version == 1
        return await turn

    generation = _run(engine, work)
    versions = generation.policy_versions
    assert versions == sorted(versions) and set(versions) == {0, 1}
    assert len(generation.token_ids) == len(versions) == len(generation.logprobs) == 500
    first = versions.count(0)
    expected = _forward_logprobs(old, prompt, generation.token_ids[:first])
    assert generation.logprobs[:first] == pytest.approx(expected, abs=1e-4)


def test_finish_ends_turns_on_the_old_weights_before_an_update() -> None:
    old, new = _model(seed=0), _model(seed=1)
    engine = TransformersEngine(old, max_batch=2, on_update="finish")
    prompt = _prompt(12)

    async def work() -> tuple[Generation, Generation]:
        turn = asyncio.create_task(_sample(engine, prompt, "first", max_tokens=200))
        await _until(lambda: engine.stats()["sampled_tokens"] >= 5)
        await engine.suspend()
        await engine.update_weights(new.state_dict(), 1)
        await engine.resume()
        assert turn.done() or engine.stats()["sampled_tokens"] >= 200
        return await turn, await _sample(engine, prompt, "second", max_tokens=10)

    first, second = _run(engine, work)
    assert set(first.policy_versions) == {0}
    assert first.logprobs == pytest.approx(_forward_logprobs(old, prompt, first.token_ids), abs=1e-4)
    assert set(second.policy_versions) == {1}
    assert second.logprobs == pytest.approx(_forward_logprobs(new, prompt, second.token_ids), abs=1e-4)


@pytest.mark.parametrize("stale_prefix", ["recompute", "keep"])
def test_the_next_turn_after_an_update_recomputes_the_prefix_unless_told_to_keep_it(
    stale_prefix: Any,
) -> None:
    old, new = _model(seed=0), _model(seed=1)
    engine = TransformersEngine(old, max_batch=2, stale_prefix=stale_prefix)

    async def work() -> tuple[list[int], Generation]:
        ids = _prompt(20)
        first = await _sample(engine, ids, "0", max_tokens=5, episode_id="e")
        ids = ids + first.token_ids + _prompt(3, seed=9)
        await engine.update_weights(new.state_dict(), 3)
        return ids, await _sample(engine, ids, "1", max_tokens=10, episode_id="e")

    ids, second = _run(engine, work)
    assert second.policy_versions == [3] * 10
    fresh = _forward_logprobs(new, ids, second.token_ids)
    difference = max(abs(a - b) for a, b in zip(second.logprobs, fresh, strict=True))
    assert difference < 1e-4 if stale_prefix == "recompute" else difference > 1e-2


def test_the_given_model_and_the_engine_do_not_share_weights() -> None:
    model, new = _model(seed=0), _model(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = TransformersEngine(model, max_batch=2)
    prompt = _prompt(6)

    async def work() -> Generation:
        await engine.update_weights(new.state_dict(), 1)
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.zero_()
        return await _sample(engine, prompt, max_tokens=5)

    generation = _run(engine, work)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    expected = _forward_logprobs(_model(seed=1), prompt, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


def test_weights_that_do_not_fit_are_refused_and_change_nothing() -> None:
    model = _model()
    engine = TransformersEngine(model, max_batch=2)
    state = dict(model.state_dict())
    prompt = _prompt(6)

    async def work() -> Generation:
        some = next(iter(state))
        without_one = {name: tensor for name, tensor in state.items() if "q_proj" not in name}
        for weights, match in (
            ({**state, "nonsense": torch.zeros(1)}, "nonsense"),
            (without_one, "q_proj"),
            ({**state, some: torch.zeros(3)}, "must be"),
        ):
            with pytest.raises(UsageError, match=match):
                await engine.update_weights(weights, 1)
        tied = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        await engine.update_weights(tied, 2)
        with pytest.raises(UsageError, match="older"):
            await engine.update_weights(state, 1)
        assert engine.version == 2
        return await _sample(engine, prompt, max_tokens=5)

    generation = _run(engine, work)
    assert generation.logprobs == pytest.approx(
        _forward_logprobs(model, prompt, generation.token_ids), abs=1e-4
    )


def test_an_aborted_turn_gives_its_tokens_so_far() -> None:
    model = _model()
    engine = TransformersEngine(model, max_batch=1)
    prompt = _prompt(6)

    async def work() -> tuple[Generation, Generation]:
        running = asyncio.create_task(_sample(engine, prompt, "running", max_tokens=590))
        queued = asyncio.create_task(_sample(engine, prompt, "queued", max_tokens=590))
        await _until(lambda: engine.stats()["sampled_tokens"] >= 5)
        await engine.suspend()
        await engine.abort("queued")
        await engine.abort("running")
        await engine.abort("unknown")
        return await running, await queued

    running, queued = _run(engine, work)
    assert running.finish_reason == queued.finish_reason == "abort"
    assert queued.token_ids == []
    assert 5 <= len(running.token_ids) < 590
    assert running.logprobs == pytest.approx(_forward_logprobs(model, prompt, running.token_ids), abs=1e-4)


def test_a_cancelled_request_frees_its_row() -> None:
    engine = TransformersEngine(_model(), max_batch=1)

    async def work() -> Generation:
        running = asyncio.create_task(_sample(engine, _prompt(6), "running", max_tokens=590))
        await _until(lambda: engine.stats()["sampled_tokens"] >= 2)
        running.cancel()
        generation = await _sample(engine, _prompt(6), "next", max_tokens=3)
        assert engine.stats()["sampled_tokens"] < 590
        return generation

    assert len(_run(engine, work).token_ids) == 3


def test_nothing_is_sampled_while_suspended() -> None:
    engine = TransformersEngine(_model(), max_batch=2)

    async def work() -> None:
        turn = asyncio.create_task(_sample(engine, _prompt(6), max_tokens=590))
        await _until(lambda: engine.stats()["sampled_tokens"] >= 2)
        await engine.suspend()
        sampled = engine.stats()["sampled_tokens"]
        await asyncio.sleep(0.05)
        assert engine.stats()["sampled_tokens"] == sampled
        await engine.resume()
        assert len((await turn).token_ids) == 590

    _run(engine, work)


def test_an_engine_that_expects_requests_makes_no_step_before_they_are_in() -> None:
    engine = TransformersEngine(_model(), max_batch=4)

    async def stands_at(steps: int) -> None:
        await asyncio.sleep(0.05)
        assert engine.stats()["steps"] == steps

    async def work() -> None:
        engine.expect_requests(2)
        first = asyncio.create_task(_sample(engine, _prompt(6), "a", max_tokens=3))
        await stands_at(0)
        second = asyncio.create_task(_sample(engine, _prompt(6, 1), "b", max_tokens=5))
        await first
        await stands_at(3)  # the end of a turn closes the gate, though the other turn has tokens to sample
        third = asyncio.create_task(_sample(engine, _prompt(6, 2), "c", max_tokens=2))
        await asyncio.gather(second, third)
        await stands_at(5)
        last = asyncio.create_task(_sample(engine, _prompt(6), "d", max_tokens=1))
        await stands_at(5)
        engine.expect_requests(1)
        await last
        assert engine.stats()["steps"] == 6

    _run(engine, work)


def test_requests_that_were_expected_take_their_rows_in_the_order_of_their_ids() -> None:
    model = _model()
    orders = (("a", "b", "c"), ("c", "a", "b"))
    admitted = []
    for order in orders:
        engine = TransformersEngine(model, max_batch=4)

        async def work(order: tuple[str, ...] = order, engine: TransformersEngine = engine) -> list[str]:
            engine.expect_requests(3)
            turns = [asyncio.create_task(_sample(engine, _prompt(6), name, max_tokens=99)) for name in order]
            await _until(lambda: engine.stats()["steps"] > 0)
            rows = [ticket.request.request_id for ticket in engine._slots.tickets if ticket is not None]
            await asyncio.gather(*turns)
            return rows

        admitted.append(_run(engine, work))
    assert admitted == [["a", "b", "c"]] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_weights_that_are_not_finite_kill_the_engine_and_everybody_learns_it() -> None:
    model = _model()
    engine = TransformersEngine(model, max_batch=1)

    async def work() -> None:
        turns = [asyncio.create_task(_sample(engine, _prompt(6), str(n), max_tokens=590)) for n in range(3)]
        await _until(lambda: engine.stats()["sampled_tokens"] >= 2)
        await engine.update_weights(
            {name: tensor * torch.nan for name, tensor in model.state_dict().items()}, 4
        )
        for result in await asyncio.gather(*turns, return_exceptions=True):
            assert isinstance(result, ModelError)
            assert "version 4" in str(result)
        assert isinstance(engine.error, ModelError)
        with pytest.raises(ModelError, match="version 4"):
            await _sample(engine, _prompt(3))
        with pytest.raises(ModelError, match="version 4"):
            await engine.suspend()

    _run(engine, work)


def test_close_ends_running_and_queued_requests_and_the_thread() -> None:
    engine = TransformersEngine(_model(), max_batch=1)

    async def work() -> None:
        turns = [asyncio.create_task(_sample(engine, _prompt(6), str(n), max_tokens=590)) for n in range(3)]
        await _until(lambda: engine.stats()["sampled_tokens"] >= 2)
        await engine.close()
        await engine.close()
        for result in await asyncio.gather(*turns, return_exceptions=True):
            assert isinstance(result, ModelError) and "closed" in str(result)
        with pytest.raises(ModelError, match="closed"):
            await _sample(engine, _prompt(3))

    _run(engine, work)
    assert not engine._thread.is_alive()


def test_attention_with_a_part_the_engine_lacks_is_refused() -> None:
    config = transformers.Gemma2Config(**_SIZES, head_dim=8, attn_logit_softcapping=5.0)
    with pytest.raises(UsageError, match="softcap"):
        TransformersEngine(transformers.Gemma2ForCausalLM(config).eval(), max_batch=2)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"on_update": "drop"}, "on_update"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_length": 601}, "600 positions"),
    ],
)
def test_options_outside_their_range_are_refused(option: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TransformersEngine(_model(), **option)
