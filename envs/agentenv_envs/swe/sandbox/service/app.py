"""The HTTP interface of a service.

Invariants:
- Every path under /v1, and /metrics, needs a client's token; it is checked before a body is read.
- What takes long is a piece of work with a name: a request waits for it up to `wait_s` and is answered 202 if it is not
  over; the same request, sent again, waits on. No proxy has to hold a connection for longer.
- A body is read up to its limit and no further.
- Whatever goes wrong is {"error": {"type", "message"}} in one line; no traceback leaves the service.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from agentenv.errors import SandboxError, SandboxTimeoutError, UsageError
from agentenv.request_body import BodyError, read_json_body
from agentenv_envs.swe.sandbox.base import STREAM_BYTES

from .leases import Leases, Outcome
from .limits import Fields, Tokens
from .task_images import TaskImages
from .wire import LOAD_HEADER, Refusal, dump, error_of, files_from_json, result_to_json

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

API_VERSION = 1
READY_CACHE_S = 2.0
MAX_IDS = 10_000
"""Leases that are renewed at once."""
BODY_TIMEOUT_S = 120.0
"""In which a request's body must come: who is gone in its midst must not hold a place for ever."""
NEWS_S = 0.1
"""How often a command's output is looked at for a client that follows it."""
_ID = re.compile(r"[a-z0-9][a-z0-9-]{7,63}")


def create_app(leases: Leases, tokens: Tokens, images: TaskImages) -> FastAPI:
    """The application over a table of leases."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _Routes(app, leases, tokens, images)
    return app


class _Routes:
    def __init__(self, app: FastAPI, leases: Leases, tokens: Tokens, images: TaskImages) -> None:
        self.leases, self.tokens, self.images = leases, tokens, images
        self.limits = leases.limits
        self._ready: tuple[float, str] = (-READY_CACHE_S, "")
        for method, path, handler in (
            ("GET", "/healthz", self.health),
            ("GET", "/readyz", self.ready),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v1/info", self.info),
            ("GET", "/v1/sandboxes", self.list_sandboxes),
            ("POST", "/v1/renew", self.renew),
            ("PUT", "/v1/images", self.image),
            ("PUT", "/v1/sandboxes/{lease_id}", self.open),
            ("DELETE", "/v1/sandboxes/{lease_id}", self.release),
            ("PUT", "/v1/sandboxes/{lease_id}/commands/{number}", self.command),
            ("PUT", "/v1/sandboxes/{lease_id}/files", self.write),
            ("POST", "/v1/sandboxes/{lease_id}/read", self.read),
            ("POST", "/v1/sandboxes/{lease_id}/reset", self.reset),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(HTTPException, self._http_error)
        for kind in (Refusal, SandboxError, ValueError, OSError):
            app.add_exception_handler(kind, self._error)
        app.add_exception_handler(Exception, self._fault)

    async def health(self) -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """The engine answers, and leases are given; looked up every two seconds at most."""
        if self.leases.draining:
            return _json({"status": "draining"}, 503)
        at, problem = self._ready
        if time.monotonic() - at >= READY_CACHE_S:
            self._ready = (time.monotonic(), problem)  # who asks meanwhile hears what was last known
            try:
                await asyncio.wait_for(asyncio.to_thread(self.leases.backend.left), 10.0)
                problem = ""
            except (SandboxError, OSError, TimeoutError) as error:
                logger.warning("not ready: %s", error)
                problem = "the engine does not answer"
            self._ready = (time.monotonic(), problem)
        return _json({"status": problem or "ok"}, 503 if problem else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        self._client(request)
        return Response(self.leases.metrics.text(), media_type="text/plain; version=0.0.4")

    async def info(self, request: Request) -> Response:
        """What the service is."""
        client = self._client(request)
        limits = self.limits
        return self._answer(
            {
                "api": API_VERSION,
                "kind": self.leases.backend.kind,
                "client": client,
                "limits": {
                    "max_sandboxes": limits.max_sandboxes,
                    "per_client": limits.per_client,
                    "ttl_s": limits.ttl_s,
                    "wait_s": limits.wait_s,
                    "body_bytes": limits.body_bytes,
                },
            }
        )

    async def list_sandboxes(self, request: Request) -> Response:
        """The ids of the client's leases."""
        return self._answer({"ids": self.leases.of(self._client(request))})

    async def renew(self, request: Request) -> Response:
        """Renew many leases."""
        client = self._client(request)
        given = await self._body(request)
        ids = given.take("ids", [])
        given.done()
        if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
            raise UsageError("ids: a list of strings is needed")
        if len(ids) > MAX_IDS:
            raise UsageError(f"ids: at most {MAX_IDS} are allowed")
        return self._answer({"lost": self.leases.renew(client, ids)})

    async def image(self, request: Request) -> Response:
        """Make a row's image."""
        self._client(request)
        given = await self._body(request)
        task, wait_s = given.take("task", None), self._wait(given)
        given.done()
        outcome = await _wait(self.images.request(task), wait_s)
        if outcome is None:
            return self._answer({"state": "building"}, 202)
        return self._answer({"image": outcome.get()})

    async def open(self, lease_id: str, request: Request) -> Response:
        """Take a sandbox."""
        client = self._client(request)
        given = await self._body(request)
        spec = self.limits.spec(given.take("spec", {}))
        ttl_s = given.number("ttl_s", 120.0, 1.0, self.limits.ttl_s)
        wait_s = self._wait(given)
        given.done()
        if not _ID.fullmatch(lease_id):
            raise UsageError(f"id {lease_id[:80]!r}: 8 to 64 of a-z, 0-9 and '-' are needed")
        lease = self.leases.open(client, lease_id, spec, ttl_s)
        outcome = await _wait(lease.made, wait_s)
        if outcome is None:
            return self._answer({"state": "starting"}, 202)
        if outcome.error is not None:
            self.leases.end(lease, "failed")
            raise outcome.error
        return self._answer({"id": lease.id, "sandbox": outcome.value.id, "ttl_s": ttl_s}, 201)

    async def release(self, lease_id: str, request: Request) -> Response:
        """Give a sandbox back; what runs in it is cut."""
        ending = self.leases.end(self.leases.get(self._client(request), lease_id))
        await asyncio.wait({asyncio.wrap_future(ending)}, timeout=self.limits.wait_s)
        return self._answer({"state": "ended" if ending.done() else "ending"})

    async def command(self, lease_id: str, number: str, request: Request) -> Response:
        """Run a command, or wait on for it."""
        lease = self.leases.get(self._client(request), lease_id)
        if not (number.isascii() and number.isdigit() and len(number) < 16):
            raise UsageError(f"number of the command {number[:40]!r}: a whole number is needed")
        given = await self._body(request)
        command = given.text("command")
        timeout_s = given.number("timeout_s", 60.0, 0.001, self.limits.timeout_s)
        half_bytes = given.whole("half_bytes", 4000, 1, self.limits.half_bytes)
        seen = given.take("seen", None)
        if seen is not None:
            seen = given.whole("seen", None, 0, STREAM_BYTES)
        wait_s = self._wait(given)
        given.done()
        future = self.leases.command(
            lease, int(number), command, timeout_s, half_bytes, show=seen is not None
        )
        answer: dict[str, Any] = {}
        if seen is None:
            outcome = await _wait(future, wait_s)
        else:
            shown = lease.shown
            outcome = await _wait(future, wait_s, lambda: len(shown) > seen)
            pieces = shown[seen:]  # more of them may come at any moment
            answer = {"shown": "".join(pieces), "seen": seen + len(pieces)}
        if outcome is None:
            return self._answer({"state": "running", **answer}, 202)
        return self._answer({**result_to_json(outcome.get()), **answer})

    async def write(self, lease_id: str, request: Request) -> Response:
        """Write files."""
        lease = self.leases.get(self._client(request), lease_id)
        given = await self._body(request)
        files = files_from_json(given.take("files", None))
        given.done()
        await self._work(self.leases.submit(lease, lambda sandbox: sandbox.write_files(files)))
        return self._answer({})

    async def read(self, lease_id: str, request: Request) -> Response:
        """The head of a file, as it is."""
        lease = self.leases.get(self._client(request), lease_id)
        given = await self._body(request)
        path = given.text("path")
        max_bytes = given.whole("max_bytes", 1_000_000, 0, self.limits.read_bytes)
        given.done()
        content = await self._work(
            self.leases.submit(lease, lambda sandbox: sandbox.read_file(path, max_bytes=max_bytes))
        )
        return Response(content, media_type="application/octet-stream", headers=self._load())

    async def reset(self, lease_id: str, request: Request) -> Response:
        """Back to the state of a new sandbox."""
        lease = self.leases.get(self._client(request), lease_id)
        given = await self._body(request)
        files = files_from_json(given.take("files", {}))
        given.done()
        await self._work(self.leases.submit(lease, lambda sandbox: sandbox.reset(files)))
        return self._answer({})

    def _client(self, request: Request) -> str:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        client = self.tokens.client(token.strip()) if scheme.lower() == "bearer" else None
        if client is None:
            raise Refusal("unauthorized", "a token is needed: Authorization: Bearer TOKEN")
        return client

    async def _body(self, request: Request) -> Fields:
        try:
            return Fields(
                await read_json_body(request, max_bytes=self.limits.body_bytes, timeout_s=BODY_TIMEOUT_S)
            )
        except BodyError as error:
            if error.kind == "too_large":
                raise Refusal("too_large", str(error)) from None
            if error.kind == "too_slow":
                raise SandboxTimeoutError(str(error)) from None
            raise UsageError(str(error)) from None

    def _wait(self, given: Fields) -> float:
        return given.number("wait_s", min(20.0, self.limits.wait_s), 0.0, self.limits.wait_s)

    async def _work(self, future: "Future[Outcome]") -> Any:
        return (await asyncio.wrap_future(future)).get()

    def _load(self) -> dict[str, str]:
        return {LOAD_HEADER: f"{self.leases.count()}/{self.limits.max_sandboxes}"}

    def _answer(self, value: object, status: int = 200) -> Response:
        return _json(value, status, self._load())

    async def _error(self, request: Request, error: Exception) -> Response:
        status, kind = error_of(error)
        self.leases.metrics.refused.labels(kind).inc()
        headers = {"retry-after": "1"} if status in (429, 503) else {}
        if kind == "unauthorized":  # nothing is told to whom we don't know
            return _error_json(kind, str(error), status, {"www-authenticate": "Bearer"})
        return _error_json(kind, str(error), status, headers | self._load())

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error_json("usage", str(error.detail), error.status_code, {})

    async def _fault(self, request: Request, error: Exception) -> Response:
        return _error_json("sandbox", "the service failed; its log has more", 500, {})


async def _wait(
    future: "Future[Outcome]", wait_s: float, news: Callable[[], bool] | None = None
) -> Outcome | None:
    """The outcome, or None where it is not there in time, or there are news before; the work goes on."""
    if not future.done():
        work, deadline = {asyncio.wrap_future(future)}, time.monotonic() + wait_s
        step_s = wait_s if news is None else NEWS_S
        while not (news is not None and news()) and (left_s := deadline - time.monotonic()) > 0:
            done, _ = await asyncio.wait(work, timeout=min(step_s, left_s))
            if done:
                break
    return future.result() if future.done() else None


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


def _error_json(kind: str, message: str, status: int, headers: dict[str, str]) -> Response:
    text = " ".join(message.split())[:2000]
    return _json({"error": {"type": kind, "message": text}}, status, headers)
