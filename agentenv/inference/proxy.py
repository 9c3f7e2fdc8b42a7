"""The one door to inference engines: routing, deadlines and weight updates for several engines as for one.

Invariants:

* An episode stays with the engine that holds its prefix; a new one goes to the engine with the fewest requests.
* No call waits longer than its deadline on an engine.
* After :meth:`LLMProxy.update_weights` every engine has the version, or the call raised.
* An engine that died is named by :attr:`LLMProxy.error`; requests to it raise ModelError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from agentenv.errors import EpisodeTimeoutError, UsageError
from agentenv.inference.protocol import Engine, Generation, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor


class LLMProxy:
    """Several engines with the same weights behind the interface of one.

    Besides the :class:`~agentenv.inference.protocol.Engine` protocol three optional attributes of an engine are used:
    ``error`` (what it died of), ``release(episode_id)`` (the episode is over) and ``updates_while_running`` (true if
    ``update_weights`` needs no ``suspend`` around it).

    Args:
        engines: at least one. The proxy owns them: :meth:`close` closes them.

    Raises:
        UsageError: no engine.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise UsageError("LLMProxy needs at least one engine, got none")
        self._engines = list(engines)
        self._load = [0] * len(self._engines)
        self._home: dict[str, int] = {}
        self._serving: dict[str, int] = {}
        self._closed = False

    @property
    def version(self) -> int:
        """The oldest version in use."""
        return min(engine.version for engine in self._engines)

    @property
    def error(self) -> BaseException | None:
        """What the first dead engine died of; None while all live."""
        for engine in self._engines:
            error: BaseException | None = getattr(engine, "error", None)
            if error is not None:
                return error
        return None

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest sequence that every engine takes; None: they do not say."""
        limits = [int(limit) for engine in self._engines if (limit := getattr(engine, "max_length", None))]
        return min(limits) if limits else None

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn.

        Raises:
            EpisodeTimeoutError: ``request.deadline`` (of the event loop's clock) passed; the request was aborted.
            ModelError: the engine failed.
            UsageError: the engine cannot serve the request, or its id is in use.
        """
        if request.request_id in self._serving:
            raise UsageError(f"request id {request.request_id!r} is in use")
        index = self._route(request.episode_id)
        self._load[index] += 1
        self._serving[request.request_id] = index
        try:
            if request.deadline is None:
                return await self._engines[index].generate(request)
            timeout = asyncio.timeout_at(request.deadline)
            try:
                async with timeout:
                    generation = await self._engines[index].generate(request)
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise _missed(request) from error
            # Engines may watch the deadline themselves and answer it with an abort.
            if generation.finish_reason == "abort" and asyncio.get_running_loop().time() >= request.deadline:
                raise _missed(request)
            return generation
        finally:
            self._load[index] -= 1
            del self._serving[request.request_id]

    async def abort(self, request_id: str) -> None:
        """Make the request's ``generate`` return its partial tokens; unknown ids are ignored."""
        index = self._serving.get(request_id)
        if index is not None:
            await self._engines[index].abort(request_id)

    async def release(self, episode_id: str) -> None:
        """The episode is over: its engine may drop its prefix."""
        index = self._home.pop(episode_id, None)
        if index is not None:
            release = getattr(self._engines[index], "release", None)
            if release is not None:
                await release(episode_id)

    async def suspend(self) -> None:
        """Stop sampling everywhere."""
        await asyncio.gather(*(engine.suspend() for engine in self._engines))

    async def resume(self) -> None:
        """Go on sampling everywhere."""
        await asyncio.gather(*(engine.resume() for engine in self._engines))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give all engines new weights, each suspended meanwhile if it has to be.

        Raises:
            ModelError, UsageError: as the engines raise.
        """
        await asyncio.gather(*(_update(engine, weights, version) for engine in self._engines))

    async def close(self) -> None:
        """Close all engines; idempotent."""
        if self._closed:
            return
        self._closed = True
        results = await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def stats(self) -> dict[str, float]:
        """Sum of the engines' ``stats()``, where they have them."""
        total: dict[str, float] = {}
        for engine in self._engines:
            stats: Any = getattr(engine, "stats", None)
            for name, value in (stats() if stats is not None else {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _route(self, episode_id: str) -> int:
        index = self._home.get(episode_id) if episode_id else None
        if index is None:
            # Episodes between turns weigh on an engine too, else a burst of first turns lands on one.
            homes = [0] * len(self._engines)
            if len(homes) > 1:
                for home in self._home.values():
                    homes[home] += 1
            index = min(range(len(self._engines)), key=lambda i: (self._load[i], homes[i]))
            if episode_id:
                self._home[episode_id] = index
        return index


def _missed(request: GenerationRequest) -> EpisodeTimeoutError:
    return EpisodeTimeoutError("generate", f"request {request.request_id!r} missed its deadline")


async def _update(engine: Engine, weights: Mapping[str, Tensor], version: int) -> None:
    if getattr(engine, "updates_while_running", False):
        await engine.update_weights(weights, version)
        return
    async with _suspended(engine):
        await engine.update_weights(weights, version)


@asynccontextmanager
async def _suspended(engine: Engine) -> AsyncIterator[None]:
    await engine.suspend()
    try:
        yield
    finally:
        await engine.resume()
