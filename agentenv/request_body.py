"""The JSON body of a request to one of this package's services, within a size and a time.

Invariant: a body is read up to its limit and no further, whatever length the client announces.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["BodyError", "read_json_body"]


class BodyError(Exception):
    """A body that cannot be used.

    Args:
        kind: what is wrong.
        message: one line.
    """

    def __init__(self, kind: Literal["too_large", "too_slow", "cut_off", "no_json"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def read_json_body(request: Request, *, max_bytes: int, timeout_s: float) -> Any:
    """What the body holds; an empty one is an empty object.

    Raises:
        BodyError: it is too large, comes too slowly, ends early, or is no JSON.
    """
    from starlette.requests import ClientDisconnect

    too_large = BodyError("too_large", f"the body is over {max_bytes} bytes")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyError("too_slow", f"the body did not come within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise BodyError("cut_off", "the body was cut off") from None
    try:
        return json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError):
        raise BodyError("no_json", "the body is not JSON") from None
