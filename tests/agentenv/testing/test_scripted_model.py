"""The scripted engine behaves like a real one in everything but its choice of words."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from agentenv.errors import ModelError, UsageError
from agentenv.inference import Engine, Generation, GenerationRequest, SamplingParams
from agentenv.testing import ByteTokenizer, ScriptedModel

_END = 257


def _request(
    id: str, *, episode: str = "e", max_tokens: int = 100, deadline: float | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=id,
        prompt_ids=[1, 2],
        sampling=SamplingParams(max_tokens=max_tokens),
        episode_id=episode,
        deadline=deadline,
    )


async def _some_tokens() -> None:
    """Each of the pauses is long enough for a token, and however long one of them gets, not for many."""
    for _ in range(5):
        await asyncio.sleep(0.02)


def _run(coroutine: Coroutine[Any, Any, Generation]) -> Generation:
    async def bounded() -> Generation:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedModel(["a"]), Engine)


def test_each_episode_gets_the_script_from_its_beginning() -> None:
    model = ScriptedModel(["ab", [7, 8]], logprob=-0.25)

    async def play() -> list[Generation]:
        return [
            await model.generate(_request("1", episode="a")),
            await model.generate(_request("2", episode="b")),
            await model.generate(_request("3", episode="a")),
        ]

    first, other, second = asyncio.run(play())
    assert first.token_ids == other.token_ids == [97, 98, _END]
    assert first.logprobs == [-0.25] * 3
    assert first.policy_versions == [0] * 3
    assert first.finish_reason == "stop"
    assert second.token_ids == [7, 8]
    assert [request.request_id for request in model.requests] == ["1", "2", "3"]


def test_a_script_that_is_too_short_names_the_episode_unless_it_repeats() -> None:
    async def twice(model: ScriptedModel) -> Generation:
        await model.generate(_request("1"))
        return await model.generate(_request("2"))

    with pytest.raises(ModelError, match="1 responses, and episode 'e' asks for number 2"):
        _run(twice(ScriptedModel(["a"])))
    assert _run(twice(ScriptedModel(["a"], repeat=True))).token_ids == [97, _END]


def test_a_function_can_answer() -> None:
    model = ScriptedModel(lambda request: f"{len(request.prompt_ids)}")
    assert _run(model.generate(_request("1"))).token_ids == [ord("2"), _END]


def test_a_long_reply_is_cut_at_max_tokens() -> None:
    generation = _run(ScriptedModel(["abc"]).generate(_request("1", max_tokens=3)))
    assert (generation.token_ids, generation.finish_reason) == ([97, 98, 99], "length")


def test_a_sync_in_the_middle_of_a_turn_keeps_its_tokens_with_their_versions() -> None:
    model = ScriptedModel(["a" * 20], token_s=0.02)

    async def play() -> Generation:
        task = asyncio.create_task(model.generate(_request("1")))
        await _some_tokens()
        await model.suspend()
        await asyncio.sleep(0.1)
        assert not task.done()
        await model.update_weights({}, version=3)
        await model.resume()
        return await task

    generation = _run(play())
    assert len(generation.token_ids) == 21
    versions = generation.policy_versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 3}
    assert model.version == 3
    assert model.updates == [3]


def test_abort_returns_the_tokens_so_far_even_while_suspended() -> None:
    model = ScriptedModel(["a" * 50], token_s=0.01)

    async def play() -> Generation:
        task = asyncio.create_task(model.generate(_request("1")))
        await _some_tokens()
        await model.suspend()
        await model.abort("1")
        await model.abort("unknown")
        return await task

    generation = _run(play())
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < 50
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.policy_versions)


def test_a_deadline_aborts_even_while_suspended() -> None:
    model = ScriptedModel(["a"])

    async def play() -> Generation:
        await model.suspend()
        return await model.generate(_request("1", deadline=time.monotonic() + 0.05))

    assert _run(play()).finish_reason == "abort"


def test_close_fails_waiting_and_later_calls_and_may_be_repeated() -> None:
    model = ScriptedModel(["a"])

    async def play() -> None:
        await model.suspend()
        task = asyncio.create_task(model.generate(_request("1")))
        await asyncio.sleep(0.01)
        await model.close()
        await model.close()
        with pytest.raises(ModelError, match="closed"):
            await task
        with pytest.raises(ModelError, match="closed"):
            await model.generate(_request("2"))

    asyncio.run(play())


def test_two_requests_of_one_id_are_refused_and_a_cancelled_one_frees_its_id() -> None:
    model = ScriptedModel(["a"], token_s=60, repeat=True)

    async def play() -> None:
        task = asyncio.create_task(model.generate(_request("1")))
        await asyncio.sleep(0.01)
        with pytest.raises(UsageError, match="'1' is running already"):
            await model.generate(_request("1"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = asyncio.create_task(model.generate(_request("1")))
        await asyncio.sleep(0.01)
        await model.abort("1")
        assert (await again).finish_reason == "abort"

    asyncio.run(play())


@pytest.mark.parametrize("kwargs", [{"responses": []}, {"responses": "text"}])
def test_a_script_that_is_no_list_is_refused(kwargs: Any) -> None:
    with pytest.raises(UsageError, match="responses must be a non-empty list"):
        ScriptedModel(**kwargs)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="logprob must be 0 or less"):
        ScriptedModel(["a"], logprob=0.1)
    with pytest.raises(UsageError, match="token_s must be 0 or more"):
        ScriptedModel(["a"], token_s=-1)


@pytest.mark.parametrize("text", ["", "plain", "héllo 世界 \U0001f600", "a<|im_end|>b<|pad|>"])
def test_the_byte_tokenizer_decodes_what_it_encodes(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_byte_tokenizer_leaves_special_tokens_out_when_asked_and_checks_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([97, 257, 98], skip_special_tokens=True) == "ab"
    assert len(tokenizer) == 259
    with pytest.raises(ValueError, match="between 0 and 258, got 259"):
        tokenizer.decode([259])


def test_the_byte_tokenizers_template_is_the_one_that_it_shows() -> None:
    jinja2 = pytest.importorskip("jinja2")
    tokenizer = ByteTokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    for generation in (False, True):
        rendered = jinja2.Template(tokenizer.chat_template, keep_trailing_newline=True).render(
            messages=messages, add_generation_prompt=generation
        )
        assert rendered == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
    assert tokenizer.apply_chat_template(messages)[0] == 256


def test_a_conversation_runs_on_the_byte_tokenizer() -> None:
    from agentenv.conversation import Conversation

    tokenizer = ByteTokenizer()
    conversation = Conversation(tokenizer)
    conversation.start([{"role": "user", "content": "hi"}])
    generation = _run(ScriptedModel(["yes"]).generate(_request("1")))
    text = conversation.add_action(generation.token_ids, generation.logprobs, generation.policy_versions)
    assert text == "yes"
    conversation.add_observation("and?")
    assert tokenizer.decode(conversation.prompt_ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
