"""Tools in chat templates, and the calls that a model writes: the template's own form, both ways.

The parsers are those of transformers and TRL: a tokenizer's ``response_template`` (or ``response_schema``), and TRL's
for the templates that it knows by their text. There is none of our own.

Invariants:

* What cannot be read as a call stays text: the agent sees what the policy wrote.
* A tokenizer is not changed: the parser is set on a copy.
"""

from __future__ import annotations

import copy
import inspect
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import UsageError

__all__ = ["Answer", "ToolFormat"]

_PROBE = "agentenv_probe_tool"


@dataclass(frozen=True)
class Answer:
    """What the policy said in a turn."""

    content: str
    tool_calls: list[dict[str, Any]] | None = None
    """As in OpenAI's API, with the arguments as text; None: no call."""
    reasoning: str | None = None
    """What a reasoning model thought before, where its parser tells it apart."""


class ToolFormat:
    """How one tokenizer's template speaks of tools.

    Args:
        tokenizer: with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._given = tokenizer
        self._checked = False
        self._problem: str | None = None
        self._parser: Any = None

    def check(self) -> None:
        """Whether agents can be served that send tools; looked up once.

        Raises:
            UsageError: the template has no place for tools, or no parser is known for its calls.
        """
        if not self._checked:
            self._problem = self._find()
            self._checked = True
        if self._problem is not None:
            raise UsageError(self._problem)

    def read(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Any]
    ) -> Answer | None:
        """The answer with its tool calls; None where nothing but text could be read.

        Args:
            token_ids: what the policy sampled in the turn.
            prompt_ids: before it; templates open an answer in it.
            tools: as in OpenAI's API.

        Raises:
            UsageError: see :meth:`check`.
        """
        self.check()
        from trl.chat_template_utils import parse_response

        known = inspect.signature(parse_response).parameters  # they differ between TRL's releases
        options = {"prefix": list(prompt_ids), "tools": list(tools)}
        try:
            parsed = parse_response(
                self._parser, list(token_ids), **{name: options[name] for name in options if name in known}
            )
        except Exception:  # whatever a policy writes, its turn is recorded and answered
            return None
        calls = [call for item in parsed.get("tool_calls") or () if (call := _call(item)) is not None]
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or parsed.get("reasoning")
        if not calls and not reasoning:
            return None
        return Answer(str(parsed.get("content") or ""), calls or None, str(reasoning) if reasoning else None)

    def _find(self) -> str | None:
        name = getattr(self._given, "name_or_path", type(self._given).__name__)
        tool = {
            "type": "function",
            "function": {
                "name": _PROBE,
                "description": "probe",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        try:
            text = self._given.apply_chat_template(
                [{"role": "user", "content": "x"}], tools=[tool], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            return f"the chat template of {name!r} refuses tools: {error}"
        if _PROBE not in text:
            return (
                f"the chat template of {name!r} has no place for tools: use an agent that speaks plain text, or a "
                "model whose template takes tools"
            )
        if not hasattr(self._given, "parse_response"):
            return f"tokenizer {name!r} has no parse_response: tool calls cannot be read"
        self._parser = copy.copy(self._given)
        if not _has_parser(self._parser):
            from trl.chat_template_utils import add_response_schema

            try:
                add_response_schema(self._parser)
            except ValueError:
                return (
                    f"no parser is known for the tool calls of {name!r}'s chat template: set "
                    "tokenizer.response_template (transformers, response parsing)"
                )
        return None


def _has_parser(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None))


def _call(item: Any) -> dict[str, Any] | None:
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
