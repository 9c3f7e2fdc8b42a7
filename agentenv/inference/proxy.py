"""The one door to inference engines: routing, deadlines, aborts and weight updates for several engines as for one.

ROLL Flash's ADD is :meth:`LLMProxy.generate` for a coroutine, which goes on when its turn is complete, and
:meth:`LLMProxy.add` for a callback; its ABORT is :meth:`LLMProxy.abort`.

Invariants:

* An episode stays with the engine that holds its prefix; a new one goes to the engine with the fewest requests.
* No call waits longer than its deadline on an engine.
* An engine that is away or dead is out of service while others are in: its turns begin again at another, new ones go
  there, and no episode fails. It is in service again once it has the newest weights.
* After :meth:`LLMProxy.update_weights` every engine in service has the version, or the call raised.
* The run has lost its engines when all have died: :attr:`LLMProxy.error` says of what; requests raise ModelError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from agentenv.errors import AgentEnvError, EpisodeTimeoutError, ModelError, UsageError
from agentenv.inference.protocol import Engine, Generation, GenerationRequest
from agentenv.inference.routing import Router
from agentenv.trace import NO_TRACE, Trace, engine_track

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 10.0
_MOST_MOVES = 3
"""A turn that was at more engines as they went is one that kills them."""

OnDone = Callable[[GenerationRequest, Generation | BaseException], None]


class LLMProxy:
    """Several engines with the same weights behind the interface of one.

    Besides the :class:`~agentenv.inference.protocol.Engine` protocol it uses these attributes of an engine, where there
    are such: ``error`` (what it died of), ``watch(on_change)`` (it calls when it goes away, as ``is_away`` then says,
    and when it is back with the newest weights; updates do not wait for it meanwhile), ``release(episode_id)`` (the
    episode is over), ``updates_while_running`` (true if ``update_weights`` needs no ``suspend`` around it),
    ``expect_requests(number)`` (make no step with fewer) and ``servers`` (addresses to which another process may send
    prompts in its place).

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
        self._to_move: set[str] = set()
        """Requests that were aborted since their engine is away, and begin again at another."""
        self._moving: set[asyncio.Task[None]] = set()
        self._suspended = False
        self.restarted_tokens = 0
        """Tokens given up where an update, or the loss of an engine, restarted their turn."""
        self.engine_losses = 0
        """How often an engine went away or died."""
        self.moved_turns = 0
        """Turns that began again at another engine."""
        if len(self._engines) > 1:
            for index, engine in enumerate(self._engines):
                if (watch := getattr(engine, "watch", None)) is not None:
                    watch(partial(self._look_at, index))

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        return len(self._engines)

    @property
    def engines_in_service(self) -> int:
        """Engines that get requests."""
        return self._router.num_in

    @property
    def version(self) -> int:
        """The oldest version in use."""
        serving = [engine for index, engine in enumerate(self._engines) if not self._router.is_out(index)]
        return min(engine.version for engine in serving or self._engines)

    @property
    def error(self) -> BaseException | None:
        """What the first engine died of, once all are dead; None while one lives."""
        for index in range(len(self._engines)):
            self._look_at(index)
        errors = [_error_of(engine) for engine in self._engines]
        return errors[0] if all(error is not None for error in errors) else None

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
        self._serving[request.request_id] = self._begin(request)
        try:
            if request.deadline is None:
                return await self._sample(request)
            timeout = asyncio.timeout_at(request.deadline)
            try:
                async with timeout:
                    generation = await self._sample(request)
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise _missed(request) from error
            # Engines may watch the deadline themselves and answer it with an abort.
            if generation.finish_reason == "abort" and time() >= request.deadline:
                raise _missed(request)
            return generation
        finally:
            self._end(self._serving.pop(request.request_id))
            self._to_restart.discard(request.request_id)
            self._to_move.discard(request.request_id)
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
        self._to_move.discard(request_id)
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
        await self._gather({index: self._engines[index].suspend() for index in self._alive()})

    async def resume(self) -> None:
        """Go on sampling everywhere."""
        await self._gather({index: self._engines[index].resume() for index in self._alive()})
        self._suspended = False

    async def update_weights(
        self, weights: Mapping[str, Tensor], version: int, *, restart_turns: bool = False
    ) -> None:
        """Give all engines new weights, each suspended meanwhile if it has to be.

        An engine that is away gets them when it is back; one that dies of them is out of service, while others live.

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
            await self._update_all(weights, version)
            return
        self._updated.clear()
        try:
            self._to_restart.update(self._serving.keys() - self._aborted - self._to_move)
            serving: dict[int, list[str]] = {}
            for name, index in self._serving.items():
                serving.setdefault(index, []).append(name)
            await self._gather({index: self._abort_all(index, names) for index, names in serving.items()})
            await self._update_all(weights, version)
        finally:
            self._updated.set()

    async def close(self) -> None:
        """Close all engines; idempotent."""
        for task in [*self._added.values(), *self._moving]:
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

    async def _sample(self, request: GenerationRequest) -> Generation:
        """One turn, sampled again where an update restarts it, or where its engine goes away and another is there."""
        name, moves = request.request_id, 0
        while True:
            if not self._updated.is_set():
                await self._updated.wait()
            if name in self._aborted:
                return Generation([], [], [], "abort")
            index = self._serving[name]
            if self._router.is_out(index) and self._router.num_in:
                moves += 1
                if moves > _MOST_MOVES:
                    raise ModelError(f"request {name!r} was at {moves} engines as they went")
                self.moved_turns += 1
                self._end(index)
                index = self._serving[name] = self._begin(request)
            try:
                generation = await self._engines[index].generate(request)
            except Exception as error:
                self._look_at(index)
                if self._router.is_out(index) and self._router.num_in:
                    logger.info("request %s begins again at another engine: %s", name, error)
                    self._to_restart.discard(name)
                    self._to_move.discard(name)
                    continue
                if isinstance(error, AgentEnvError):
                    raise
                raise ModelError(f"engine {index} raised {type(error).__name__}: {error}") from error
            again = name in self._to_restart or name in self._to_move
            if generation.finish_reason != "abort" or not again:
                return generation
            self._to_restart.discard(name)
            self._to_move.discard(name)
            self.restarted_tokens += len(generation.token_ids)

    def _begin(self, request: GenerationRequest) -> int:
        now = asyncio.get_running_loop().time()
        return self._router.begin(request.episode_id, request.affinity, now)

    def _end(self, index: int) -> None:
        now = asyncio.get_running_loop().time()
        self._router.end(index, now)
        if not self._router.is_busy(index):
            self._trace_busy(index, now)

    def _look_at(self, index: int) -> None:
        """Take an engine out of service, or in again."""
        engine = self._engines[index]
        is_out = _error_of(engine) is not None or getattr(engine, "is_away", False)
        if is_out == self._router.is_out(index):
            return
        if not is_out:
            self._router.take_in(index)
            logger.warning("engine %d is in service again", index)
            if self._router.num_in == 1:  # turns wait at the others
                self._move_turns()
            return
        self._router.take_out(index)
        self.engine_losses += 1
        if self._router.num_in:
            logger.warning("engine %d is out of service: %d others go on", index, self._router.num_in)
            self._move_turns()

    def _move_turns(self) -> None:
        """Have the turns that are at engines out of service come back, to begin again at another."""
        for name, index in self._serving.items():
            engine = self._engines[index]
            if not self._router.is_out(index) or name in self._aborted or name in self._to_move:
                continue
            if _error_of(engine) is not None:
                continue  # it raises from their calls
            self._to_move.add(name)
            task = asyncio.create_task(engine.abort(name))
            self._moving.add(task)
            task.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a turn's abort at an engine that is away failed: %s", error)

    def _alive(self) -> list[int]:
        """Engines that have not died; all, where all have."""
        everyone = range(len(self._engines))
        return [index for index in everyone if _error_of(self._engines[index]) is None] or list(everyone)

    async def _abort_all(self, index: int, names: Sequence[str]) -> None:
        await asyncio.gather(*(self._engines[index].abort(name) for name in names))

    async def _update_all(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._gather(
            {index: self._update(self._engines[index], weights, version) for index in self._alive()}
        )

    async def _gather(self, calls: Mapping[int, Coroutine[Any, Any, None]]) -> None:
        """Await a call of each engine; what those raise that are out of service then is no error while one lives."""
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        have_all_died = self.error is not None  # it looks at all of them
        for index, error in zip(calls, results, strict=True):
            if isinstance(error, BaseException):
                if have_all_died or not self._router.is_out(index):
                    raise error
                logger.warning("engine %d went: %s", index, error)

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


def _error_of(engine: Engine) -> BaseException | None:
    error: BaseException | None = getattr(engine, "error", None)
    return error


def _missed(request: GenerationRequest) -> EpisodeTimeoutError:
    return EpisodeTimeoutError("generate", f"request {request.request_id!r} missed its deadline")
