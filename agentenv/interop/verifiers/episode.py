"""One rollout of verifiers, in its own loop, paused wherever it asks the model.

Its `MultiTurnEnv.rollout` asks a `Client`; ours hands the request over and waits for the policy. So set-up, stop
conditions, tools, clean-up and scoring are theirs, in their order.

Invariants:
- All methods run in one event loop. An episode that is left goes through verifiers' clean-up.
- With tools, the policy writes calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What stands between
  the tags and is no call becomes one that verifiers answers with an error.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from agentenv.errors import EnvError
from agentenv.interop.verifiers.loading import GRADING_ERRORS

__all__ = ["Ended", "Episode", "Turn"]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_HOW_TO_CALL = (
    "You can call tools. Write each call as\n"
    '<tool_call>{"name": "...", "arguments": {...}}</tool_call>\n'
    "A turn without a call is your last. The tools:\n"
)


@dataclass(frozen=True)
class Turn:
    """The policy is asked."""

    observation: str


@dataclass(frozen=True)
class Ended:
    """The rollout is over and scored."""

    observation: str
    state: Any
    grading_errors: list[Exception]


class _TurnClient(Client):
    """A model that is asked one turn at a time, by whoever plays."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[tuple[list[Any], list[Any]]] = asyncio.Queue()
        self.answered: asyncio.Queue[ResponseMessage] = asyncio.Queue()

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Response:
        """Hand the request over and wait."""
        self.asked.put_nowait((list(prompt), list(tools or ())))
        message = await self.answered.get()
        return Response(id="agentenv", created=0, model=model, usage=None, message=message)

    def setup_client(self, config: Any) -> None:
        """There is no service behind it."""

    async def to_native_tool(self, tool: Any) -> Any:
        """Tools as they are."""
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """Messages as they are."""
        return messages, {}

    async def get_native_response(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Never called: `get_response` is ours."""
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        """Nothing is ever wrong."""

    async def from_native_response(self, response: Any) -> Any:
        """Responses as they are."""
        return response

    async def close(self) -> None:
        """Nothing to close."""


class Episode:
    """A rollout of one row of the data set.

    Args:
        env: of verifiers.
        row: of its data set.
    """

    def __init__(self, env: Any, row: Any) -> None:
        self._env = env
        self._row = row
        self._client = _TurnClient()
        self._errors: list[Exception] = []
        self._tools: list[Any] = []
        self._seen = 0
        self._task: asyncio.Task[Any] | None = None

    async def begin(self) -> Turn | Ended:
        """Start the rollout; returns when it asks for the first turn."""
        self._task = asyncio.create_task(self._run(), name="agentenv-verifiers-rollout")
        return await self._next()

    async def answer(self, text: str) -> Turn | Ended:
        """Give the policy's turn; returns when the rollout asks for the next one, or is over."""
        self._seen += 1
        self._client.answered.put_nowait(self._message(text))
        return await self._next()

    async def leave(self) -> None:
        """End it wherever it is; idempotent."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._task

    async def _run(self) -> Any:
        GRADING_ERRORS.set(self._errors)
        state = await self._env.rollout(self._row, self._client, "policy", {})
        rubric = self._env.rubric
        await (rubric.score_rollout(state) if self._env.score_rollouts else rubric.dummy_score_rollout(state))
        await rubric.cleanup(state)
        return state

    async def _next(self) -> Turn | Ended:
        assert self._task is not None
        asked = asyncio.ensure_future(self._client.asked.get())
        await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            messages, self._tools = asked.result()
            new = messages[self._seen :]
            first = self._seen == 0
            self._seen = len(messages)
            return Turn(_conversation(new) + self._tool_text() if first else _texts(new))
        asked.cancel()
        state = self._task.result()
        new = [*state["prompt"], *(state["completion"] or ())][self._seen :]
        return Ended(_texts(new), state, self._errors)

    def _tool_text(self) -> str:
        if not self._tools:
            return ""
        lines = [json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in self._tools]
        return f"\n\n{_HOW_TO_CALL}" + "\n".join(lines)

    def _message(self, text: str) -> ResponseMessage:
        text = text.encode("utf-8", "replace").decode("utf-8")
        written = _CALL.findall(text) if self._tools else []
        if not written:
            return ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        calls = [_call(self._seen, number, call) for number, call in enumerate(written)]
        content = _CALL.sub("", text).strip()
        return ResponseMessage(
            content=content, tool_calls=calls, finish_reason="tool_calls", is_truncated=False
        )


def _call(turn: int, number: int, text: str) -> ToolCall:
    id = f"call_{turn}_{number}"
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        name = arguments = None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        # Arguments that are no JSON: verifiers answers with the parser's error.
        return ToolCall(id=id, name="malformed", arguments=f"not a call: {text.strip()}")
    return ToolCall(id=id, name=name, arguments=json.dumps(arguments))


def _conversation(messages: list[Any]) -> str:
    """The messages of a task as one text: as they are where only system and user speak, else with their roles."""
    roles = [message.role for message in messages]
    if roles in (["user"], ["system"], ["system", "user"]):
        return _texts(messages, "\n\n")
    return "\n\n".join(f"[{message.role}]\n{_text(message)}" for message in messages)


def _texts(messages: list[Any], between: str = "\n") -> str:
    return between.join(_text(message) for message in messages)


def _text(message: Any) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise EnvError(
            "a message of the environment holds more than text, which a text environment can't show"
        )
    return "".join(str(part["text"]) for part in parts)
