"""An environment of ours as OpenEnv's FastAPI application: a session, over its WebSocket, is an environment.

Invariants:
- An environment is made when its session is first reset, and closed when the session ends.
- Without a token only requests are answered that name this machine's own address as host and come from no page of
  another site: a page that a browser on this machine shows must not play, or run commands in, an environment.
- OpenEnv's sessionless `/reset`, `/step` and `/state` are refused: each would make an environment for one call.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata, State

from agentenv.environment_source import EnvFactory, TextEnv
from agentenv.interop.openenv.messages import TextAction, TextObservation
from agentenv.rollout.workers.contract import checked_reset, checked_step

__all__ = ["ServedEnvironment", "make_app"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_OWN_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_SESSIONLESS = frozenset({"/reset", "/step", "/state"})


def make_app(name: str, make: EnvFactory, *, max_sessions: int, token: str | None = None) -> Any:
    """The application, for any ASGI server.

    Args:
        name: of the environment, for clients.
        make: an environment.
        max_sessions: at the same time; more are refused with CAPACITY_REACHED.
        token: that a client must send as `Authorization: Bearer TOKEN`; None: see the module's invariants.
    """
    first = make()
    worker = getattr(first.unwrapped, "worker", "thread")
    description = (type(first.unwrapped).__doc__ or name).strip().splitlines()[0]
    first.close()

    class Served(ServedEnvironment):
        # What wants a process of its own is not made to run in several threads.
        REQUIRES_SINGLE_THREAD_EXECUTOR = worker == "process"

        def __init__(self) -> None:
            super().__init__(make, name, description)

    app = create_fastapi_app(
        Served,
        TextAction,
        TextObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=None),
        env_name=name,
    )
    return Guard(app, token)


class ServedEnvironment(Environment[TextAction, TextObservation, State]):
    """One session's environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, make: EnvFactory, name: str, description: str) -> None:
        super().__init__()
        self._make = make
        self._name = name
        self._description = description
        self._env: TextEnv | None = None
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        options: dict[str, Any] | None = None,
        **_: Any,
    ) -> TextObservation:
        """Begin the task that the seed chooses."""
        if self._env is None:
            self._env = self._make()
        text, info = checked_reset(self._env, self._env.reset(seed=seed, options=options))
        self._state = State(episode_id=episode_id)
        return TextObservation(text=text, info=_plain(info))

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        """Take a turn.

        Raises:
            RuntimeError: no episode was begun in this session.
        """
        if self._env is None:
            raise RuntimeError("no episode: send a reset first")
        text, reward, terminated, truncated, info = checked_step(self._env, self._env.step(action.text))
        self._state.step_count += 1
        return TextObservation(
            text=text,
            reward=reward,
            done=terminated or truncated,
            terminated=terminated,
            truncated=truncated,
            info=_plain(info),
        )

    @property
    def state(self) -> State:
        """Episode and number of steps."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Name and first line of the description."""
        return EnvironmentMetadata(name=self._name, description=self._description)

    def close(self) -> None:
        """Close the environment; idempotent."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


class Guard:
    """Lets through what the module's invariants allow."""

    def __init__(self, app: Any, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] in ("http", "websocket"):
            refusal = self._refusal(scope)
            if refusal is not None:
                await _refuse(scope["type"], send, *refusal)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        if self._token is not None:
            wanted = f"Bearer {self._token}".encode()
            if not hmac.compare_digest(headers.get("authorization", "").encode(), wanted):
                return 401, "the token is missing or wrong"
        elif _host(f"//{headers.get('host', '')}") not in _OWN_HOSTS:
            return 403, "without a token only this machine's own names are answered to"
        elif "origin" in headers and _host(headers["origin"]) not in _OWN_HOSTS:
            return 403, "pages of other sites are not answered"
        if scope["path"] in _SESSIONLESS:
            return 404, "an environment is a session: connect to /ws, as OpenEnv's EnvClient does"
        return None


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _refuse(kind: str, send: Send, status: int, reason: str) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    body = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it; NumPy's scalars as numbers, what JSON has no form for as text."""
    plain: dict[str, Any] = json.loads(json.dumps(info, default=_plain_value))
    return plain


def _plain_value(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
