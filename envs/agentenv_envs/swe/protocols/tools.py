"""Function calling as chat models of the Hermes and Qwen families spell it: JSON between `<tool_call>` tags.

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

Invariants:
- the functions' JSON schemas stand in the first observation, so that any chat template does; `ToolsProtocol.tools`
  has the same schemas for callers who render prompts with a template of their own;
- several calls in a turn are run in their order; they share the time and the characters of one;
- a result stands between `<tool_response>` tags, as the templates of these families put it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from agentenv_envs.swe.sandbox import Sandbox

from .base import Call, Limits, Malformed, after_thinking, run_command
from .editor import FileEditor
from .functions import BASH, FILE_EDITOR, SUBMIT, Function
from .paths import RefusalError

__all__ = [
    "MAX_CALLS",
    "TOOL_CALL_FORM",
    "ToolsProtocol",
    "as_tool_call",
    "parse_tool_calls",
    "tool_response",
]

MAX_CALLS: Final = 8
"""Calls in one turn."""

FUNCTIONS: Final = (BASH, FILE_EDITOR, SUBMIT)
TOOL_CALL_FORM: Final = '<tool_call>\n{"name": NAME, "arguments": {PARAMETER: VALUE}}\n</tool_call>'
_INSTRUCTIONS: Final = """\
You repair a bug in the repository in {workdir}. These are the functions that you can call, as JSON schemas:
<tools>
{schemas}
</tools>
Each turn, call one (or up to {most}, which run in their order) in this form:
{form}
The results come back. {tests}Edit the files in place. When the bug is gone, call submit.

Issue: """
_BEGIN: Final = "<tool_call>"
_END = re.compile(r"\s*</tool_call>")
_SPACE = re.compile(r"\s*")
# Models write line breaks and tabs into JSON strings as they are.
_DECODER = json.JSONDecoder(strict=False)


class ToolsProtocol:
    """See the module; see `AgentProtocol` for the methods."""

    name = "tools"
    tools: Sequence[dict[str, Any]] = tuple(function.schema() for function in FUNCTIONS)

    def __init__(self) -> None:
        self._editor = FileEditor()

    def first_observation(self, issue: str, *, workdir: str, test_command: str | None) -> str:
        tests = f"The repository's tests are run by: {test_command}. " if test_command else ""
        schemas = "\n".join(json.dumps(schema) for schema in self.tools)
        text = _INSTRUCTIONS.format(
            workdir=workdir, schemas=schemas, most=MAX_CALLS, form=TOOL_CALL_FORM, tests=tests
        )
        return text + issue

    def parse(self, action: str) -> list[Call] | Malformed:
        called = parse_tool_calls(action, FUNCTIONS)
        if isinstance(called, Malformed):
            return called
        calls = [Call(function.name, given, ends=function is SUBMIT) for function, given in called]
        if any(call.ends for call in calls[:-1]):
            return Malformed(f"{SUBMIT.name} has to be the last call")
        return calls

    def run(self, call: Call, sandbox: Sandbox, limits: Limits) -> str:
        if call.name == BASH.name:
            return run_command(call.arguments["command"], sandbox, limits)
        try:
            return self._editor.run(call.arguments, sandbox, limits)
        except RefusalError as error:
            return f"ERROR: {error}"

    def observation(self, answers: Sequence[tuple[Call, str]]) -> str:
        return "\n".join(tool_response(answer) for _, answer in answers)

    def refusal(self, malformed: Malformed) -> str:
        return tool_response(f"Not understood: {malformed.reason}")


def parse_tool_calls(
    action: str, functions: Sequence[Function], *, most: int = MAX_CALLS
) -> list[tuple[Function, dict[str, Any]]] | Malformed:
    """The calls in an action, at least one, with their arguments in the functions' types; never raises.

    Args:
        action: what the agent wrote; calls in its reasoning, up to `</think>`, are none.
        functions: that can be called.
        most: calls in one action.
    """
    text = after_thinking(action)
    calls: list[tuple[Function, dict[str, Any]]] = []
    at = text.find(_BEGIN)
    while at >= 0:
        if len(calls) == most:
            return Malformed(f"over {most} tool calls in the answer; write at most {most}")
        start = _SPACE.match(text, at + len(_BEGIN)).end()  # type: ignore[union-attr]  # it matches nothing, too
        try:
            value, at = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "too large or too deep"
            return Malformed(
                f"tool call {len(calls) + 1} is not JSON ({reason}); write it as\n{TOOL_CALL_FORM}"
            )
        end = _END.match(text, at)
        if end is None:
            return Malformed(f"tool call {len(calls) + 1} has to end with </tool_call>, after one object")
        call = _call(value, functions)
        if isinstance(call, Malformed):
            return call
        calls.append(call)
        at = text.find(_BEGIN, end.end())
    if not calls:
        return Malformed(f"there is no tool call in the answer; write\n{TOOL_CALL_FORM}")
    return calls


def as_tool_call(name: str, **arguments: object) -> str:
    """The text of a call."""
    return f"{_BEGIN}\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_response(text: str) -> str:
    """A result as the templates of these families put it."""
    return f"<tool_response>\n{text}\n</tool_response>"


def _call(value: object, functions: Sequence[Function]) -> tuple[Function, dict[str, Any]] | Malformed:
    """The call that a JSON value spells."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed(f"a tool call is an object with a name and arguments:\n{TOOL_CALL_FORM}")
    by_name = {function.name: function for function in functions}
    function = by_name.get(value["name"])
    if function is None:
        return Malformed(f"there is no function {value['name'][:60]!r}; allowed are: {', '.join(by_name)}")
    arguments = value.get("arguments") or {}
    if isinstance(arguments, str):  # as some models and servers put them
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return Malformed(f"the arguments of {function.name} have to be an object:\n{TOOL_CALL_FORM}")
    checked = function.check(arguments)
    return checked if isinstance(checked, Malformed) else (function, checked)
