"""Answers over HTTP within bounds, for clients made of the standard library.

Invariants:
- A redirection is never followed: what was sent, maybe with a key, was meant for the address that was named.
- An answer is read by a deadline, however slowly its bytes come in, and up to a size.
"""

import http.client
import time
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Any, Final

__all__ = ["AnswerTooLongError", "NoRedirects", "read_answer", "retry_after_s"]

_PART_BYTES: Final = 1 << 16


class AnswerTooLongError(http.client.HTTPException):
    """The answer has more bytes than are read."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """For `urllib.request.build_opener`: 3xx becomes an `HTTPError`, as 4xx does."""

    def redirect_request(self, *_: Any) -> None:
        """Go nowhere."""


def read_answer(response: http.client.HTTPResponse, *, deadline: float, most_bytes: int) -> bytes:
    """The body of an answer.

    Args:
        response: with nothing read yet; each wait for bytes of its own has the time-out of its connection.
        deadline: by `time.monotonic`.
        most_bytes: that are read.

    Raises:
        TimeoutError: the deadline has passed.
        AnswerTooLongError: there are more bytes.
        http.client.IncompleteRead: the connection ended before the answer did.
        OSError: the connection failed.
    """
    expected = response.length
    parts: list[bytes] = []
    size = 0
    while (expected is None or size < expected) and (part := response.read1(_PART_BYTES)):
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise AnswerTooLongError(f"an answer of more than {most_bytes} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    if expected is not None and size < expected:
        raise http.client.IncompleteRead(b"".join(parts), expected - size)
    return b"".join(parts)


def retry_after_s(header: str | None) -> float | None:
    """A Retry-After header, given as seconds or as a date, as seconds from now; None where it says nothing."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
