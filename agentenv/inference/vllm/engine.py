"""The engine over a vLLM, in another process or in this one.

A weight update aborts what is being sampled, loads, and samples on from the tokens that each turn has: all keys and
values are then those of the new weights, and every token's log-prob is that of a forward pass under its version.
Requests that vLLM keeps across an update go on with keys of the old weights, up to 0.19 off in log-prob.

Invariants:

* No request is at vLLM while its weights change; a token's version is the one that its request was sent under.
* After an update the log-probs of a probe are those of the trainer's weights, or the engine is dead.
* A vLLM that comes back is given the newest weights before any request.
* Where others serve meanwhile (:meth:`VLLMEngine.watch`), an update does not wait for a vLLM that is away or does not
  take its weights in time, and one that answers no call has gone.
* What a lost vLLM was sampling is sampled again, from the tokens that its turn had before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from agentenv.errors import ModelError, UsageError
from agentenv.inference.protocol import DistantPrompt, Generation, GenerationRequest
from agentenv.inference.vllm.backend import Backend, Completion
from agentenv.inference.vllm.json_http import ConnectionLostError, NoAnswerError
from agentenv.inference.weight_sync import Publication, WeightSync

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VLLMEngine"]

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 60.0
_CACHE_TIMEOUT_S = 30.0
_MOST_LOSSES = 3
"""A turn that was at so many vLLMs as they went is one that kills them."""
_SEED_STEP = 1_000_003


@dataclass(eq=False)
class _Turn:
    request: GenerationRequest
    is_aborted: bool = False
    losses: int = 0
    piece_id: str = ""
    """Of its request at vLLM; a turn that an update interrupts needs several."""
    piece: asyncio.Task[Completion] | None = None
    waiter: asyncio.Future[None] | None = None
    """Waits to be let to vLLM."""
    generation: Generation = field(default_factory=lambda: Generation([], [], [], "abort"))


class VLLMEngine:
    """Implements :class:`agentenv.inference.Engine`.

    Args:
        backend: the vLLM; the engine owns it.
        weight_sync: brings it weights; may serve several engines.
        eos_token_ids: end a turn, besides those of the request.
        max_length: most tokens of a sequence; None: as many as vLLM takes.
        max_requests: most requests at vLLM at a time, the others wait here; None: no limit.
        restart_timeout_s: how long a vLLM that has gone may stay away.
        hang_timeout_s: how long one may give no answer at all before it counts as gone.
        update_timeout_s: how long one may take for new weights before it counts as gone, where others serve meanwhile.
        heartbeat_s: how often it is asked.

    Raises:
        UsageError: ``max_length`` is beyond vLLM's, or a number is out of range.
    """

    updates_while_running = True
    """No suspend is needed around ``update_weights``."""

    def __init__(
        self,
        backend: Backend,
        weight_sync: WeightSync,
        *,
        eos_token_ids: Sequence[int] = (),
        max_length: int | None = None,
        max_requests: int | None = None,
        restart_timeout_s: float = 600.0,
        hang_timeout_s: float = 120.0,
        update_timeout_s: float = 200.0,
        heartbeat_s: float = 1.0,
    ) -> None:
        if max_length is not None and max_length > backend.max_length:
            raise UsageError(
                f"{backend.name} takes sequences of {backend.max_length} tokens, {max_length} are needed: start it "
                f"with --max-model-len {max_length}"
            )
        for name, value in (
            ("max_requests", max_requests),
            ("restart_timeout_s", restart_timeout_s),
            ("hang_timeout_s", hang_timeout_s),
            ("update_timeout_s", update_timeout_s),
            ("heartbeat_s", heartbeat_s),
        ):
            if value is not None and not value > 0:
                raise UsageError(f"VLLMEngine: {name} is {value}, must be above 0")
        self.max_length = max_length or backend.max_length
        self.error: BaseException | None = None
        """What the engine died of."""
        self._backend, self._weight_sync = backend, weight_sync
        self._eos = tuple(eos_token_ids)
        self._max_requests = max_requests
        self._restart_timeout_s, self._hang_timeout_s = restart_timeout_s, hang_timeout_s
        self._heartbeat_s, self._update_timeout_s = heartbeat_s, update_timeout_s
        self._on_change: Callable[[], None] | None = None
        self._version = 0
        self._loaded: Publication | None = None
        """Weights that vLLM was given since it was last lost."""
        self._turns: dict[str, _Turn] = {}
        self._num_pieces = 0
        self._is_suspended = self._is_updating = self._is_closed = False
        self._update_lock, self._load_lock = asyncio.Lock(), asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._piece_ids = map(f"agentenv-{uuid.uuid4().hex[:12]}-{{}}".format, itertools.count())
        names = ("requests", "sampled_tokens", "prompt_tokens", "interrupted_turns", "lost_servers")
        self._counts = dict.fromkeys(names, 0)

    @property
    def name(self) -> str:
        """Of its vLLM: a server's address."""
        return self._backend.name

    @property
    def servers(self) -> list[str]:
        """Address of its server, where another process may send it prompts (``DistantPrompt``); else none."""
        return [self._backend.name] if self._backend.takes_distant_prompts else []

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def is_away(self) -> bool:
        """Its vLLM has gone, and is not back with the newest weights."""
        return self._recovery is not None

    def watch(self, on_change: Callable[[], None]) -> None:
        """Others serve while this one is away: call when it goes, and when it is back or dead."""
        self._on_change = on_change

    def stats(self) -> dict[str, float]:
        """Totals: requests to vLLM, their sampled and prompt tokens, turns interrupted by updates, lost vLLMs."""
        return {name: float(count) for name, count in self._counts.items()}

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn; see :class:`~agentenv.inference.protocol.Engine`."""
        room = self.max_length - len(request.prompt_ids)
        if not request.prompt_ids or room < 1:
            raise UsageError(
                f"request {request.request_id!r}: a prompt of {len(request.prompt_ids)} tokens must have at least one "
                f"and leave room below max_length {self.max_length}"
            )
        if request.request_id in self._turns:
            raise UsageError(f"request id {request.request_id!r} is in use")
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_watch())
        turn = _Turn(request)
        self._turns[request.request_id] = turn
        try:
            await self._sample(turn, min(request.sampling.max_tokens, room))
        finally:
            del self._turns[request.request_id]
        return turn.generation

    async def abort(self, request_id: str) -> None:
        """Make the request return what it has; unknown ids are ignored."""
        turn = self._turns.get(request_id)
        if turn is not None:
            turn.is_aborted = True
            self._let_in()
            await self._end_pieces([turn])

    async def suspend(self) -> None:
        """Stop sampling after the current step; vLLM keeps its requests."""
        self._raise_if_dead()
        self._is_suspended = True
        await self._unless_lost(self._backend.pause)

    async def resume(self) -> None:
        """Go on sampling."""
        self._raise_if_dead()
        await self._unless_lost(self._backend.resume)
        self._is_suspended = False
        self._let_in()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Use these weights from the next token on; turns go on from the tokens they have.

        Args:
            weights: a state dict of the model; tied weights may be left out.
            version: greater than or equal to the current one.

        Raises:
            UsageError: names or shapes do not fit, or the version goes back.
            ModelError: vLLM did not take them, the probe differs, or the engine died.
        """
        async with self._update_lock:
            self._raise_if_dead()
            if version < self._version:
                raise UsageError(
                    f"update_weights: version {version} is older than the current {self._version}"
                )
            await self._weight_sync.publish(weights, version)
            self._loaded, self._is_updating = None, True
            timeout = asyncio.timeout(self._update_timeout_s if self._on_change is not None else None)
            try:
                self._counts["interrupted_turns"] += self._num_pieces
                async with timeout:
                    await self._update()
            except BaseException as error:
                if isinstance(error, TimeoutError) and timeout.expired():
                    logger.warning(
                        "%s did not take weights within %g s", self._backend.name, self._update_timeout_s
                    )
                    self._lose()
                    return
                # What vLLM holds now is unknown: half of the weights, or tokens of the wrong version.
                self._die(
                    error if isinstance(error, ModelError) else ModelError(f"update_weights: {error!r}")
                )
                raise
            finally:
                self._is_updating = False
                self._let_in()

    async def _update(self) -> None:
        """Load what was published last; not into a vLLM that is away, where others serve meanwhile."""
        await self._end_pieces(self._turns.values())
        while self._loaded is None:
            self._raise_if_dead()
            if self._recovery is None:
                await self._unless_lost(self._load)
            elif self._on_change is not None:
                return
            else:
                await asyncio.wait({self._recovery})

    async def close(self) -> None:
        """End all requests with ModelError; idempotent."""
        self._is_closed = True
        tasks = [task for task in (self._watch, self._recovery) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._drop_pieces()
        self._let_in()
        await asyncio.sleep(0)
        await self._backend.close()
        await self._weight_sync.close()

    # -- a turn --------------------------------------------------------------------------------------------------

    async def _sample(self, turn: _Turn, most: int) -> None:
        """Fill the turn's generation with up to ``most`` tokens."""
        request, generation = turn.request, turn.generation
        stops = tuple(dict.fromkeys((*request.sampling.stop_token_ids, *self._eos)))
        while True:
            await self._enter(turn)
            done = len(generation.token_ids)
            if turn.is_aborted or done >= most:
                generation.finish_reason = "length" if done >= most else "abort"
                return
            version = self._version
            turn.piece_id = next(self._piece_ids)
            prompt = request.prompt_ids
            turn.piece = asyncio.create_task(
                self._backend.complete(
                    turn.piece_id,
                    prompt.followed_by(generation.token_ids)
                    if isinstance(prompt, DistantPrompt)
                    else [*prompt, *generation.token_ids],
                    replace(request.sampling, max_tokens=most - done, stop_token_ids=stops),
                    None if request.seed is None else (request.seed + _SEED_STEP * done) % 2**63,
                )
            )
            completion = await self._piece_of(turn)
            if completion is None:
                continue
            self._counts["requests"] += 1
            self._counts["sampled_tokens"] += len(completion.token_ids)
            self._counts["prompt_tokens"] += len(request.prompt_ids) + done
            is_greedy = request.sampling.temperature == 0.0
            generation.token_ids += completion.token_ids
            generation.logprobs += [0.0] * len(completion.token_ids) if is_greedy else completion.logprobs
            generation.policy_versions += [version] * len(completion.token_ids)
            if completion.finish_reason != "abort":
                generation.finish_reason = completion.finish_reason
                return

    async def _piece_of(self, turn: _Turn) -> Completion | None:
        """The end of the turn's request at vLLM; None: it was lost with its vLLM."""
        piece = turn.piece
        assert piece is not None
        losses = self._counts["lost_servers"]
        self._num_pieces += 1
        try:
            await asyncio.wait({piece})
        except asyncio.CancelledError:
            piece.cancel()
            raise
        finally:
            turn.piece = None
            self._num_pieces -= 1
            self._let_in()
        error = None if piece.cancelled() else piece.exception()
        if piece.cancelled() or isinstance(error, ConnectionLostError):
            if error is not None and self._counts["lost_servers"] == losses:
                self._lose()
            self._raise_if_dead()
            turn.losses += 1
            if turn.losses >= _MOST_LOSSES:
                raise ModelError(
                    f"{self._backend.name} was lost {turn.losses} times during request {turn.request.request_id!r}"
                ) from error
            return None
        if error is not None:
            raise error
        return piece.result()

    async def _enter(self, turn: _Turn) -> None:
        """Wait until the turn may go to vLLM, or is aborted."""
        while True:
            self._raise_if_dead()
            is_open = not (self._is_suspended or self._is_updating or self._recovery is not None)
            if turn.is_aborted or (
                is_open and (self._max_requests is None or self._num_pieces < self._max_requests)
            ):
                return
            turn.waiter = asyncio.get_running_loop().create_future()
            try:
                await turn.waiter
            finally:
                turn.waiter = None

    def _let_in(self) -> None:
        """Have waiting turns look again."""
        for turn in self._turns.values():
            if turn.waiter is not None and not turn.waiter.done():
                turn.waiter.set_result(None)

    async def _end_pieces(self, turns: Iterable[_Turn]) -> None:
        """Abort the requests of turns and wait for their ends; asked again, since a request may still be on its way."""
        pieces = {turn.piece: turn.piece_id for turn in turns if turn.piece is not None}
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + _ABORT_TIMEOUT_S, 0.02
        while waiting := {piece: name for piece, name in pieces.items() if not piece.done()}:
            if loop.time() > deadline:
                why = (
                    f"{self._backend.name} did not end {len(waiting)} requests within {_ABORT_TIMEOUT_S:g} s"
                )
                if self._on_change is None:
                    raise ModelError(why)
                logger.warning(why)
                self._lose()
            await self._unless_lost(partial(self._backend.abort, list(waiting.values())))
            await asyncio.wait(waiting, timeout=pause_s)
            pause_s = min(2.0 * pause_s, 1.0)

    def _drop_pieces(self) -> None:
        for turn in self._turns.values():
            if turn.piece is not None:
                turn.piece.cancel()

    # -- vLLM's life ---------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Give vLLM, at which no request is, the newest weights."""
        async with self._load_lock:
            while True:
                publication = await self._weight_sync.settled()
                if publication is None or self._loaded is publication:
                    return  # None: those that vLLM starts with are right
                try:
                    await self._load_published()
                except ConnectionLostError:
                    raise
                except ModelError:
                    if self._weight_sync.publication is publication:
                        raise
                    continue  # the probe's log-probs are of weights published after the load
                if self._weight_sync.publication is publication:
                    self._version, self._loaded = publication.version, publication
                    return

    async def _load_published(self) -> None:
        if self._is_suspended:
            await self._backend.resume()  # the probe's request; no other is let in
        await self._weight_sync.load(self._backend)
        deadline = asyncio.get_running_loop().time() + _CACHE_TIMEOUT_S
        while not await self._backend.reset_prefix_cache():
            if asyncio.get_running_loop().time() > deadline:
                raise ModelError(f"{self._backend.name} did not empty its prefix cache: requests hold it")
            await asyncio.sleep(0.05)
        await self._weight_sync.check(self._backend)

    async def _unless_lost(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call vLLM; where it has gone, that is noted and not raised."""
        if self._recovery is None:
            try:
                await call()
            except ModelError as error:
                if not self._is_loss(error):
                    raise
                logger.warning(error)
                self._lose()

    def _is_loss(self, error: ModelError) -> bool:
        """vLLM has gone; where others serve meanwhile, one that does not answer has, too."""
        return isinstance(error, ConnectionLostError) or (
            self._on_change is not None and isinstance(error, NoAnswerError)
        )

    def _lose(self) -> None:
        """vLLM has gone: nothing is sent until it is back with the newest weights."""
        if self._recovery is None and not self._is_closed and self.error is None:
            logger.warning(
                "%s was lost; waiting up to %g s for it", self._backend.name, self._restart_timeout_s
            )
            self._counts["lost_servers"] += 1
            self._loaded = None
            self._recovery = asyncio.create_task(self._recover())
            self._drop_pieces()
            self._tell()

    async def _recover(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._restart_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        await self._backend.recover(deadline)
                        await self._load()
                        break
                    except ModelError as error:
                        if not self._is_loss(error):
                            raise
                        logger.warning("%s went again: %s", self._backend.name, error)
                        await asyncio.sleep(min(1.0, self._heartbeat_s))
            logger.warning("%s is back with weights of version %d", self._backend.name, self._version)
        except Exception as error:
            why = str(error) or f"it did not come back within {self._restart_timeout_s:g} s"
            died = ModelError(f"{self._backend.name} was lost: {why}")
            died.__cause__ = error
            self._die(died)
        finally:
            self._recovery = None
            self._let_in()
            self._tell()

    async def _keep_watch(self) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while self.error is None:
            await asyncio.sleep(self._heartbeat_s)
            if self._recovery is not None:
                answered = loop.time()
                continue
            try:
                is_alive = await self._backend.is_alive()
                answered = loop.time() if is_alive else answered
            except TimeoutError:
                is_alive = loop.time() - answered < self._hang_timeout_s
            if not is_alive:
                self._lose()

    def _die(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._drop_pieces()
        self._let_in()
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None and not self._is_closed:
            self._on_change()

    def _raise_if_dead(self) -> None:
        if self.error is not None:
            raise ModelError(f"the engine died: {self.error}") from self.error
        if self._is_closed:
            raise ModelError("the engine is closed")
