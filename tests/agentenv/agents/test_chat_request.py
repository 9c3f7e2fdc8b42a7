"""Requests of OpenAI's chat API: what is served, ignored and refused."""

from typing import Any

import pytest

from agentenv.agents.chat_request import RefusedRequestError, answer_message, read_request

_USER = {"role": "user", "content": "hi"}
_TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [_USER], **fields}


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def test_how_tokens_are_sampled_is_not_the_agents_to_say() -> None:
    request = read_request(_body(temperature=0.0, top_p=0.1, seed=1, user="me", parallel_tool_calls=True))
    assert request.max_tokens is None and not request.stream


def test_the_lower_of_the_two_token_limits_counts() -> None:
    assert read_request(_body(max_tokens=9, max_completion_tokens=4)).max_tokens == 4


def test_text_in_parts_says_the_same_as_text() -> None:
    parts = [
        {"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "i"},
    ]
    one = read_request(_body()).messages[0]
    other = read_request({"messages": [{"role": "user", "content": parts}]}).messages[0]
    assert one.identity == other.identity and other.message == _USER


def test_a_request_of_openhands_is_served() -> None:
    """The fields that its SDK 1.58.2 sends."""
    text = [{"type": "text", "text": "hi"}]
    error = [{"type": "text", "text": "[An error occurred.]\n"}, {"type": "text", "text": "No such file"}]
    body = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "tool_calls": [_call('{"command": "ls"}')]},
            {"role": "tool", "content": error, "tool_call_id": "call_1", "name": "bash"},
        ],
        "tools": [_TOOL],
        "prompt_cache_key": "d7118e22",
        "reasoning_effort": "high",
    }
    request = read_request(body)
    assert [message.message["content"] for message in request.messages] == [
        "be brief",
        "hi",
        "hi",
        "[An error occurred.]\nNo such file",
    ]
    assert request.messages[2].identity == answer_message("hi", [_call('{"command":"ls"}')]).identity


def test_an_answer_is_known_again_however_the_agent_writes_it() -> None:
    answer = answer_message("I look.\n", [_call('{"command": "ls", "n": 1}')])
    echo = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [_call('{"n":1,"command":"ls"}')],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
    }
    assert read_request({"messages": [echo, _USER]}).messages[0].identity == answer.identity


def test_reasoning_that_comes_back_reaches_the_template_and_makes_no_other_answer() -> None:
    echo = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    message = read_request({"messages": [echo, _USER]}).messages[0]
    assert message.message["reasoning_content"] == "hm"
    assert message.identity == answer_message("I look.", None).identity


def test_an_answer_with_another_command_is_another() -> None:
    answer = answer_message("", [_call('{"command": "ls"}')])
    echo = {"role": "assistant", "content": None, "tool_calls": [_call('{"command": "rm"}')]}
    assert read_request({"messages": [echo, _USER]}).messages[0].identity != answer.identity


def test_arguments_of_a_call_reach_the_template_as_an_object() -> None:
    echo = {"role": "assistant", "content": None, "tool_calls": [_call('{"command": "ls"}')]}
    message = read_request({"messages": [echo, _USER]}).messages[0].message
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}


def test_the_developer_is_the_system_to_a_template() -> None:
    assert read_request({"messages": [{"role": "developer", "content": "x"}]}).messages[0].role == "system"


def test_no_tool_is_offered_where_the_agent_wants_none() -> None:
    assert read_request(_body(tools=[_TOOL], tool_choice="none")).tools == ()
    assert read_request(_body(tools=[_TOOL])).tools == (_TOOL,)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], "JSON object"),
        ({}, "messages"),
        (_body(messages=[]), "messages"),
        (_body(messages="hi"), "messages"),
        (_body(messages=["hi"]), "messages[0]"),
        (_body(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role='wizard'"),
        (_body(messages=[{"role": "user"}]), "messages[0].content"),
        (_body(messages=[{"role": "user", "content": 3}]), "messages[0].content=3"),
        (_body(messages=[{"role": "user", "content": "\ud800"}]), "messages[0].content"),
        (_body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "only parts of type 'text'"),
        (_body(messages=[_USER, {"role": "assistant", "content": "x"}]), "the last message"),
        (_body(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (_body(messages=[{"role": "assistant", "tool_calls": [{}]}, _USER]), "messages[0].tool_calls[0]"),
        (_body(messages=[{"role": "assistant", "content": "", "function_call": {}}, _USER]), "function_call"),
        (
            _body(messages=[{"role": "assistant", "content": "", "reasoning_content": 3}, _USER]),
            "messages[0].reasoning_content=3",
        ),
        (_body(messages=[_USER] * 10_001), "10001 are too many"),
        (_body(colour="red"), "'colour'"),
        (_body(n=2), "n=2"),
        (_body(logprobs=True), "logprobs=True"),
        (_body(response_format={"type": "json_object"}), "response_format"),
        (_body(functions=[{}]), "functions"),
        (_body(tools=[{"type": "retrieval"}]), "tools[0]"),
        (_body(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name='a b'"),
        (_body(tools=[_TOOL] * 129), "tools="),
        (_body(tools=[_TOOL], tool_choice="required"), "tool_choice='required'"),
        (_body(max_tokens=0), "max_tokens=0"),
        (_body(max_tokens=True), "max_tokens=True"),
        (_body(max_completion_tokens="9"), "max_completion_tokens='9'"),
        (_body(stream="yes"), "stream='yes'"),
        (_body(stop=[""]), "stop="),
        (_body(stop=[1]), "stop="),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(body: Any, named: str) -> None:
    with pytest.raises(RefusedRequestError) as caught:
        read_request(body)
    answer = caught.value.to_json()["error"]
    assert caught.value.status == 400 and answer["type"] == "invalid_request_error"
    assert named in answer["message"] and "\n" not in answer["message"] and len(answer["message"]) < 400
