"""The barrier of batch rollout: episodes that go on only together."""

from __future__ import annotations

import asyncio


class TurnBarrier:
    """Holds every party that arrives until all present parties have arrived.

    Parties are counted, not named: each that joins must leave. A party that leaves while others wait may be the one
    that releases them, so an episode that ends or fails holds up nobody.
    """

    def __init__(self) -> None:
        self._parties = 0
        self._waiting: list[asyncio.Future[None]] = []

    def join(self) -> None:
        """One more party has to arrive."""
        self._parties += 1

    def leave(self) -> None:
        """One party fewer has to arrive."""
        self._parties -= 1
        self._release_if_complete()

    async def arrive(self) -> None:
        """Wait for the others."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._release_if_complete()
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _release_if_complete(self) -> None:
        if len(self._waiting) < self._parties:
            return
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
