"""`OpenEnvClient-v0`: a running OpenEnv server, ours or another's, as an environment.

A server says at `/schema` which fields its actions have. Where one of them is a text that alone is enough, the policy's
turn is that text; otherwise the policy writes the action as a JSON object.

Invariants:
- An environment holds one session, opened by `reset` and closed by `close`; no episode goes on in another session.
- `reset(seed=...)` hands the seed on: whether it chooses the task is the server's doing.
- What the policy writes and the server will not take as an action is answered by an observation. A server that can't be
  reached, is full or does not answer in time is an `InfrastructureError`; one that reports a failure is an `EnvError`.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from agentenv.env import BaseEnv
from agentenv.errors import EnvError, InfrastructureError, MissingExtraError, UsageError
from agentenv.http_answers import NoRedirects, read_answer

__all__ = ["OpenEnvClientEnv"]

_MOST_SCHEMA_BYTES: Final = 1 << 22
_MOST_MESSAGE_MB: Final = 16.0
_CODE = re.compile(r"\(code: ([A-Z_]+)\)\Z")
_ACTION_ERRORS = ("VALIDATION_ERROR", "INVALID_JSON")
_TEXT_FIELDS = ("text", "message", "content")


class OpenEnvClientEnv(BaseEnv):
    """Episodes on an OpenEnv server.

    Args:
        url: of the server, http:// or https://.
        action_field: field of the action that the policy's text is put in; None: the server's schema decides.
        observation_field: field of the observation that the policy reads; None: the text field that there is, or else
            the whole observation as JSON.
        max_turns: advice to rollouts; None: none.
        timeout_s: seconds to wait for the answer to a reset or step.
        token_file: file with the token that the server wants, sent as `Authorization: Bearer TOKEN`.

    Raises:
        UsageError: an argument is malformed.
        MissingExtraError: OpenEnv is not installed.
    """

    worker = "thread"

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        observation_field: str | None = None,
        max_turns: int | None = None,
        timeout_s: float = 60.0,
        token_file: str | None = None,
    ) -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise UsageError(f"url must begin with http:// or https:// and name a host, got {url!r}")
        if not timeout_s > 0:
            raise UsageError(f"timeout_s must be more than 0, got {timeout_s}")
        if max_turns is not None and max_turns < 1:
            raise UsageError(f"max_turns must be at least 1 or None, got {max_turns}")
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise MissingExtraError(str(error.name or "openenv"), "openenv") from error
        self.url = url.rstrip("/")
        self.max_turns = max_turns
        self._headers: dict[str, str] = {}
        if token_file is not None:
            try:
                token = Path(token_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"token_file {token_file}: {error}") from None
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._action_field = action_field
        self._observation_field = observation_field
        self._schema: Mapping[str, Any] | None = None
        self._new_client = partial(
            GenericEnvClient,
            base_url=self.url,
            connect_timeout_s=min(10.0, timeout_s),
            message_timeout_s=timeout_s,
            max_message_size_mb=_MOST_MESSAGE_MB,
            mode="simulation",
            headers=self._headers or None,
        )
        self._client: Any = None
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode on the server.

        Raises:
            InfrastructureError: the server can't be reached, is full, or does not answer in time.
            EnvError: it reports a failure.
        """
        super().reset(seed=seed)
        if self._client is not None and not _is_open(self._client):
            self.close()
        if self._schema is None:
            self._schema = self._read_schema()
            self._action_field = self._action_field or _text_field(self._schema)
        arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options:
            arguments["options"] = options
        result = self._ask("reset", **arguments)
        self._running = True
        observation, info = self._read(result.observation)
        if seed is not None:
            info.setdefault("task_id", f"openenv-{seed}")
        info.setdefault("family", "openenv")
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn.

        Raises:
            RuntimeError: called before `reset` or after the end.
            InfrastructureError: see `reset`.
            EnvError: see `reset`.
        """
        if not self._running:
            raise RuntimeError("OpenEnvClientEnv.step needs a running episode: call reset first")
        payload = self._payload(action)
        if payload is None:
            return self._not_an_action()
        if not _is_open(self._client):
            self.close()
            raise InfrastructureError(f"{self.url} ended the session in the middle of an episode")
        try:
            result = self._ask("step", payload)
        except _RefusedActionError:
            return self._not_an_action()
        observation, info = self._read(result.observation)
        said = result.observation if isinstance(result.observation, dict) else {}
        truncated = bool(result.done and said.get("truncated"))
        terminated = bool(result.done and said.get("terminated", not truncated))
        self._running = not result.done
        return observation, float(result.reward or 0.0), terminated, truncated, info

    def close(self) -> None:
        """End the session; idempotent."""
        self._running = False
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                client.close()

    def _ask(self, call: str, *args: Any, **kwargs: Any) -> Any:
        """Call the client; a failure ends the session, so that no later answer is taken for this one's."""
        if self._client is None:
            self._client = self._new_client().sync()
        try:
            return getattr(self._client, call)(*args, **kwargs)
        except RuntimeError as error:
            code = _CODE.search(str(error))
            if call == "step" and code is not None and code[1] in _ACTION_ERRORS:
                raise _RefusedActionError from None
            self.close()
            if code is not None and code[1] == "EXECUTION_ERROR":
                raise EnvError(f"{self.url} failed at {call}: {error}") from error
            raise InfrastructureError(f"{self.url} failed at {call}: {error}") from error
        except Exception as error:
            self.close()
            what = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else error
            raise InfrastructureError(f"{self.url} failed at {call}: {what}") from error

    def _payload(self, action: str) -> dict[str, Any] | None:
        """The action for the server; None where the policy's text is none."""
        if self._action_field is not None:
            return {self._action_field: action.encode("utf-8", "replace").decode("utf-8")}
        try:
            payload = json.loads(action)
        except (ValueError, RecursionError):
            return None
        return payload if isinstance(payload, dict) else None

    def _not_an_action(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        wanted = {name: form.get("type", "any") for name, form in _fields(self._schema or {}).items()}
        text = f"This is not an action. Write one JSON object with the fields {json.dumps(wanted)}."
        return text, 0.0, False, False, {"malformed": True}

    def _read(self, observation: Any) -> tuple[str, dict[str, Any]]:
        """What the policy reads, and what is reported."""
        if not isinstance(observation, dict):
            return _text(observation), {}
        info = observation.get("info")
        field = self._observation_field
        if field is None:
            field = next((name for name in _TEXT_FIELDS if isinstance(observation.get(name), str)), None)
        elif field not in observation:
            known = ", ".join(sorted(observation))
            raise EnvError(f"observations of {self.url} have no field {field!r}; they have {known}")
        if field is not None:
            return _text(observation[field]), dict(info) if isinstance(info, dict) else {}
        shown = {name: value for name, value in observation.items() if name != "metadata"}
        return json.dumps(shown, ensure_ascii=False, sort_keys=True), {}

    def _read_schema(self) -> Mapping[str, Any]:
        """The JSON schema of actions.

        Raises:
            InfrastructureError: the server does not give it.
        """
        deadline = time.monotonic() + self._timeout_s
        request = urllib.request.Request(f"{self.url}/schema", headers=self._headers)
        handlers: list[Any] = [NoRedirects()]
        if re.match(r"https?://(127\.0\.0\.1|localhost|\[::1\])(:|/|$)", self.url):
            handlers.append(urllib.request.ProxyHandler({}))  # as OpenEnv's own client
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=self._timeout_s) as response:
                schema = json.loads(read_answer(response, deadline=deadline, most_bytes=_MOST_SCHEMA_BYTES))
            action = schema["action"]
        except urllib.error.HTTPError as error:
            error.close()
            raise InfrastructureError(f"{self.url}/schema: {error}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InfrastructureError(
                f"{self.url}/schema is not that of an OpenEnv server: {error}"
            ) from error
        return action if isinstance(action, dict) else {}


class _RefusedActionError(Exception):
    """The server does not take the action."""


def _is_open(client: Any) -> bool:
    """Whether the session is: OpenEnv's client would open another one without a word."""
    socket = client.async_client._ws
    return socket is not None and socket.state.name == "OPEN"


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: form for name, form in properties.items() if name != "metadata" and isinstance(form, dict)}


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """The text field that alone makes an action; None where there is no such."""
    required = [name for name in schema.get("required", []) if name != "metadata"]
    texts = [name for name, form in _fields(schema).items() if form.get("type") == "string"]
    if len(required) == 1:
        return required[0] if required[0] in texts else None
    return texts[0] if not required and len(texts) == 1 else None


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode("utf-8")
