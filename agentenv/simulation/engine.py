"""An inference engine of which only the time is modelled.

All active sequences decode side by side at one speed, which falls with their number (processor sharing): a token takes
``DecodeModel.token_s(active)`` seconds. Prompts cost nothing. A token is not a thing here: :class:`SimulatedEngine`
keeps the *work* done so far (tokens that each sequence active since the start would have by now), so that a sequence
ends when the work reaches a value known at its start, and one timer for the next end is all there is.

Invariants:

* What every engine keeps (:mod:`agentenv.inference.protocol`): an aborted request returns what it has; each token has
  the version that sampled it.
* A reply of n tokens holds ceil(n / ``tokens_per_id``) ids, the ids of its first, ``tokens_per_id``-th ... token.
* Nothing here costs time or memory per token.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentenv.errors import ModelError, UsageError
from agentenv.inference.protocol import FinishReason, Generation, GenerationRequest
from agentenv.simulation.environment import reply_tokens

if TYPE_CHECKING:
    from torch import Tensor

_LOGPROB = math.log(0.5)
_TOKEN_ID = 1
_CLOSED = "the simulated engine is closed"
_ROUNDING_TOKENS = 1e-6
_ROUNDING_S = 1e-8
"""Timers may come this much too early."""


@dataclass(frozen=True)
class DecodeModel:
    """Speed of an engine: ``base_s * max(1, active / knee)`` seconds a token.

    Up to ``knee`` sequences decode at full speed each (decoding is bound by reading the weights); with more of them the
    engine's total speed stays and they share it.
    """

    base_s: float = 0.0
    """Seconds a token takes at low load; 0: decoding takes no time."""
    knee: float = math.inf
    """Active sequences up to which none slows another down."""
    max_batch: int | None = None
    """Most sequences at once; others wait in order of arrival. None: no limit."""

    def __post_init__(self) -> None:
        checks = (
            ("base_s", self.base_s, self.base_s >= 0.0, ">= 0"),
            ("knee", self.knee, self.knee > 0.0, "> 0"),
            ("max_batch", self.max_batch, self.max_batch is None or self.max_batch >= 1, ">= 1"),
        )
        for name, value, valid, allowed in checks:
            if not valid:
                raise ValueError(f"DecodeModel.{name} is {value}, must be {allowed}")

    def token_s(self, active: int) -> float:
        """Seconds a token takes for each of ``active`` sequences."""
        return self.base_s * max(1.0, active / self.knee)

    def __str__(self) -> str:
        if not self.base_s:
            return "no decode time"
        knee = f" x max(1, active / {self.knee:g})" if self.knee < math.inf else ""
        limit = f", at most {self.max_batch} at once" if self.max_batch else ""
        return f"{self.base_s:g} s a token{knee}{limit}"


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request from its arrival to its end."""

    tokens: int
    """Length of the whole reply."""
    finish_reason: FinishReason
    sampled: asyncio.Future[float]
    """Set at the end: tokens sampled."""
    active: bool = False
    begun_work: float = 0.0
    """The engine's work when it became active."""


class SimulatedEngine:
    """Implements :class:`~agentenv.inference.protocol.Engine` with the running loop's clock.

    Args:
        model: speed; None: decoding takes no time.
        length: tokens of a request's whole reply; by default what :class:`SimulatedEnv` planned.
        tokens_per_id: simulated tokens per id of a :class:`Generation`.
    """

    def __init__(
        self,
        model: DecodeModel | None = None,
        *,
        length: Callable[[GenerationRequest], int] = reply_tokens,
        tokens_per_id: int = 1024,
    ) -> None:
        if tokens_per_id < 1:
            raise ValueError(f"tokens_per_id is {tokens_per_id}, must be at least 1")
        self.model = model or DecodeModel()
        self._length = length
        self._tokens_per_id = tokens_per_id
        self._version = 0
        self._updates: list[tuple[float, int]] = [(0.0, 0)]
        """(work, version): since when which version samples; as far back as any sequence."""
        self._work = 0.0
        self._work_at_s = 0.0
        self._sequences: dict[str, _Sequence] = {}
        self._queue: deque[_Sequence] = deque()
        self._ends: list[tuple[float, int, _Sequence]] = []
        """Heap of (work at the end, order, sequence); those that left before are dropped when they come up."""
        self._order = itertools.count()
        self._active = 0
        self._timer: asyncio.TimerHandle | None = None
        self._suspended = False
        self._closed = False
        self._is_away = False
        self._on_change: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        """Of the weights that the next token is sampled with."""
        return self._version

    @property
    def active(self) -> int:
        """Sequences being decoded."""
        return self._active

    async def generate(self, request: GenerationRequest) -> Generation:
        """Decode a reply; "length" if ``max_tokens`` ids cut it.

        Raises:
            UsageError: a request of this id is running.
            ModelError: closed.
        """
        if self._closed:
            raise ModelError(_CLOSED)
        if self._is_away:
            raise ModelError("the simulated engine is away")
        tokens = max(1, self._length(request))
        most = request.sampling.max_tokens * self._tokens_per_id
        reason: FinishReason = "stop" if tokens <= most else "length"
        tokens = min(tokens, most)
        if not self.model.base_s and not self._suspended:
            # One turn of the loop even if no time passes: real engines never answer within the call.
            await asyncio.sleep(0)
            return self._generation(self._work, tokens, reason)
        if request.request_id in self._sequences:
            raise UsageError(f"request {request.request_id!r} is running already")
        sequence = _Sequence(tokens, reason, asyncio.get_running_loop().create_future())
        self._sequences[request.request_id] = sequence
        self._queue.append(sequence)
        self._admit()
        try:
            sampled = await sequence.sampled
        finally:
            del self._sequences[request.request_id]
            self._leave(sequence)
        return self._generation(sequence.begun_work, sampled, sequence.finish_reason)

    async def abort(self, request_id: str) -> None:
        """Make the request's ``generate`` return what it has; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.sampled.done():
            self._advance()
            sequence.finish_reason = "abort"
            sampled = self._work - sequence.begun_work if sequence.active else 0.0
            sequence.sampled.set_result(min(sampled, sequence.tokens))
            self._leave(sequence)

    async def suspend(self) -> None:
        """Decode nothing until :meth:`resume`."""
        self._advance()
        self._suspended = True
        self._set_timer()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give ``version`` to the tokens from now on; takes no time, and the weights are not looked at."""
        self._advance()
        self._version = version
        self._updates.append((self._work, version))
        oldest = min(
            (item.begun_work for item in self._sequences.values() if item.active), default=self._work
        )
        del self._updates[: self._update_at(oldest)]

    async def resume(self) -> None:
        """Go on after :meth:`suspend`."""
        self._advance()
        self._suspended = False
        self._admit()
        self._set_timer()

    async def close(self) -> None:
        """Fail every waiting request; idempotent."""
        self._closed = True
        self._fail(_CLOSED)

    @property
    def is_away(self) -> bool:
        """It crashed and is not back."""
        return self._is_away

    def watch(self, on_change: Callable[[], None]) -> None:
        """Others serve while this one is away: call when it goes, and when it is back."""
        self._on_change = on_change

    def crash(self, away_s: float) -> None:
        """Fail every waiting request and be away for so long, as a server that is started anew."""
        self._is_away = True
        self._fail("the simulated engine crashed")
        self._on_change()
        asyncio.get_running_loop().call_later(away_s, self._return)

    def _return(self) -> None:
        self._is_away = False
        self._on_change()

    def _fail(self, why: str) -> None:
        for sequence in list(self._sequences.values()):
            if not sequence.sampled.done():
                sequence.sampled.set_exception(ModelError(why))
            self._leave(sequence)

    def _admit(self) -> None:
        """Begin what waits, as far as there is room."""
        limit = self.model.max_batch or math.inf
        if not self._queue or self._suspended or self._closed or self._active >= limit:
            return
        self._advance()
        while self._queue and self._active < limit:
            sequence = self._queue.popleft()
            if sequence.sampled.done():
                continue
            sequence.begun_work = self._work
            if not self.model.base_s:
                sequence.sampled.set_result(sequence.tokens)
                continue
            sequence.active = True
            self._active += 1
            heapq.heappush(self._ends, (self._work + sequence.tokens, next(self._order), sequence))
        self._set_timer()

    def _leave(self, sequence: _Sequence) -> None:
        """Give the place of a sequence that has ended to the next; idempotent."""
        if sequence.active:
            self._advance()
            sequence.active = False
            self._active -= 1
            self._admit()
            self._set_timer()

    def _advance(self) -> None:
        """Bring the work done to the present."""
        now = asyncio.get_running_loop().time()
        if self._active and not self._suspended:
            self._work += (now - self._work_at_s) / self.model.token_s(self._active)
        self._work_at_s = now

    def _set_timer(self) -> None:
        """Have the next end looked at in time. A timer that comes too early finds nothing and sets itself anew."""
        while self._ends and not self._ends[0][2].active:
            heapq.heappop(self._ends)
        if self._suspended or not self._ends:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        due = self._work_at_s + (self._ends[0][0] - self._work) * self.model.token_s(self._active)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        """End the sequences whose time has come."""
        self._timer = None
        self._advance()
        near = self._work + (_ROUNDING_S + 8.0 * math.ulp(self._work_at_s)) / self.model.token_s(self._active)
        ended = []
        while self._ends and (self._ends[0][0] <= near or not self._ends[0][2].active):
            sequence = heapq.heappop(self._ends)[2]
            if sequence.active:
                ended.append(sequence)
        for sequence in ended:
            sequence.active = False
            self._active -= 1
            if not sequence.sampled.done():
                sequence.sampled.set_result(sequence.tokens)
        self._admit()
        self._set_timer()

    def _update_at(self, work: float) -> int:
        """Index of the update that was in force at ``work``."""
        return max(0, bisect.bisect_right(self._updates, work, key=lambda update: update[0]) - 1)

    def _generation(self, begun_work: float, tokens: float, reason: FinishReason) -> Generation:
        ids = math.ceil(math.floor(tokens + _ROUNDING_TOKENS) / self._tokens_per_id)
        if self._update_at(begun_work) == len(self._updates) - 1:
            versions = [self._version] * ids
        else:
            places = (begun_work + number * self._tokens_per_id for number in range(ids))
            versions = [self._updates[self._update_at(place)][1] for place in places]
        return Generation([_TOKEN_ID] * ids, [_LOGPROB] * ids, versions, reason)
