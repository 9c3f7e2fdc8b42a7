"""The one door to inference engines: routing, deadlines, aborts and weight updates for several engines as for one.

ROLL Flash's ADD is :meth:`LLMProxy.generate` for a coroutine, which goes on when its turn is complete, and
:meth:`LLMProxy.add` for a callback; its ABORT is :meth:`LLMProxy.abort`.

Invariants:

* An episode stays with the engine that holds its prefix; a new one goes to the engine with the fewest requests.
* No call waits longer than its deadline on an engine.
* After :meth:`LLMProxy.update_weights` every engine has the version, or the call raised.
* An engine that died is named by :attr:`LLMProxy.error`; requests to it raise ModelError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentenv.errors import AgentEnvError, EpisodeTimeoutError, ModelError, UsageError
from agentenv.inference.protocol import Engine, Generation, GenerationRequest
from agentenv.inference.routing import Router
from agentenv.trace import NO_TRACE, Trace, engine_track

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 10.0

OnDone = Callable[[GenerationRequest, Generation | BaseException], None]


class LLMProxy:
    """Several engines with the same weights behind the interface of one.

    Besides the :class:`~agentenv.inference.protocol.Engine` protocol five optional attributes of an engine are used:
    ``error`` (what it died of), ``release(episode_id)`` (the episode is over), ``updates_while_running`` (true if
    ``update_weights`` needs no ``suspend`` around it), ``expect_requests(number)`` (make no step with fewer) and
    ``servers`` (addresses to which another process may send prompts in its place).

    Args:
        engines: at least one. The proxy owns them: :meth:`close` closes them.
        trace: of the run, for the engines and for whatever plays with them.

    Raises:
        UsageError: no engine.
    """

    def __init__(self, engines: Sequence[Engine], *, trace: Trace = NO_TRACE) -> None:
        if not engines:
            raise UsageError("LLMProxy needs at least one engine, got none")
        self._engines = list(engines)
        self.trace = trace
        self._traced_until = [0.0] * len(self._engines)
        """Up to when the trace has each engine's busy time."""
        self._router = Router(len(self._engines))
        self._serving: dict[str, int] = {}
        """Engine of each request in flight."""
        self._to_restart: set[str] = set()
        """Requests that were aborted for an update and begin again after it."""
        self._updated = asyncio.Event()
        self._updated.set()
        self._aborted: set[str] = set()
        """Requests that were aborted while no engine had them."""
        self._added: dict[str, asyncio.Task[Generation]] = {}
        """Tasks of the requests in the background."""
        self._suspended = False
        self.restarted_tokens = 0
        """Tokens given up where an update restarted their turn."""

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        return len(self._engines)

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

    @property
    def servers(self) -> list[str]:
        """Addresses of all engines' servers, where each takes a DistantPrompt; else none."""
        servers = [list(getattr(engine, "servers", ())) for engine in self._engines]
        return [address for of_engine in servers for address in of_engine] if all(servers) else []

    @property
    def can_expect(self) -> bool:
        """Whether :meth:`expect_requests` works: one engine, and it knows how."""
        return len(self._engines) == 1 and hasattr(self._engines[0], "expect_requests")

    def expect_requests(self, number: int) -> None:
        """Have the engine make no step while fewer requests than this are in."""
        engine: Any = self._engines[0]
        engine.expect_requests(number)

    def busy_s(self) -> float:
        """Seconds that the engines had a request in flight, summed over them; of the event loop's clock."""
        return self._router.busy_s(asyncio.get_running_loop().time())

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn.

        Returns:
            the turn's tokens; after :meth:`abort` those sampled so far, with ``finish_reason`` "abort".

        Raises:
            EpisodeTimeoutError: ``request.deadline`` (of the event loop's clock) passed; the request was aborted.
            ModelError: the engine failed.
            UsageError: the engine cannot serve the request, or its id is in use.
        """
        if request.request_id in self._serving:
            raise UsageError(f"request id {request.request_id!r} is in use")
        time = asyncio.get_running_loop().time
        index = self._router.begin(request.episode_id, request.affinity, time())
        self._serving[request.request_id] = index
        try:
            if request.deadline is None:
                return await self._sample(index, request)
            timeout = asyncio.timeout_at(request.deadline)
            try:
                async with timeout:
                    generation = await self._sample(index, request)
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise _missed(request) from error
            # Engines may watch the deadline themselves and answer it with an abort.
            if generation.finish_reason == "abort" and time() >= request.deadline:
                raise _missed(request)
            return generation
        finally:
            now = time()
            self._router.end(index, now)
            if not self._router.is_busy(index):
                self._trace_busy(index, now)
            del self._serving[request.request_id]
            self._to_restart.discard(request.request_id)
            self._aborted.discard(request.request_id)

    def add(self, request: GenerationRequest, on_done: OnDone) -> None:
        """Sample one turn in the background.

        Args:
            request: as for :meth:`generate`; ``abort`` and the deadline work on it alike.
            on_done: called once in the event loop, with the request and its tokens, or with what :meth:`generate`
                raised (asyncio.CancelledError where the proxy was closed first).

        Raises:
            UsageError: the request's id is in use.
        """
        if request.request_id in self._added or request.request_id in self._serving:
            raise UsageError(f"request id {request.request_id!r} is in use")

        def finished(task: asyncio.Task[Generation]) -> None:
            del self._added[request.request_id]
            if task.cancelled():
                on_done(request, asyncio.CancelledError())
            else:
                on_done(request, task.exception() or task.result())

        task = asyncio.create_task(self.generate(request), name=request.request_id)
        self._added[request.request_id] = task
        task.add_done_callback(finished)

    async def abort(self, request_id: str) -> None:
        """Make the request's ``generate`` return its partial tokens; unknown ids are ignored."""
        self._to_restart.discard(request_id)
        if request_id in self._serving or request_id in self._added:
            self._aborted.add(request_id)
        index = self._serving.get(request_id)
        if index is not None:
            await self._engines[index].abort(request_id)

    async def release(self, episode_id: str) -> None:
        """The episode is over: its engine may drop its prefix."""
        index = self._router.release(episode_id)
        if index is not None:
            release = getattr(self._engines[index], "release", None)
            if release is not None:
                try:
                    async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                        await release(episode_id)
                except TimeoutError:
                    logger.warning("engine %d did not release episode %s", index, episode_id)

    async def suspend(self) -> None:
        """Stop sampling everywhere until :meth:`resume`, updates of the weights in between included."""
        self._suspended = True
        await asyncio.gather(*(engine.suspend() for engine in self._engines))

    async def resume(self) -> None:
        """Go on sampling everywhere."""
        await asyncio.gather(*(engine.resume() for engine in self._engines))
        self._suspended = False

    async def update_weights(
        self, weights: Mapping[str, Tensor], version: int, *, restart_turns: bool = False
    ) -> None:
        """Give all engines new weights, each suspended meanwhile if it has to be.

        Args:
            weights: as the engines take them.
            version: of these weights.
            restart_turns: turns being sampled begin again with the new weights; False: they keep their tokens, each
                with its own version, and go on.

        Raises:
            ModelError, UsageError: as the engines raise.
        """
        # A span of an engine's work ends with the weights that did it.
        now = asyncio.get_running_loop().time()
        for index in range(len(self._engines)):
            if self._router.is_busy(index):
                self._trace_busy(index, now)
        if not restart_turns:
            await asyncio.gather(*(self._update(engine, weights, version) for engine in self._engines))
            return
        self._updated.clear()
        try:
            self._to_restart.update(self._serving.keys() - self._aborted)
            await asyncio.gather(
                *(self._engines[index].abort(name) for name, index in list(self._serving.items()))
            )
            await asyncio.gather(*(self._update(engine, weights, version) for engine in self._engines))
        finally:
            self._updated.set()

    async def close(self) -> None:
        """Close all engines; idempotent."""
        for task in self._added.values():
            task.cancel()
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

    async def _sample(self, index: int, request: GenerationRequest) -> Generation:
        """One turn, sampled again where an update restarts it."""
        while True:
            if not self._updated.is_set():
                await self._updated.wait()
            if request.request_id in self._aborted:
                return Generation([], [], [], "abort")
            try:
                generation = await self._engines[index].generate(request)
            except AgentEnvError:
                raise
            except Exception as error:
                raise ModelError(f"engine {index} raised {type(error).__name__}: {error}") from error
            if generation.finish_reason != "abort" or request.request_id not in self._to_restart:
                return generation
            self._to_restart.discard(request.request_id)
            self.restarted_tokens += len(generation.token_ids)

    def _trace_busy(self, index: int, now: float) -> None:
        since = max(self._router.busy_since(index), self._traced_until[index])
        self.trace.span(engine_track(index), "busy", since, now, version=self._engines[index].version)
        self._traced_until[index] = now

    async def _update(self, engine: Engine, weights: Mapping[str, Tensor], version: int) -> None:
        if self._suspended or getattr(engine, "updates_while_running", False):
            await engine.update_weights(weights, version)
            return
        try:
            await engine.suspend()
            await engine.update_weights(weights, version)
        finally:
            resuming = asyncio.ensure_future(engine.resume())
            try:
                await asyncio.shield(resuming)
            except asyncio.CancelledError:
                # An engine that stayed suspended would hold up every episode that lives with it.
                await resuming
                raise


def _missed(request: GenerationRequest) -> EpisodeTimeoutError:
    return EpisodeTimeoutError("generate", f"request {request.request_id!r} missed its deadline")
