r"""How an agent of MathPython-v0 speaks: `block` (python blocks) and `tools` (function calls in JSON).

Invariants:
- what is written last counts: a final `\boxed{}` behind the code ends the episode and the code is not run; in front of
  the code it is a thought;
- a box in code that was cut off, so that its end is missing, is no answer;
- reasoning up to `</think>` is neither code nor answer;
- an action that can't be understood is `Malformed`: reading never raises.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentenv.errors import UsageError
from agentenv_envs.swe.protocols import Malformed
from agentenv_envs.swe.protocols.base import after_thinking
from agentenv_envs.swe.protocols.functions import Function, Parameter
from agentenv_envs.swe.protocols.tools import TOOL_CALL_FORM, as_tool_call, parse_tool_calls, tool_response

from .boxed import last_boxed

__all__ = ["MAX_CODE_CHARS", "SPEECHES", "Answer", "Programs", "Speech", "open_speech"]

MAX_CODE_CHARS: Final = 100_000
MAX_CALLS: Final = 4
"""Function calls in one turn."""

_BLOCK = re.compile(r"```[ \t]*(?i:python3?|py)[ \t]*\r?\n(.*?)```", re.DOTALL)
_OPEN_BLOCK = re.compile(r"```[ \t]*(?i:python3?|py)[ \t]*\r?\n")
_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
_FRESH: Final = (
    "Each program has a new interpreter, the standard library, and no input; what it prints comes back. "
)
_LASTING: Final = (
    "Variables are kept from program to program. There is the standard library, and no input; "
    "what is printed comes back. "
)
_END: Final = r"When you know the answer, write it in \boxed{}, without a program. Problem: "
_EMPTY_BOX: Final = r"the box of the final answer is empty; write \boxed{ANSWER}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer: what stands in the box."""

    text: str


@dataclass(frozen=True, slots=True)
class Programs:
    """What a turn runs, in its order; at least one."""

    codes: tuple[str, ...]


class Speech(Protocol):
    """A form of programs and of what comes back."""

    instruction: str
    """Stands before the problem."""
    tools: Sequence[dict[str, Any]]
    """JSON schemas in the form that chat templates take as `tools`; empty where no function is called."""

    def read(self, action: str) -> Answer | Programs | Malformed:
        """What an action asks for; never raises."""

    def write(self, code: str) -> str:
        """The action that runs a program."""

    def tell(self, outputs: Sequence[str]) -> str:
        """What the agent hears of its programs, in their order, or of an action that was not understood."""


class _SpeechFactory(Protocol):
    def __call__(self, *, keep_state: bool) -> Speech: ...


class BlockSpeech:
    """Python between fences. Several blocks of one turn are one program."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, *, keep_state: bool) -> None:
        rules = (_LASTING if keep_state else _FRESH) + _END
        self.instruction = (
            f"Solve the problem. Each turn, you can run a program:\n```python\nCODE\n```\n{rules}"
        )

    def read(self, action: str) -> Answer | Programs | Malformed:
        text = after_thinking(action)
        codes: list[str] = []
        end = 0
        for block in _BLOCK.finditer(text):
            codes.append(block[1].removesuffix("\n"))
            end = block.end()
        cut_off = _OPEN_BLOCK.search(text, end) is not None
        if not cut_off and (answer := _answer(text[end:])) is not None:
            return answer
        if not codes:
            return Malformed(
                r"write a program as ```python, line break, CODE, line break, ```, or the final answer in \boxed{}"
            )
        return _checked(["\n".join(codes)])

    def write(self, code: str) -> str:
        return f"```python\n{code}\n```"

    def tell(self, outputs: Sequence[str]) -> str:
        return "\n".join(outputs)


class ToolsSpeech:
    """Calls of the function `python`; see `agentenv_envs.swe.protocols.tools` for their form."""

    def __init__(self, *, keep_state: bool) -> None:
        rules = _LASTING if keep_state else _FRESH
        code = Parameter("code", "The program.", required=True)
        self._python = Function("python", f"Run a Python program. {rules.strip()}", (code,))
        self.tools: Sequence[dict[str, Any]] = (self._python.schema(),)
        self.instruction = (
            "Solve the problem. This is the function that you can call, as JSON schema:\n"
            f"<tools>\n{json.dumps(self.tools[0])}\n</tools>\n"
            f"Each turn, you can call it once (or up to {MAX_CALLS} times), in this form:\n{TOOL_CALL_FORM}\n{_END}"
        )

    def read(self, action: str) -> Answer | Programs | Malformed:
        text = after_thinking(action)
        rest = text[text.rfind(_END_OF_CALL) + 1 :]
        if _CALL not in rest and (answer := _answer(rest)) is not None:
            return answer
        calls = parse_tool_calls(action, (self._python,), most=MAX_CALLS)
        if isinstance(calls, Malformed):
            return Malformed(rf"{calls.reason}{chr(10)}or the final answer in \boxed{{}}")
        return _checked([arguments["code"] for _, arguments in calls])

    def write(self, code: str) -> str:
        return as_tool_call(self._python.name, code=code)

    def tell(self, outputs: Sequence[str]) -> str:
        return "\n".join(map(tool_response, outputs))


SPEECHES: Final[Mapping[str, "_SpeechFactory"]] = {"block": BlockSpeech, "tools": ToolsSpeech}


def open_speech(name: str, *, keep_state: bool = False) -> Speech:
    """The form of this name.

    Args:
        name: of `SPEECHES`.
        keep_state: whether the agent is told that variables are kept.

    Raises:
        UsageError: there is none.
    """
    if name not in SPEECHES:
        raise UsageError(f"protocol is {name!r}; allowed are: {', '.join(SPEECHES)}")
    return SPEECHES[name](keep_state=keep_state)


def _answer(text: str) -> Answer | Malformed | None:
    found = last_boxed(text)
    if found is None:
        return None
    return Answer(found[1]) if found[1] else Malformed(_EMPTY_BOX)


def _checked(codes: Sequence[str]) -> Programs | Malformed:
    for code in codes:
        if not code.strip():
            return Malformed("the program is empty")
        if len(code) > MAX_CODE_CHARS:
            return Malformed(f"the program has {len(code)} characters; at most {MAX_CODE_CHARS} are allowed")
    return Programs(tuple(codes))
