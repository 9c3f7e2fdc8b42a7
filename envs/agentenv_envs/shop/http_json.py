"""JSON over HTTP by the standard library, for the official service and for models that play a shopper.

Invariants:
- A request has a deadline for each wait and for its answer as a whole; nothing is sent twice, or to where an answer
  redirects it.
- What went wrong is told apart: nothing was sent (`NotSentError`), or nobody knows what became of it (`NoAnswerError`).
- A proxy of the environment is used for https alone: a service on the same network is reached by http.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from agentenv.errors import InfrastructureError, UsageError
from agentenv.http_answers import AnswerTooLongError, NoRedirects, read_answer

__all__ = ["NoAnswerError", "NotSentError", "check_url", "post_json"]

_MOST_BYTES: Final = 32 * 2**20
_PLAIN: Final = urllib.request.build_opener(NoRedirects, urllib.request.ProxyHandler({}))


class NotSentError(InfrastructureError):
    """No connection: the other side knows nothing of the request."""


class NoAnswerError(InfrastructureError):
    """The request was sent, and no answer that can be read came back."""


def check_url(name: str, url: Any) -> str:
    """A base URL without its final slash.

    Args:
        name: of the argument, for the message.
        url: such as "http://host:5000".

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        good = good and not parts.username and not parts.query and not parts.fragment
    except (ValueError, TypeError, AttributeError):
        good = False
    if not good:
        raise UsageError(f"{name} must be a URL such as http://HOST:PORT or https://HOST, got {url!r}")
    return str(url).rstrip("/")


def post_json(
    url: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Post an object and read the answer's JSON.

    Args:
        url: where to.
        body: what JSON can hold.
        timeout_s: of each wait for the other side, and of the whole answer, seconds.
        headers: more of them.

    Raises:
        NotSentError: the connection was refused, or the host was not found.
        NoAnswerError: no answer in time, an HTTP status other than 2xx, or no JSON.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", **(headers or {})},
        method="POST",
    )
    # Made anew for https: which proxy to take stands in the environment.
    opener = _PLAIN if url.startswith("http:") else urllib.request.build_opener(NoRedirects)
    deadline = time.monotonic() + timeout_s
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            raw = read_answer(answer, deadline=deadline, most_bytes=_MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise NoAnswerError(f"{url}: HTTP {error.code}") from None
    except urllib.error.URLError as error:
        # These two fail before a byte has gone: nobody listens there, no such host.
        unsent = isinstance(error.reason, ConnectionRefusedError | socket.gaierror)
        raise (NotSentError if unsent else NoAnswerError)(f"{url}: {error.reason}") from None
    except AnswerTooLongError as error:
        raise NoAnswerError(f"{url}: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(f"{url}: {error!r}") from None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(f"{url}: no JSON came back: {error}") from None
