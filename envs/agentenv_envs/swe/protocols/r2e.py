"""R2E-Gym's four tools in its XML form: one call a turn, `file_editor`, `execute_bash`, `search` or `finish`.

    <function=file_editor>
    <parameter=command>view</parameter>
    <parameter=path>app.py</parameter>
    </function>

Invariants:
- names of functions and parameters and the form of a call are R2E-Gym's, so that models trained there can act; what
  the tools answer is our own text;
- a value keeps its white space, but for one line break after its tag and one before its end: indentation matters;
- `</parameter>` inside a value ends it only where a parameter or the end of the call follows.

Source of the form: R2E-Gym, `agenthub/action/action.py` and `agenthub/config/edit_non_fn_calling.yaml`.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from agentenv_envs.swe.sandbox import Sandbox

from .base import Call, Limits, Malformed, after_thinking, run_command
from .editor import FileEditor
from .functions import EXECUTE_BASH, FILE_EDITOR, FINISH, SEARCH
from .paths import RefusalError
from .search import search

__all__ = ["R2EProtocol", "as_function", "parse_function"]

FUNCTIONS: Final = (FILE_EDITOR, EXECUTE_BASH, SEARCH, FINISH)
_BY_NAME: Final = {function.name: function for function in FUNCTIONS}
_FORM: Final = """\
<function=NAME>
<parameter=PARAMETER>VALUE</parameter>
</function>"""
_INSTRUCTIONS: Final = """\
You repair a bug in the repository in {workdir}. Each turn, think, then call exactly one function in this form:
{form}
A value may have several lines. The functions:

{functions}

The result comes back. {tests}Edit the files in place. When the bug is gone, call finish with the command submit.

Issue: """
_FUNCTION = re.compile(r"<function\s*=\s*([^<>]+)>")
_PARAMETER = re.compile(r"\s*<parameter\s*=\s*([^<>]+)>")
_FUNCTION_ENDS = re.compile(r"\s*</function>")
_PARAMETER_ENDS = re.compile(r"</parameter>(?=\s*(?:<parameter\s*=|</function>))")


class R2EProtocol:
    """See the module; see `AgentProtocol` for the methods."""

    name = "r2e"
    tools: Sequence[dict[str, Any]] = ()

    def __init__(self) -> None:
        self._editor = FileEditor()

    def first_observation(self, issue: str, *, workdir: str, test_command: str | None) -> str:
        tests = f"The repository's tests are run by: {test_command}. " if test_command else ""
        functions = "\n\n".join(function.describe() for function in FUNCTIONS)
        text = _INSTRUCTIONS.format(workdir=workdir, form=_FORM, functions=functions, tests=tests)
        return text + issue

    def parse(self, action: str) -> list[Call] | Malformed:
        found = parse_function(after_thinking(action))
        if isinstance(found, Malformed):
            return found
        name, values = found
        function = _BY_NAME.get(name)
        if function is None:
            return Malformed(f"there is no function {name[:60]!r}; allowed are: {', '.join(_BY_NAME)}")
        arguments = function.check(values)
        if isinstance(arguments, Malformed):
            return arguments
        text = arguments.get("file_text")
        if text and not text.endswith("\n"):
            arguments["file_text"] = text + "\n"  # this form can't tell whether the last line was ended
        return [Call(name, arguments, ends=function is FINISH)]

    def run(self, call: Call, sandbox: Sandbox, limits: Limits) -> str:
        if call.name == EXECUTE_BASH.name:
            return run_command(call.arguments["cmd"], sandbox, limits)
        try:
            if call.name == SEARCH.name:
                return search(call.arguments, sandbox, limits)
            return self._editor.run(call.arguments, sandbox, limits)
        except RefusalError as error:
            return f"ERROR: {error}"

    def observation(self, answers: Sequence[tuple[Call, str]]) -> str:
        return "\n".join(f"Execution output of [{call.name}]:\n{answer}" for call, answer in answers)

    def refusal(self, malformed: Malformed) -> str:
        return f"Not understood: {malformed.reason}"


def parse_function(text: str) -> tuple[str, dict[str, str]] | Malformed:
    """Name and values of the one call in a text; text around it is allowed, a second call is not."""
    begin = _FUNCTION.search(text)
    if begin is None:
        return Malformed(f"there is no function call in the answer; write exactly one:\n{_FORM}")
    name, at = begin[1].strip(), begin.end()
    values: dict[str, str] = {}
    while (end := _FUNCTION_ENDS.match(text, at)) is None:
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            return Malformed(f"the call of {name[:60]!r} has to end with </function>, in this form:\n{_FORM}")
        value_ends = _PARAMETER_ENDS.search(text, parameter.end())
        if value_ends is None:
            return Malformed(f"the parameter {parameter[1].strip()[:60]!r} has to end with </parameter>")
        value = text[parameter.end() : value_ends.start()]
        values[parameter[1].strip()] = value.removeprefix("\n").removesuffix("\n")
        at = value_ends.end()
    if _FUNCTION.search(text, end.end()):
        return Malformed(f"more than one function call in the answer; write exactly one:\n{_FORM}")
    return name, values


def as_function(name: str, **values: object) -> str:
    """The text of a call."""
    lines = [f"<parameter={parameter}>{value}</parameter>" for parameter, value in values.items()]
    return "\n".join([f"<function={name}>", *lines, "</function>"])
