"""The HTTP interface of an endpoint: chat completions as OpenAI's API has them.

    POST /v1/chat/completions                the episode of the API key
    POST /episodes/ID/v1/chat/completions    the same, and the key must be that of the episode ID
    GET  .../v1/models                       the one model that there is

Invariants:

* The key is checked before a body is read; a body is read up to its limit and no further.
* Whatever goes wrong is {"error": {"message", "type", "param", "code"}} in one line; no traceback leaves the service.
* A turn whose client has gone is aborted. While a streamed one is sampled, a comment is sent now and then, so that no
  client's patience with a silent connection ends first; its text comes when the turn is complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from agentenv.agents.chat_request import ChatRequest, RefusedRequestError, read_request
from agentenv.agents.desk import EpisodeDesk
from agentenv.agents.endpoint import AgentEndpoint, Completion, OpenEpisode
from agentenv.errors import UsageError
from agentenv.request_body import BodyError, read_json_body

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 5.0
_BODY_REFUSALS = {
    "too_large": (413, "request_too_large"),
    "too_slow": (408, None),
    "cut_off": (400, None),
    "no_json": (400, "invalid_json"),
}
"""Status and code of each kind of :class:`BodyError`."""


def create_app(endpoint: AgentEndpoint, desk: EpisodeDesk | None = None) -> FastAPI:
    """The application over an endpoint.

    Args:
        endpoint: answers.
        desk: opens and ends episodes over HTTP; None: only programs in this process do.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _Routes(app, endpoint, desk)
    return app


class _Routes:
    def __init__(self, app: FastAPI, endpoint: AgentEndpoint, desk: EpisodeDesk | None) -> None:
        self.endpoint = endpoint
        routes: list[tuple[str, str, Any]] = [("GET", "/healthz", self.health)]
        for prefix in ("/v1", "/episodes/{episode_id}/v1"):
            routes += [
                ("POST", f"{prefix}/chat/completions", self.complete),
                ("GET", f"{prefix}/models", self.models),
                ("GET", f"{prefix}/models/{{name:path}}", self.models),
            ]
        if desk is not None:
            self.desk = desk
            routes += [
                ("POST", "/episodes", self.open),
                ("GET", "/episodes", self.list_episodes),
                ("POST", "/episodes/{episode_id}/end", self.end),
                ("DELETE", "/episodes/{episode_id}", self.discard),
            ]
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(RefusedRequestError, _refused)
        app.add_exception_handler(UsageError, _refused)
        app.add_exception_handler(HTTPException, _refused)
        app.add_exception_handler(Exception, _fault)

    async def health(self) -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The one model."""
        self._episode(request)
        model = {"id": self.endpoint.model, "object": "model", "created": 0, "owned_by": "agentenv"}
        if "name" in request.path_params:
            return _json(model)
        return _json({"object": "list", "data": [model]})

    async def complete(self, request: Request) -> Response:
        """A turn of the policy."""
        episode = self._episode(request)
        body = await _body(request)
        try:
            asked = read_request(body)
            model = str(body.get("model") or self.endpoint.model)[:200]
            task = self.endpoint.begin(episode, asked)
        except RecursionError:
            raise RefusedRequestError(400, "the body is nested too deeply") from None
        if asked.stream:
            return _EventStream(task, asked, model)
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            task.cancel()  # of no effect on one that is done
        if not task.done():
            raise RefusedRequestError(499, "the client has gone", code="client_gone")
        return _json(_whole(_result(task, episode), model))

    async def open(self, request: Request) -> Response:
        """Begin an episode."""
        self.desk.admit(_token(request))
        episode = self.desk.open(await _body(request))
        base_url = f"{str(request.base_url).rstrip('/')}/episodes/{episode.id}/v1"
        answer = {
            "id": episode.id,
            "base_url": base_url,
            "api_key": episode.api_key,
            "model": self.endpoint.model,
        }
        return _json(answer, 201)

    async def list_episodes(self, request: Request) -> Response:
        """The open ones."""
        self.desk.admit(_token(request))
        return _json({"episodes": self.desk.list()})

    async def end(self, request: Request) -> Response:
        """End an episode with its reward."""
        self.desk.admit(_token(request))
        return _json(await self.desk.end(request.path_params["episode_id"], await _body(request)))

    async def discard(self, request: Request) -> Response:
        """End an episode without a trajectory."""
        self.desk.admit(_token(request))
        return _json(await self.desk.discard(request.path_params["episode_id"]))

    def _episode(self, request: Request) -> OpenEpisode:
        return self.endpoint.episode(_token(request), request.path_params.get("episode_id"))


class _EventStream(Response):
    """A turn as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, task: asyncio.Task[Completion], asked: ChatRequest, model: str) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._task, self._asked, self._model = task, asked, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while not self._task.done() and not gone.done():
                await asyncio.wait(
                    {self._task, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not self._task.done() and not gone.done():
                    await _send(send, ": the turn is being sampled\n\n")
            if gone.done() and not self._task.done():
                return
            try:
                events = _chunks(_result(self._task, None), self._model, self._asked.include_usage)
            except RefusedRequestError as error:
                events = [error.to_json()]
            except Exception:
                logger.exception("a turn failed")
                events = [_FAULT.to_json()]
            for event in events:
                await _send(send, f"data: {json.dumps(event)}\n\n")
            await _send(send, "data: [DONE]\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client has gone
            pass
        finally:
            gone.cancel()
            self._task.cancel()


_FAULT = RefusedRequestError(500, "the endpoint failed; its log has more", code="internal_error")


def _result(task: asyncio.Task[Completion], episode: OpenEpisode | None) -> Completion:
    if task.cancelled():
        name = f" {episode.id!r}" if episode is not None else ""
        raise RefusedRequestError(403, f"episode{name} is over", code="episode_over")
    return task.result()


def _whole(done: Completion, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": done.answer.content}
    if done.answer.tool_calls:
        message["tool_calls"] = done.answer.tool_calls
        message["content"] = done.answer.content or None
    if done.answer.reasoning:
        message["reasoning_content"] = done.answer.reasoning
    return {
        **_head("chat.completion", model),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": done.finish_reason}],
        "usage": _usage(done),
    }


def _chunks(done: Completion, model: str, with_usage: bool) -> Iterable[dict[str, Any]]:
    head = _head("chat.completion.chunk", model)

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    yield chunk({"role": "assistant", "content": ""})
    if done.answer.reasoning:
        yield chunk({"reasoning_content": done.answer.reasoning})
    if done.answer.content:
        yield chunk({"content": done.answer.content})
    for index, call in enumerate(done.answer.tool_calls or ()):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, done.finish_reason)
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(done)}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(done: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise RefusedRequestError(
            401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
        )
    return token.strip()


async def _body(request: Request) -> Any:
    try:
        return await read_json_body(request, max_bytes=BODY_BYTES, timeout_s=BODY_TIMEOUT_S)
    except BodyError as error:
        status, code = _BODY_REFUSALS[error.kind]
        raise RefusedRequestError(status, str(error), code=code) from None


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        path = " ".join(f"{request.method} {request.url.path}".split())[:200]
        error = RefusedRequestError(error.status_code, f"{path}: {error.detail}", code="unknown_url")
    if not isinstance(error, RefusedRequestError):
        error = RefusedRequestError(400, str(error), code="invalid_value")
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(error.status)
    return _json(error.to_json(), error.status, headers)


async def _fault(request: Request, error: Exception) -> Response:
    return _json(_FAULT.to_json(), 500)
