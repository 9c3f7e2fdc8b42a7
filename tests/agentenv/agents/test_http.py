"""The endpoint over HTTP: answers, streams, refusals, and what a client that goes away leaves."""

import asyncio
import json
from typing import Any

import pytest

from agentenv.agents import app

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def _error(answer: Any, status: int) -> str:
    """The message of a refusal, which has OpenAI's form."""
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return str(error["message"])


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_turn_has_the_form_of_openai(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            answer = (await service.ask(service.open())).json()
            choice = answer["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": "hello"}
            assert choice["finish_reason"] == "stop"
            assert (answer["object"], answer["model"]) == ("chat.completion", "policy")
            assert answer["usage"]["completion_tokens"] == len("hello") + 1
            assert answer["usage"]["prompt_tokens"] == len(service.model.requests[0].prompt_ids)

    run(check())


def test_the_key_alone_names_the_episode(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            first, second = service.open(), service.open()
            body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
            answer = await service.post(second, body, "/v1/chat/completions")
            assert answer.status_code == 200
            assert (first.record.answers, second.record.answers) == (0, 1)

    run(check())


def test_a_stream_gives_the_same_turn_in_pieces(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            episode = service.open()
            answer = await service.ask(episode, stream=True, stream_options={"include_usage": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = _events(answer.text)
            assert [event["object"] for event in events] == ["chat.completion.chunk"] * len(events)
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
            assert "".join(delta.get("content", "") for delta in deltas) == "hello"
            assert deltas[0]["role"] == "assistant"
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
            assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
            assert episode.record.answers == 1

    run(check())


def test_a_stream_is_kept_alive_while_the_turn_is_sampled(
    serve: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.02)

    async def check() -> None:
        async with serve(["hello"], token_s=0.05) as service:
            text = (await service.ask(service.open(), stream=True)).text
            assert text.startswith(": ") and len(_events(text)) == 3

    run(check())


def test_a_stream_that_fails_says_so_in_the_stream(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["hello"]) as service:
            episode = service.open()
            await service.model.close()
            (event,) = _events((await service.ask(episode, stream=True)).text)
            assert event["error"]["code"] == "engine_failed"
            assert episode.failure is not None

    run(check())


def test_a_call_of_a_tool_comes_back_as_one(serve: Any, run: Any, qwen_tokenizer: Any) -> None:
    said = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'

    async def check() -> None:
        async with serve([said, "done"], tokenizer=qwen_tokenizer) as service:
            episode = service.open(sampling=_sampling())
            messages: list[Any] = [{"role": "user", "content": "list"}]
            choice = (await service.ask(episode, messages, tools=[_TOOL])).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "bash"
            assert json.loads(call["function"]["arguments"]) == {"command": "ls -l"}
            assert choice["message"]["content"].strip() == "I look."
            messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "app.py"}]
            choice = (await service.ask(episode, messages, tools=[_TOOL])).json()["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": "done"}
            first, second = service.model.requests
            sampled = [*qwen_tokenizer.encode(said), qwen_tokenizer.eos_token_id]
            start = first.prompt_ids + sampled
            assert second.prompt_ids[: len(start)] == start
            assert qwen_tokenizer.decode(second.prompt_ids[len(start) :]) == (
                "\n<|im_start|>user\n<tool_response>\napp.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            )
            assert "<tools>" in qwen_tokenizer.decode(first.prompt_ids)
            assert episode.record.forks == 0

    run(check())


def test_a_streamed_call_comes_whole(serve: Any, run: Any, qwen_tokenizer: Any) -> None:
    said = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'

    async def check() -> None:
        async with serve([said], tokenizer=qwen_tokenizer) as service:
            text = (await service.ask(service.open(sampling=_sampling()), tools=[_TOOL], stream=True)).text
            calls = [
                call
                for event in _events(text)
                for choice in event["choices"]
                for call in choice["delta"].get("tool_calls", ())
            ]
            assert [call["index"] for call in calls] == [0]
            assert json.loads(calls[0]["function"]["arguments"]) == {"command": "ls"}

    run(check())


def test_a_call_that_cannot_be_read_stays_text(serve: Any, run: Any, qwen_tokenizer: Any) -> None:
    said = '<tool_call>\n{"name": bash}\n</tool_call>'

    async def check() -> None:
        async with serve([said], tokenizer=qwen_tokenizer) as service:
            answer = await service.ask(service.open(sampling=_sampling()), tools=[_TOOL])
            choice = answer.json()["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": said}
            assert choice["finish_reason"] == "stop"

    run(check())


def test_a_template_without_a_place_for_tools_is_named(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["x"]) as service:
            message = _error(await service.ask(service.open(), tools=[_TOOL]), 400)
            assert "ByteTokenizer" in message and "no place for tools" in message

    run(check())


def test_a_template_whose_calls_nobody_can_read_is_named(serve: Any, run: Any, qwen_tokenizer: Any) -> None:
    import copy

    tokenizer = copy.copy(qwen_tokenizer)
    tokenizer.chat_template = "{{ tools }}" + qwen_tokenizer.chat_template

    async def check() -> None:
        async with serve(["x"], tokenizer=tokenizer) as service:
            assert "no parser is known" in _error(await service.ask(service.open(), tools=[_TOOL]), 400)

    run(check())


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({}, "", 401),
        ({"authorization": "Bearer sk-wrong"}, "", 401),
        ({"authorization": "Basic KEY"}, "", 401),
        ({"authorization": "Bearer KEY"}, "/episodes/other/v1/chat/completions", 404),
        ({"authorization": "Bearer KEY"}, "/episodes/%2e%2e/v1/chat/completions", 404),
        ({"authorization": "Bearer KEY"}, "/v1/completions", 404),
        ({"authorization": "Bearer KEY"}, "/v1/responses", 404),
    ],
)
def test_who_has_no_key_for_a_path_is_refused(
    serve: Any, run: Any, headers: dict[str, str], path: str, status: int
) -> None:
    async def check() -> None:
        async with serve(["x"]) as service:
            episode = service.open()
            given = {name: value.replace("KEY", episode.api_key) for name, value in headers.items()}
            url = path or f"/episodes/{episode.id}/v1/chat/completions"
            answer = await service.client.post(url, content="{}", headers=given)
            assert episode.api_key not in _error(answer, status)
            assert service.model.requests == []

    run(check())


def test_a_closed_episode_answers_nothing(serve: Any, run: Any, until: Any) -> None:
    async def check() -> None:
        async with serve(["x"], token_s=5.0) as service:
            episode = service.open()
            waiting = asyncio.create_task(service.ask(episode))
            await until(lambda: bool(episode.in_flight))
            await service.endpoint.close(episode)
            assert "is over" in _error(await waiting, 403)
            assert "no open episode" in _error(await service.ask(episode), 401)

    run(check())


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"nonsense", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b"\xff\xfe", 400),
        (b'{"max_tokens": 1' + b"0" * 5000 + b"}", 400),
        (json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode(), 400),
    ],
)
def test_hostile_bodies_get_one_clear_error(serve: Any, run: Any, content: bytes, status: int) -> None:
    async def check() -> None:
        async with serve(["x"]) as service:
            episode = service.open(max_context=4096)
            _error(await service.post(episode, content), status)
            assert (await service.ask(episode)).status_code == 200

    run(check())


def test_a_body_over_the_limit_is_not_read(serve: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", 1000)

    async def pieces() -> Any:
        for _ in range(100):
            yield b" " * 100

    async def check() -> None:
        async with serve(["x"]) as service:
            episode = service.open()
            assert "1000 bytes" in _error(await service.post(episode, b" " * 1001), 413)
            assert "1000 bytes" in _error(await service.post(episode, pieces()), 413)

    run(check())


def test_budgets_are_refusals_that_agents_give_up_at(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["x"], repeat=True) as service:
            episode = service.open(max_turns=1)
            await service.ask(episode)
            assert "1 answers are used up" in _error(await service.ask(episode), 403)
            assert episode.exhausted == "max_turns"
            short = service.open(max_context=40)
            long = [{"role": "user", "content": "x" * 50}]
            assert "maximum context length is 40 tokens" in _error(await service.ask(short, long), 400)
            assert short.exhausted == "max_tokens" and short.failure is None
            await service.ask(short, [{"role": "user", "content": ""}])
            assert short.exhausted is None

    run(check())


def test_a_client_that_has_gone_leaves_no_turn(serve: Any, run: Any, until: Any) -> None:
    import httpx

    async def check() -> None:
        async with serve(["hello"], token_s=60.0, repeat=True) as service:
            episode = service.open()
            for stream in (False, True):
                with pytest.raises(httpx.ReadTimeout):
                    await service.client.post(
                        "/v1/chat/completions",
                        json={"messages": [{"role": "user", "content": "x"}], "stream": stream},
                        headers={"authorization": f"Bearer {episode.api_key}"},
                        timeout=0.3,
                    )
                await until(lambda: not episode.in_flight)
            assert episode.record.answers == 0 and episode.failure is None

    run(check())


def test_a_text_of_one_token_can_be_stopped_at(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["x"]) as service:
            episode = service.open()
            assert "takes 3 tokens" in _error(await service.ask(episode, stop=["abc"]), 400)
            assert (await service.ask(episode, stop="!")).status_code == 200
            assert ord("!") in service.model.requests[0].sampling.stop_token_ids

    run(check())


def test_the_models_are_one(serve: Any, run: Any) -> None:
    async def check() -> None:
        async with serve(["x"]) as service:
            headers = {"authorization": f"Bearer {service.open().api_key}"}
            listed = (await service.client.get("/v1/models", headers=headers)).json()
            assert [model["id"] for model in listed["data"]] == ["policy"]
            _error(await service.client.get("/v1/models"), 401)

    run(check())


def _sampling() -> Any:
    from agentenv.inference import SamplingParams

    return SamplingParams(max_tokens=512)
