"""One service as a client sees it: requests with retries, its load, and whether it is up.

Invariants:
- Requests are repeated after a failure of the connection or of a proxy; all of them may be (see `wire`).
- Every wait has a deadline.
- The token is sent to the service and written nowhere.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from agentenv.errors import MissingExtraError, SandboxError, SandboxTimeoutError, UsageError

from .wire import LOAD_HEADER, dump, exception_of

__all__ = ["Endpoint", "ServiceDownError"]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
"""Seconds that an answer may take besides the time that the request itself allows."""
PAUSES_S = (0.1, 0.5, 2.0)
"""Before the second try, the third and the last."""
WAIT_S = 20.0
"""For how long a service may hold an answer back; shorter than what proxies allow."""
DOWN_S = 5.0
"""Seconds for which a service that did not answer is asked last."""


class ServiceDownError(SandboxError):
    """The service, or what lies between, does not answer."""


class Endpoint:
    """A service.

    Args:
        url: such as "http://sandbox:8700" or "https://host/prefix".
        token: of the client.

    Raises:
        MissingExtraError: httpx is not installed.
        UsageError: not such a URL.
    """

    def __init__(self, url: str, token: str) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError("httpx", "service") from error
        self._httpx = httpx
        try:
            parsed = httpx.URL(url)
            good = parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.userinfo
        except (httpx.InvalidURL, TypeError):
            good = False
        if not good:
            raise UsageError(f"sandbox_url={url!r}: http://HOST:PORT or https://HOST is needed")
        if not token.isascii() or not token.isprintable() or not token.strip():
            raise UsageError("the token of the sandbox service: printable ASCII is needed")
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {token.strip()}"},
            # A proxy of the environment is for the world outside, where a service is reached by https.
            trust_env=parsed.scheme == "https",
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._lock = threading.Lock()
        self._load, self._limit = 0, 1
        self._coming = 0
        self._down_until = 0.0
        self.images: dict[str, str] = {}
        """Of rows: name that the client uses -> name that the service's engine has."""

    @property
    def rank(self) -> tuple[bool, float]:
        """The least is the best to take a sandbox from: up, and least loaded."""
        with self._lock:
            return time.monotonic() < self._down_until, (self._load + self._coming) / self._limit

    def pass_over(self) -> None:
        """Ask it last for a while."""
        self._down_until = time.monotonic() + DOWN_S

    def coming(self, change: int) -> None:
        """Count a lease that is being taken and that no answer shows yet."""
        with self._lock:
            self._coming += change

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        wait_s: float = 0.0,
        tries: int = 1 + len(PAUSES_S),
    ) -> tuple[int, Any]:
        """Send a request until it is answered; status and JSON (or bytes, where the answer is a file).

        Raises:
            ServiceDownError: no answer after all tries.
            SandboxTimeoutError: the last one did not come in time.
            Exception: what the service says, see `wire.exception_of`.
        """
        httpx = self._httpx
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S + wait_s, connect=CONNECT_TIMEOUT_S)
        content = None if body is None else dump(body)
        failure: SandboxError | None = None
        late = 0
        for attempt in range(tries):
            if attempt:
                time.sleep(PAUSES_S[attempt - 1])
            try:
                answer = self._client.request(method, path, content=content, timeout=timeout)
            except httpx.ReadTimeout as error:
                late += 1
                failure = SandboxTimeoutError(f"{self.url}: {method} {path}: no answer in time ({error!r})")
            except RuntimeError as error:
                raise ServiceDownError(f"{self.url}: the connection is closed ({error})") from None
            except httpx.HTTPError as error:
                failure = ServiceDownError(f"{self.url}: {method} {path}: {error!r}")
            else:
                self._note_load(answer.headers.get(LOAD_HEADER))
                value = _value(answer)
                if answer.is_success and value is not None:
                    return answer.status_code, value
                error_fields = value.get("error") if isinstance(value, dict) else None
                if isinstance(error_fields, dict):
                    raise exception_of(
                        str(error_fields.get("type")), f"{self.url}: {error_fields['message']}"
                    )
                where = f", see {answer.headers['location']}" if answer.has_redirect_location else ""
                failure = ServiceDownError(f"{self.url}: {method} {path}: HTTP {answer.status_code}{where}")
            logger.debug("%s", failure)
            if late == 2:  # it hangs: two waits are enough
                break
        self.pass_over()
        if not late:
            with self._lock:
                self._load = 0  # it has gone, and what it had with it; otherwise its next answer tells
        assert failure is not None
        raise failure

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _note_load(self, text: str | None) -> None:
        used, _, limit = (text or "").partition("/")
        if used.isdigit() and limit.isdigit():
            with self._lock:
                self._load, self._limit = int(used), max(1, int(limit))


def _value(answer: Any) -> Any:
    """JSON or bytes of an answer; None where it is neither."""
    if answer.headers.get("content-type", "").startswith("application/octet-stream"):
        return answer.content
    try:
        return json.loads(answer.content)
    except ValueError:
        return None
