"""The client of chat servers against a real server that fails in every customary way."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from agentenv.errors import ModelError, UsageError
from agentenv.inference import chat_server
from agentenv.inference.chat_server import ChatServer, ContextLengthError, ServerGoneError

MESSAGES = [{"role": "user", "content": "hello"}]


def _client(server: Any, **settings: Any) -> ChatServer:
    return ChatServer(
        server.url, **{"model": "tiny", "timeout_s": 60.0, "first_pause_s": 0.01, "retries": 3, **settings}
    )


def _ask(client: ChatServer, **fields: Any) -> str:
    return client.complete(MESSAGES, **{"max_tokens": 5, "temperature": 0.5, "seed": 3, **fields}).text


def test_a_turn_asks_for_what_was_set_and_reads_text_and_tokens(server: Any) -> None:
    answer = _client(server, api_key="secret").complete(MESSAGES, max_tokens=5, temperature=0.5, seed=2**40)
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("word", 10, 2)
    assert server.keys == ["Bearer secret"]
    assert server.requests == [
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.5, "seed": 2**40 % 2**31}
    ]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 524])
def test_what_may_pass_is_asked_again(server: Any, status: int) -> None:
    answers: list[Any] = [
        (status, {"error": {"message": "busy"}}, {}),
        None,
        (200, b"<html>", {}),
        (200, {"choices": []}, {}),
        "at last",
    ]
    server.answer = lambda request: answers.pop(0)
    assert _ask(_client(server, retries=4)) == "at last"
    assert len(server.requests) == 5


def test_what_does_not_pass_is_an_error_that_tells_what_came_and_how_often(server: Any) -> None:
    server.answer = lambda request: (503, {"error": {"message": "loading the model"}}, {})
    with pytest.raises(ModelError, match=r"answered 503: loading the model, 4 times in a row") as caught:
        _ask(_client(server))
    assert not isinstance(caught.value, ServerGoneError)


def test_the_pause_that_a_server_asks_for_is_kept(server: Any) -> None:
    answers: list[Any] = [(429, {}, {"Retry-After": "0.4"}), "at last"]
    server.answer = lambda request: answers.pop(0)
    began = time.monotonic()
    assert _ask(_client(server)) == "at last"
    assert time.monotonic() - began >= 0.4


def test_an_answer_that_takes_too_long_is_asked_for_again(server: Any) -> None:
    asked_again = threading.Event()

    def answer(request: Any) -> str:
        if len(server.requests) == 1:
            asked_again.wait(60.0)
        return "word"

    server.answer = answer
    assert _ask(_client(server, timeout_s=0.3)) == "word"
    assert len(server.requests) >= 2
    asked_again.set()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirection_is_not_followed_and_the_key_goes_nowhere_else(server: Any, status: int) -> None:
    elsewhere = f"{server.url.replace('127.0.0.1', 'localhost')}/elsewhere"
    server.answer = lambda request: (status, {}, {"Location": elsewhere})
    with pytest.raises(ServerGoneError, match=rf"answered {status}, go to {elsewhere}; name that address"):
        _ask(_client(server, api_key="secret"))
    assert server.keys == ["Bearer secret"]


def test_an_answer_that_trickles_in_ends_by_the_time_out(server: Any) -> None:
    server.pause_s = 1.0  # after each byte; the whole answer would take minutes
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"no answer within 0\.2 s"):
        _ask(_client(server, timeout_s=0.2, retries=0))
    assert time.monotonic() - began < 60.0


def test_an_answer_without_end_is_an_error(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "_MOST_BYTES", 1000)
    server.answer = lambda request: "word " * 1000
    with pytest.raises(ModelError, match="gave an answer of more than 1000 bytes"):
        _ask(_client(server, retries=0))


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"n":' + b"9" * 5000 + b"}", b""], ids=["deep", "long", "empty"]
)
def test_json_that_cannot_be_read_is_asked_for_again(server: Any, body: bytes) -> None:
    answers: list[Any] = [(200, body, {}), (500, body, {}), "at last"]
    server.answer = lambda request: answers.pop(0)
    assert _ask(_client(server)) == "at last"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_never_tried_again_and_never_told(server: Any, status: int) -> None:
    server.answer = lambda request: (status, {"error": {"message": "no"}}, {})
    with pytest.raises(
        ServerGoneError, match=rf"answered {status}: no \(the key of OPENAI_API_KEY was sent\)"
    ) as e:
        _ask(_client(server, api_key="secret"))
    assert len(server.requests) == 1
    assert "secret" not in str(e.value)


def test_a_field_that_a_server_does_not_know_is_left_out_from_then_on(server: Any) -> None:
    def answer(request: dict[str, Any]) -> Any:
        if "seed" in request:
            return 400, {"error": {"message": "Unrecognized request argument supplied: seed"}}, {}
        if "max_tokens" in request:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return 400, {"error": {"message": message}}, {}
        return "word"

    server.answer = answer
    client = _client(server)
    assert [_ask(client), _ask(client)] == ["word", "word"]
    assert client.unknown_fields == ["max_tokens", "seed"]
    assert len(server.requests) == 4
    assert server.requests[-1]["max_completion_tokens"] == 5


def test_a_value_that_is_refused_is_no_unknown_field(server: Any) -> None:
    server.answer = lambda request: (400, {"error": {"message": "max_tokens must be at most 4"}}, {})
    with pytest.raises(ServerGoneError, match="max_tokens must be at most 4"):
        _ask(_client(server))


def test_a_conversation_that_is_too_long_is_told_apart(server: Any) -> None:
    message = "This model's maximum context length is 512 tokens."
    server.answer = lambda request: (400, {"object": "error", "message": message}, {})
    with pytest.raises(ContextLengthError, match="maximum context length is 512"):
        _ask(_client(server))


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{}]}, [], {"choices": [{"message": None}]}]
)
def test_an_answer_without_choices_is_an_error(server: Any, body: Any) -> None:
    server.answer = lambda request: (200, body, {})
    with pytest.raises(ModelError, match="without choices"):
        _ask(_client(server, retries=0))


def test_an_answer_without_text_is_an_empty_one(server: Any) -> None:
    server.answer = lambda request: (200, {"choices": [{"message": {"content": None}}]}, {})
    assert _ask(_client(server)) == ""


def test_an_answer_in_parts_is_its_text_without_the_thoughts(server: Any) -> None:
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "at "},
        {"type": "text", "text": "last"},
    ]
    server.answer = lambda request: (200, {"choices": [{"message": {"content": parts}}]}, {})
    assert _ask(_client(server)) == "at last"


@pytest.mark.parametrize(
    "usage", [None, [1], "many", {"prompt_tokens": "x"}, {"prompt_tokens": -1}, {"prompt_tokens": 10**400}]
)
def test_tokens_that_are_no_numbers_are_unknown(server: Any, usage: Any) -> None:
    body = {"choices": [{"message": {"content": "word"}}], "usage": usage}
    server.answer = lambda request: (200, body, {})
    answer = _client(server).complete(MESSAGES, max_tokens=5, temperature=0.5)
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("word", None, None)


def test_a_server_that_hangs_before_the_first_episode_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentenv.inference import chat_server

    monkeypatch.setattr(chat_server, "_LIST_TIMEOUT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"--model-name .*no answer within 0\.1 s, 4 times in a row"):
            ChatServer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", first_pause_s=0.01).choose_model()
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("key", ["secret\nInjected: 1", "s\u00e9cret", "secret\u20ac"])
def test_a_key_that_no_header_can_hold_is_refused_and_never_told(server: Any, key: str) -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as refused:
        _client(server, api_key=key)
    assert "cret" not in str(refused.value)
    assert _ask(_client(server, api_key="secret\n")) == "word"
    assert server.keys == ["Bearer secret"]


def test_nothing_that_listens_is_one_error_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(UsageError, match="connection refused: nothing listens there") as caught:
        ChatServer(url).choose_model()
    assert "in a row" not in str(caught.value)


def test_the_only_model_is_chosen_and_a_missing_v1_is_completed(server: Any) -> None:
    client = ChatServer(server.url.removesuffix("/v1"))
    assert client.choose_model() == "tiny"
    assert client.base == server.url
    assert ChatServer(f"{server.url}/chat/completions").choose_model() == "tiny"


def test_one_of_several_models_has_to_be_named(server: Any) -> None:
    server.models = ["small", "large"]
    with pytest.raises(UsageError, match="serves 2 models; choose with --model-name: small, large"):
        ChatServer(server.url).choose_model()
    assert ChatServer(server.url, model="large").choose_model() == "large"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "", "http://[::1", "http://host:port", "http://a b"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"--url '.*' must be an address such as http://"):
        ChatServer(url)
