"""Requests of OpenAI's chat API: what of them is honoured, what is ignored, and what is refused.

Invariants:

* A request that is accepted is served in full: a field that would change the answer and cannot be honoured is refused
  (``n`` above 1, ``logprobs``, ``response_format``, a forced tool). How tokens are sampled is the episode's to say, so
  ``temperature``, ``top_p`` and their like are taken and ignored.
* Two messages are equal in :attr:`ChatMessage.identity` when they say the same, however a client writes them: text as a
  string or in parts, arguments of a call in another spacing, fields that no template reads.
* Whatever is wrong is one :class:`RefusedRequestError` that names the field, its value and what is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.conversation import Message

__all__ = ["ChatMessage", "ChatRequest", "RefusedRequestError", "read_request"]

MAX_MESSAGES = 10_000
MAX_TOOLS = 128

_HONOURED = frozenset(
    {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stop"}
)
_CHECKED = frozenset(
    {"stream_options", "n", "logprobs", "top_logprobs", "response_format", "functions", "function_call"}
)
_IGNORED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "parallel_tool_calls",
        "user",
        "metadata",
        "store",
        "reasoning_effort",
        "verbosity",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RefusedRequestError(Exception):
    """A request that is answered with an error; in the form of OpenAI's errors.

    Args:
        status: of HTTP.
        message: one line for the agent's log.
        code: of the error, for programs.
        param: the field that it is about.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            429: "rate_limit_error",
        }.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        text = " ".join(str(self).split())[:2000]
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatMessage:
    """One message of a request."""

    message: Message
    """As chat templates take it."""
    identity: str
    """Equal for messages that say the same."""
    parts: tuple[str, ...]
    """Of its text, as the client divides it."""

    @property
    def length(self) -> int:
        """Characters of its text."""
        return sum(map(len, self.parts))

    @property
    def role(self) -> str:
        """system, user, assistant or tool."""
        return str(self.message["role"])

    @property
    def text(self) -> str:
        """For people."""
        return readable(self.message)


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be served."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    tools_identity: str = field(init=False, default="")
    """Equal where the template writes the same about tools."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools_identity", _canonical(self.tools))


def read_request(body: Any) -> ChatRequest:
    """Check the body of a request for chat completions.

    Raises:
        RefusedRequestError: it cannot be served.
    """
    if not isinstance(body, dict):
        raise RefusedRequestError(400, f"the body is {_short(body)}, must be a JSON object")
    for name in body:
        if name not in _HONOURED and name not in _CHECKED and name not in _IGNORED:
            raise RefusedRequestError(
                400,
                f"unrecognized request argument: {_short(name)}",
                code="unknown_parameter",
                param=name[:80],
            )
    _check_unsupported(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", messages, "a list with at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise RefusedRequestError(400, f"messages: {len(messages)} are too many, {MAX_MESSAGES} are allowed")
    read = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    if read[-1].role == "assistant":
        raise _bad("messages[-1].role", "assistant", "the last message must be one of system, user and tool")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _bad("stream_options", options, "an object is needed")
    return ChatRequest(
        messages=read,
        tools=_tools(body),
        max_tokens=_max_tokens(body),
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        stop=_stop(body.get("stop")),
    )


def canonical_calls(calls: Any) -> str:
    """Tool calls of a message as a text that is equal where the calls are."""
    return _canonical(
        [
            [call["id"], call["function"]["name"], _loaded(call["function"]["arguments"])]
            for call in calls or ()
        ]
    )


def answer_message(content: str, tool_calls: list[dict[str, Any]] | None) -> ChatMessage:
    """What the policy answered, as it will come back in the next request's history."""
    message: Message = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return ChatMessage(message, _identity("assistant", content, tool_calls, None), (content,))


def readable(message: Mapping[str, Any]) -> str:
    """A message's text, with its tool calls written out."""
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise _bad(where, value, "an object is needed")
    role = value.get("role")
    if role not in _ROLES:
        raise _bad(f"{where}.role", role, f"one of {', '.join(_ROLES)} is needed")
    for name in ("function_call", "audio"):
        if value.get(name) is not None:
            raise _bad(f"{where}.{name}", value[name], "not supported; leave it out")
    calls = value.get("tool_calls")
    parts = _parts(value.get("content"), f"{where}.content", may_miss=role == "assistant")
    content = "".join(parts)
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    call_id = None
    reasoning = value.get("reasoning_content")
    if role == "assistant" and reasoning:
        if not isinstance(reasoning, str):
            raise _bad(f"{where}.reasoning_content", reasoning, "a string is needed")
        message["reasoning_content"] = _encodable(reasoning, f"{where}.reasoning_content")
    if role == "assistant" and calls:
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if role == "tool":
        call_id = value.get("tool_call_id")
        if not isinstance(call_id, str) or len(call_id) > 256:
            raise _bad(f"{where}.tool_call_id", call_id, "the id of a call is needed")
        message["tool_call_id"] = call_id
        if isinstance(value.get("name"), str):
            message["name"] = _encodable(value["name"], f"{where}.name")
    identity = _identity(str(message["role"]), content, calls if role == "assistant" else None, call_id)
    return ChatMessage(message, identity, parts)


def _identity(role: str, content: str, calls: Any, call_id: str | None) -> str:
    # Agents trim what the policy said; what they say themselves they repeat.
    text = content.strip() if role == "assistant" else content
    return _canonical([role, text, canonical_calls(calls), call_id])


def _parts(value: Any, where: str, *, may_miss: bool) -> tuple[str, ...]:
    if value is None and may_miss:
        return ()
    if isinstance(value, list):
        texts = []
        for index, part in enumerate(value):
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, dict) else part
                raise _bad(f"{where}[{index}]", kind, "only parts of type 'text' are supported")
            texts.append(part["text"])
        return tuple(_encodable(text, where) for text in texts)
    if not isinstance(value, str):
        raise _bad(where, value, "a string or a list of text parts is needed")
    return (_encodable(value, where),)


def _encodable(text: str, where: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RefusedRequestError(
                400, f"{where}: holds half a surrogate pair, which is no text"
            ) from None
    return text


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise _bad(where, value, f"a list of at most {MAX_TOOLS} calls is needed")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        texts = (
            [function.get("name"), function.get("arguments"), call.get("id")]
            if isinstance(function, dict)
            else []
        )
        if not isinstance(function, dict) or not all(isinstance(text, str) for text in texts):
            raise _bad(f"{where}[{index}]", call, "an id and a function with name and arguments are needed")
        arguments = _loaded(_encodable(function["arguments"], f"{where}[{index}].function.arguments"))
        name = _encodable(function["name"], f"{where}[{index}].function.name")
        # Templates write arguments out themselves: a string would come out quoted.
        calls.append(
            {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    return calls


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _bad("tools", tools, f"a list of at most {MAX_TOOLS} tools is needed")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise _bad(f"tools[{index}]", tool, "a tool of type 'function' is needed")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _bad(f"tools[{index}].function.name", name, "letters, digits, '_', '.', '-', 64 at most")
        if not isinstance(function.get("parameters", {}), dict):
            raise _bad(
                f"tools[{index}].function.parameters", function["parameters"], "a JSON schema is needed"
            )
        _encodable(_canonical(tool), f"tools[{index}]")
    choice = body.get("tool_choice")
    if choice == "none":
        return ()
    if choice not in (None, "auto"):
        raise _bad("tool_choice", choice, "'auto' and 'none' are supported: no call can be forced")
    return tuple(tools)


def _check_unsupported(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise _bad("n", body["n"], "1 is supported: ask again for another answer")
    for name in ("logprobs", "top_logprobs", "functions", "function_call"):
        if body.get(name):
            raise _bad(name, body[name], "not supported; leave it out")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise _bad("response_format", form, "the type 'text' is supported")


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _bad(name, value, "a whole number of at least 1 is needed")
        limits.append(value)
    return min(limits) if limits else None


def _stop(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > 16
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise _bad("stop", value, "a string or a list of at most 16 strings is needed")
    return tuple(_encodable(text, "stop") for text in texts)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise _bad(name, value, "true or false is needed")
    return bool(value)


def _loaded(arguments: Any) -> Any:
    """Arguments of a call as an object, where they are one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _bad(name: str, value: Any, needed: str) -> RefusedRequestError:
    return RefusedRequestError(400, f"{name}={_short(value)}: {needed}", code="invalid_value", param=name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
