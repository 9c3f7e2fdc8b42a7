"""How the two protocols of tools understand an action, and that no text makes any protocol raise."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import agentenv
from agentenv.conversation import Conversation
from agentenv.errors import UsageError
from agentenv.testing import ByteTokenizer
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.protocols import PROTOCOLS, Call, Malformed, open_protocol
from agentenv_envs.swe.protocols.r2e import as_function
from agentenv_envs.swe.protocols.tools import MAX_CALLS, as_tool_call


def _r2e(action: str) -> Call | Malformed:
    parsed = open_protocol("r2e").parse(action)
    return parsed if isinstance(parsed, Malformed) else parsed[0]


def _tools(action: str) -> list[Call] | Malformed:
    return open_protocol("tools").parse(action)


def test_an_r2e_call_is_understood_with_reasoning_around_it() -> None:
    call = _r2e("I look.\n<function=execute_bash>\n  <parameter=cmd>ls -a</parameter>\n</function>\n")
    assert call == Call("execute_bash", {"cmd": "ls -a"})
    assert _r2e(as_function("execute_bash", command="ls")) == Call("execute_bash", {"cmd": "ls"})
    assert _r2e(as_function("finish", command=" submit\n", result="ok")) == Call(
        "finish", {"command": "submit", "result": "ok"}, ends=True
    )


def test_values_keep_their_indentation_and_lose_one_line_break_at_each_end() -> None:
    call = _r2e(
        "<function=file_editor><parameter=command>str_replace</parameter><parameter=path>a.py</parameter>\n"
        "<parameter=old_str>\n    a\n\n</parameter><parameter=new_str>    b</parameter></function>"
    )
    assert isinstance(call, Call)
    assert (call.arguments["old_str"], call.arguments["new_str"]) == ("    a\n", "    b")


def test_tags_inside_a_value_are_text() -> None:
    text = "<function=x>\n</parameter> y\n</tool_call>"
    call = _r2e(as_function("file_editor", command="create", path="a", file_text=text))
    assert isinstance(call, Call) and call.arguments["file_text"] == text + "\n"
    calls = _tools(as_tool_call("file_editor", command="create", path="a", file_text=text + "<tool_call>"))
    assert isinstance(calls, list) and calls[0].arguments["file_text"] == text + "<tool_call>"


def test_values_that_spell_a_number_a_truth_or_a_range_count_as_it() -> None:
    call = _r2e(
        as_function(
            "file_editor", command="view", path="a", insert_line=" 12 ", concise="True", view_range="[3, -1]"
        )
    )
    assert isinstance(call, Call)
    assert [call.arguments[name] for name in ("insert_line", "concise", "view_range")] == [12, True, (3, -1)]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("", "no function call"),
        ("```bash\nls\n```", "no function call"),
        ("<function=execute_bash>", "has to end with </function>"),
        ("<function=execute_bash><parameter=cmd>ls</parameter>", "parameter 'cmd' has to end"),
        ("<function=execute_bash>ls</function>", "has to end with </function>"),
        (
            as_function("edit", path="a"),
            "no function 'edit'; allowed are: file_editor, execute_bash, search, finish",
        ),
        (as_function("execute_bash"), "needs the parameter cmd"),
        (
            as_function("search", search_term="a", flags="-i"),
            'no parameter "flags"; allowed are: search_term, path',
        ),
        (as_function("finish", command="give up"), "allowed are submit"),
        (as_function("file_editor", command="delete", path="a"), "allowed are view, create"),
        (
            as_function("file_editor", command="insert", path="a", insert_line="two"),
            "a whole number is needed",
        ),
        (as_function("file_editor", command="view", path="a", view_range="[1]"), "two line numbers"),
        (as_function("file_editor", command="view", path="a", concise="maybe"), "true or false"),
        (as_function("execute_bash", cmd="ls") + as_function("finish", command="submit"), "more than one"),
        ("<think>" + as_function("execute_bash", cmd="ls") + "</think> hm", "no function call"),
    ],
)
def test_an_r2e_action_that_is_not_understood_says_what_is_allowed(action: str, said: str) -> None:
    outcome = _r2e(action)
    assert isinstance(outcome, Malformed) and said in outcome.reason


def test_tool_calls_are_understood_in_their_order_and_as_models_write_them() -> None:
    calls = _tools("Both.\n" + as_tool_call("bash", command="ls") + "\n" + as_tool_call("submit"))
    assert calls == [Call("bash", {"command": "ls"}), Call("submit", {}, ends=True)]
    raw = '<think>x</think><tool_call>{"name": "bash", "arguments": {"command": "a\nb\t"}}</tool_call>'
    assert _tools(raw) == [Call("bash", {"command": "a\nb\t"})]
    spelled = json.dumps({"name": "bash", "arguments": '{"command": "ls"}'})
    assert _tools(f"<tool_call>{spelled}</tool_call>") == [Call("bash", {"command": "ls"})]
    assert _tools('<tool_call>{"name": "submit"}</tool_call>') == [Call("submit", {}, ends=True)]


def test_a_lone_surrogate_becomes_a_character_that_files_can_hold() -> None:
    calls = _tools('<tool_call>{"name": "bash", "arguments": {"command": "echo \\ud800"}}</tool_call>')
    assert calls == [Call("bash", {"command": "echo ?"})]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("", "no tool call"),
        ("<tool_call>", "not JSON"),
        ("<tool_call>{'name': 'bash'}</tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "too large or too deep"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "too large or too deep"),
        ('<tool_call>{"name": "submit"}', "end with </tool_call>"),
        ("<tool_call>{} {}</tool_call>", "end with </tool_call>"),
        ("<tool_call>[]</tool_call>", "an object with a name"),
        ('<tool_call>{"name": 3}</tool_call>', "an object with a name"),
        ('<tool_call>{"name": "sh"}</tool_call>', "no function 'sh'; allowed are: bash, file_editor, submit"),
        ('<tool_call>{"name": "bash", "arguments": ["ls"]}</tool_call>', "have to be an object"),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "have to be an object"),
        ('<tool_call>{"name": "bash", "arguments": {"command": 3}}</tool_call>', "command is 3; a string"),
        ('<tool_call>{"name": "bash", "arguments": {"command": null}}</tool_call>', "a string is needed"),
        (as_tool_call("bash"), "needs the parameter command"),
        (as_tool_call("file_editor", command="view", path="a", view_range=[1, 2.5]), "a whole number"),
        (as_tool_call("file_editor", command="view", path="a", view_range=True), "two line numbers"),
        (as_tool_call("submit") + as_tool_call("bash", command="ls"), "submit has to be the last call"),
        (as_tool_call("bash", command="ls") * (MAX_CALLS + 1), f"at most {MAX_CALLS}"),
    ],
)
def test_a_tool_call_that_is_not_understood_says_what_is_allowed(action: str, said: str) -> None:
    outcome = _tools(action)
    assert isinstance(outcome, Malformed) and said in outcome.reason


_PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "bash", "arguments": ',
            '{"command": "ls"}',
            "}",
            "<function=file_editor>",
            "<function = finish >",
            "</function>",
            "<parameter=command>",
            "<parameter=view_range>",
            "</parameter>",
            "submit",
            "view",
            "</think>",
            "```bash\n",
            "```",
            "\n",
        ]
    ),
)


@pytest.mark.parametrize("name", PROTOCOLS)
@given(action=st.lists(_PIECES, max_size=14).map("".join))
@settings(max_examples=150, deadline=None)
@example(action="<function=file_editor>" + "<parameter=a>" * 3_000)
@example(action="<function=file_editor><parameter=a>" + "</parameter> " * 3_000)
@example(action="<function=" * 3_000)
@example(action="<tool_call>" * 3_000)
def test_no_action_makes_a_protocol_raise(name: str, action: str) -> None:
    protocol = open_protocol(name)
    parsed = protocol.parse(action)
    if isinstance(parsed, Malformed):
        assert parsed.reason in protocol.refusal(parsed) and len(parsed.reason) < 500
    else:
        assert parsed and not any(call.ends for call in parsed[:-1])


def test_the_schemas_are_those_of_the_functions_in_the_first_observation() -> None:
    protocol = open_protocol("tools")
    text = protocol.first_observation("It fails.", workdir="/work", test_command=None)
    shown = text.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    assert [json.loads(line) for line in shown] == list(protocol.tools)
    assert [tool["function"]["name"] for tool in protocol.tools] == ["bash", "file_editor", "submit"]
    assert protocol.tools[0]["function"]["parameters"]["required"] == ["command"]
    assert text.endswith("Issue: It fails.")


class _TemplateWithTools(ByteTokenizer):
    """Puts the schemas into a message of the system, as the templates of function-calling models do."""

    def apply_chat_template(self, conversation: Any, *, tools: Any = (), **options: Any) -> Any:
        system = {"role": "system", "content": json.dumps(tools)}
        return super().apply_chat_template([system, *conversation], **options)


def test_the_schemas_reach_a_template_of_ones_own_through_a_conversation() -> None:
    env = agentenv.make("SWE-v0", sandbox="local-unisolated", protocol="tools")
    assert isinstance(env.unwrapped, SWEEnv)
    tools = list(env.unwrapped.protocol.tools)
    env.close()
    conversation = Conversation(_TemplateWithTools(), template_options={"tools": tools})
    prompt = _TemplateWithTools().decode(conversation.start([{"role": "user", "content": "Begin."}]))
    assert json.dumps(tools) in prompt and prompt.index("file_editor") < prompt.index("Begin.")


def test_an_unknown_protocol_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="protocol is 'xml'; allowed are: bash, r2e, tools"):
        open_protocol("xml")
