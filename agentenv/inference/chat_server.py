"""A chat server that speaks OpenAI's protocol, as it answers requests and as it fails; standard library alone.

Invariants:

* What may pass (time-outs, 408, 409, 429, 5xx, a connection refused or cut, an answer that is no JSON or has no
  choices) is tried again, with pauses that double and that the server may set itself (Retry-After); what cannot (401,
  403, 404) never is.
* The API key goes into the Authorization header, and nowhere else: into no message, log or file.
* A server that does not know an optional field is asked without it from then on.
* A redirection is not followed, and a request ends by its time-out, however slowly an answer comes in.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

from agentenv.errors import ModelError, UsageError
from agentenv.http_answers import AnswerTooLongError, NoRedirects, read_answer, retry_after_s

__all__ = ["ChatAnswer", "ChatServer", "ContextLengthError", "ServerGoneError"]

logger = logging.getLogger(__name__)

_AGAIN: Final = frozenset({408, 409, 425, 429})
"""And all from 500 on, such as a proxy's 524."""
_LIST_TIMEOUT_S: Final = 30.0
_LIST_RETRIES: Final = 3
_LONGEST_PAUSE_S: Final = 60.0
_OPTIONAL: Final = ("seed", "temperature", "top_p", "max_tokens", "max_completion_tokens")
_TOO_LONG: Final = re.compile(
    r"context.?length|context.?window|context size|maximum context|too many tokens|prompt is too long", re.I
)
_UNKNOWN: Final = re.compile(
    r"unsupported|not support|unknown|unrecognized|unexpected|extra|not permitted|not allowed|invalid param",
    re.I,
)
_ERROR_CHARS: Final = 300
_MOST_BYTES: Final = 64 * 2**20
_MOST_TOKENS: Final = 2**53
"""Of an episode; a greater count is none."""


class ServerGoneError(ModelError):
    """No further request can succeed: nothing listens there, or the server refuses key, model or path."""


class ContextLengthError(ModelError):
    """The conversation has grown beyond what the model takes."""


class _TryAgainError(Exception):
    """An answer that another request may not get.

    Args:
        message: what came.
        pause_s: what the server asks to wait; None: it does not say.
        refused: nothing listens there.
    """

    def __init__(self, message: str, *, pause_s: float | None = None, refused: bool = False) -> None:
        super().__init__(message)
        self.pause_s = pause_s
        self.refused = refused


@dataclass(frozen=True)
class ChatAnswer:
    """What a server answered to one turn."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    """None: the server does not count."""
    completion_tokens: int | None


class ChatServer:
    """Client of one server; may be called from several threads.

    Args:
        url: of the API, such as ``http://127.0.0.1:8000/v1``, or of its ``/chat/completions``.
        model: name of the model in requests; None: :meth:`choose_model` finds it.
        api_key: for the Authorization header, white space around it apart; None or empty: none is sent.
        timeout_s: of one request.
        retries: how often a request is tried again.
        first_pause_s: before the first retry; doubles with each.

    Raises:
        UsageError: the URL is none of http or https, or the key can't be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        retries: int = 6,
        first_pause_s: float = 0.5,
    ) -> None:
        host = _host(url)
        if host is None:
            raise UsageError(
                f"--url {url!r} must be an address such as http://127.0.0.1:8000/v1 or https://HOST/v1"
            )
        api_key = (api_key or "").strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the key has characters that no header can hold; look at OPENAI_API_KEY")
        self.base = url.rstrip("/").removesuffix("/chat/completions")
        self.model = model
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._retries = retries
        self._first_pause_s = first_pause_s
        self._unknown_fields: set[str] = set()
        self._closing = threading.Event()
        self._has_answered = False
        # A proxy of the environment is of no use for what listens on this machine.
        handlers = [urllib.request.ProxyHandler({})] if _is_local(host) else []
        self._opener = urllib.request.build_opener(NoRedirects, *handlers)

    def choose_model(self) -> str:
        """Find the server, complete its address where ``/v1`` is missing, and choose the model where none is named.

        Returns:
            The model's name.

        Raises:
            UsageError: nothing listens there, the key is refused, or the model has to be named.
        """
        names: list[str] | None = None
        # A server lists its models at once or not at all.
        timeout_s, retries = min(self._timeout_s, _LIST_TIMEOUT_S), min(self._retries, _LIST_RETRIES)
        reason = ""
        for base in dict.fromkeys((self.base, f"{self.base.removesuffix('/v1')}/v1")):
            try:
                listed = self._request("GET", f"{base}/models", None, timeout_s=timeout_s, retries=retries)
                names = [str(model["id"]) for model in listed["data"]]
            except (ServerGoneError, ModelError, KeyError, TypeError) as error:
                if getattr(error, "is_final", False):
                    raise UsageError(str(error)) from error
                reason = reason or (f" ({error})" if isinstance(error, ModelError) else "")
                continue
            self.base = base
            break
        if self.model is not None:
            return self.model
        if not names:
            raise UsageError(f"{self.base} does not list its models; name one with --model-name{reason}")
        if len(names) > 1:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise UsageError(f"{self.base} serves {len(names)} models; choose with --model-name: {shown}")
        self.model = names[0]
        return self.model

    def complete(
        self,
        messages: list[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> ChatAnswer:
        """One turn of the model.

        Raises:
            ServerGoneError: no further request can succeed.
            ContextLengthError: the conversation is too long.
            ModelError: the request failed, as often as it was tried.
        """
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if top_p != 1.0:
            fields["top_p"] = top_p
        if seed is not None:
            fields["seed"] = seed % 2**31
        while True:
            body = {"model": self.model, "messages": messages, **self._known(fields)}
            try:
                answer: ChatAnswer = self._request(
                    "POST", f"{self.base}/chat/completions", body, read=self._read
                )
                return answer
            except _RefusedFieldError as error:
                logger.warning("%s does not take the field %r; it is left out", self.base, error.field)
                self._unknown_fields.add(error.field)

    @property
    def unknown_fields(self) -> list[str]:
        """Fields of requests that the server refused, and is asked without."""
        return sorted(self._unknown_fields)

    def close(self) -> None:
        """End the pauses of requests in flight; they fail."""
        self._closing.set()

    def _known(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: value for name, value in fields.items() if name not in self._unknown_fields}
        if "max_tokens" in self._unknown_fields and "max_completion_tokens" not in self._unknown_fields:
            known["max_completion_tokens"] = fields["max_tokens"]
        return known

    def _read(self, answer: Any) -> ChatAnswer:
        try:
            choice = answer["choices"][0]
            text = _text(choice["message"].get("content"))
            usage = answer.get("usage")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _TryAgainError(f"gave an answer without choices: {_short(answer)}") from error
        self._has_answered = True
        usage = usage if isinstance(usage, dict) else {}
        return ChatAnswer(
            text,
            str(choice.get("finish_reason") or "stop"),
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
        )

    def _request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        *,
        read: Callable[[Any], Any] = lambda answer: answer,
        timeout_s: float | None = None,
        retries: int | None = None,
    ) -> Any:
        """Send, again where that may help."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        retries = self._retries if retries is None else retries
        for attempt in range(retries + 1):
            try:
                return read(self._send(method, url, body, timeout_s))
            except _TryAgainError as error:
                # Before anything has answered, nothing listening there is a wrong address more likely than a restart.
                if attempt == retries or (error.refused and not self._has_answered):
                    tried = f", {attempt + 1} times in a row" if attempt else ""
                    failed = ServerGoneError if error.refused else ModelError
                    raise _final(failed(f"{url}: {error}{tried}"), error.refused) from error
                pause_s = min(self._first_pause_s * 2.0**attempt, _LONGEST_PAUSE_S)
                pause_s *= 0.5 + random.random() / 2.0
                logger.info("%s: %s; tried again", url, error)
                if self._closing.wait(max(pause_s, min(error.pause_s or 0.0, _LONGEST_PAUSE_S))):
                    raise ModelError(f"{url}: {error}; given up, since the evaluation ends") from error
        raise AssertionError("unreachable")

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("User-Agent", "agentenv")
        if self._api_key:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        deadline = time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                text = read_answer(response, deadline=deadline, most_bytes=_MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(url, body or {}, error, deadline) from error
        except urllib.error.URLError as error:
            raise _no_answer(error.reason, timeout_s) from error
        except AnswerTooLongError as error:
            raise _TryAgainError(f"gave {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(error, timeout_s) from error
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _TryAgainError(f"answered with something that is no JSON: {_short(text)}") from error
        if isinstance(answer, dict) and answer.get("error") and "choices" not in answer:
            raise _TryAgainError(f"answered with an error: {_short(answer['error'])}")
        return answer

    def _refusal(
        self, url: str, body: Mapping[str, Any], error: urllib.error.HTTPError, deadline: float
    ) -> Exception:
        if error.code in range(300, 400):
            place = _short(error.headers.get("Location") or "nowhere")
            return _final(
                ServerGoneError(f"{url}: the server answered {error.code}, go to {place}; name that address"),
                True,
            )
        try:
            response = cast("http.client.HTTPResponse", error.fp)
            detail = _short(_message(read_answer(response, deadline=deadline, most_bytes=_MOST_BYTES)))
        except (OSError, http.client.HTTPException):
            detail = "no message"
        said = f"the server answered {error.code}: {detail}"
        if error.code in _AGAIN or error.code >= 500:
            return _TryAgainError(said, pause_s=retry_after_s(error.headers.get("Retry-After")))
        if error.code in (401, 403):
            key = "the key of OPENAI_API_KEY was sent" if self._api_key else "OPENAI_API_KEY is not set"
            return _final(ServerGoneError(f"{url}: {said} ({key})"), True)
        if error.code in (400, 413, 422):
            if error.code == 413 or _TOO_LONG.search(detail):
                return ContextLengthError(f"{url}: {said}")
            for field in _OPTIONAL:
                # By what was sent: another thread may just have learned of the same field.
                if field in body and re.search(rf"\b{field}\b", detail) and _UNKNOWN.search(detail):
                    return _RefusedFieldError(field)
            if self._has_answered:
                return ModelError(f"{url}: {said}")
        return ServerGoneError(f"{url}: {said}")


def _no_answer(reason: Any, timeout_s: float) -> _TryAgainError:
    if isinstance(reason, TimeoutError):
        return _TryAgainError(f"no answer within {timeout_s:g} s")
    if isinstance(reason, ConnectionRefusedError):
        return _TryAgainError("connection refused: nothing listens there", refused=True)
    if isinstance(reason, OSError) and not isinstance(reason, ConnectionError):
        # no such host, a bad certificate
        return _TryAgainError(f"cannot be reached: {reason}", refused=True)
    return _TryAgainError(f"the connection was cut: {type(reason).__name__} {reason}".rstrip())


class _RefusedFieldError(Exception):
    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def _final(error: ModelError, is_final: bool) -> ModelError:
    """Mark what another path of the same server would not mend."""
    error.is_final = is_final  # type: ignore[attr-defined]
    return error


def _host(url: str) -> str | None:
    """The host of an address of http or https; None: it is no such address."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    plain = url.isprintable() and " " not in url and parts.username is None
    return parts.hostname if plain and parts.scheme in ("http", "https") else None


def _text(content: Any) -> str:
    """What the model says: some servers give it in parts, of which some are thoughts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if part.get("type") == "text")
    return str(content or "")


def _count(tokens: Any) -> int | None:
    good = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < _MOST_TOKENS
    return tokens if good else None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _message(body: bytes) -> str:
    """The message in an error's body, whichever of the customary forms that has."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), str(value))
    return str(value)


def _short(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _ERROR_CHARS else f"{text[:_ERROR_CHARS]}..."
