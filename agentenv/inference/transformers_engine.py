"""Continuous batching of any transformers causal language model with standard attention, in one thread.

The engine keeps a slot of keys and values per episode over its turns, packs the new tokens of all rows (prompts,
observations, last sampled tokens) into one forward pass per step and samples all rows in one operation. Steps run in a
thread of the engine's own; results reach the asyncio loop in one callback per step.

Weights: two copies. An update is written into the copy that is not in use and the two are swapped between two steps,
so a running forward pass never sees a change. ``on_update`` says what a turn in flight does then:

* keep: it goes on with the new weights and the keys and values it has; each token carries its own version.
* finish: it ends on the old weights first; no turn starts meanwhile, and the update waits.

``stale_prefix`` says what the *next* turn of an episode does with keys and values of older weights: recompute them
(then a token's log-prob equals that of a plain forward pass of its version's weights wherever its turn saw no update)
or keep them. Recomputing is the default: for an embedded model of half a million parameters and 32 rows of 150 tokens
it costs 0.15 s of one core per update. The recorded log-prob is always that of the distribution really sampled from.

Invariants:

* Sampled tokens and log-probs of a request with a seed do not depend on what else is in the batch, up to rounding.
* Every request ends: stop, length, abort, or ModelError when the engine died or was closed.
* Memory is bounded by ``max_batch`` rows of ``max_length`` tokens.
* After :meth:`TransformersEngine.expect_requests` not even rounding depends on timing: which rows a step computes
  follows from the requests alone.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from agentenv.errors import ModelError, UsageError
from agentenv.inference.engine_model import copy_weights, engine_copy
from agentenv.inference.protocol import FinishReason, Generation, GenerationRequest
from agentenv.inference.ragged_attention import RaggedCache, RaggedStep, running
from agentenv.inference.sampling import draw
from agentenv.inference.slots import Slots

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0

_Result = TypeVar("_Result")


@dataclass
class _Ticket:
    """A request and who waits for it."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]


class TransformersEngine:
    """Engine over a transformers causal language model.

    Args:
        model: copied twice; the given one is left as it is and may be trained on.
        tokenizer: only its ``eos_token_id`` is used, which always ends a turn; None: no such token.
        max_batch: rows computed side by side, and episodes whose keys and values are kept.
        max_length: tokens of the longest sequence; None: the model's ``max_position_embeddings``.
        device: where the copies go; None: where the model is.
        on_update: what turns in flight do at a weight update, see the module docstring.
        stale_prefix: what later turns do with keys and values of older weights.
        max_prefill_tokens: prompt tokens computed per step besides the decoding rows; bounds a step's time and memory.
        seed: of the random numbers of requests without a seed.
        version: of the given weights.

    Raises:
        UsageError: the model does not route its attention through transformers' interface, or a forward pass through
            this engine's attention does not agree with the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_batch: int = 32,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        on_update: Literal["keep", "finish"] = "keep",
        stale_prefix: Literal["recompute", "keep"] = "recompute",
        max_prefill_tokens: int = 2048,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        for name, value, allowed in (
            ("on_update", on_update, ("keep", "finish")),
            ("stale_prefix", stale_prefix, ("recompute", "keep")),
        ):
            if value not in allowed:
                raise ValueError(f"TransformersEngine: {name} is {value!r}, must be one of {allowed}")
        if max_batch < 1 or max_prefill_tokens < 1:
            raise ValueError(
                f"TransformersEngine: max_batch {max_batch} and max_prefill_tokens {max_prefill_tokens} must be >= 1"
            )
        limit = getattr(model.config, "max_position_embeddings", None)
        self.max_length = int(max_length or limit or 4096)
        if limit is not None and self.max_length > limit:
            raise ValueError(
                f"TransformersEngine: max_length {max_length} exceeds the model's {limit} positions"
            )
        self.max_batch = max_batch
        self._device = torch.device(device) if device is not None else next(model.parameters()).device
        self._models = [engine_copy(model, self._device) for _ in range(2)]
        self._vocabulary = int(self._models[0].config.get_text_config().vocab_size)
        self._in_use = 0
        self._version = version
        self._on_update = on_update
        self._stale_prefix = stale_prefix
        self._max_prefill = max_prefill_tokens
        eos = getattr(tokenizer, "eos_token_id", None)
        self._eos: tuple[int, ...] = () if eos is None else (int(eos),)
        self._slots = Slots(max_batch, self.max_length)
        self._cache = RaggedCache(max_batch, self.max_length)
        self._seeds = itertools.count(seed * 1_000_003 + 1)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._models[0].forward).parameters
        self._weights_lock = asyncio.Lock()
        # Shared with the thread; the deque's own atomicity is enough while it runs, the condition wakes it from sleep.
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self.error: BaseException | None = None
        """What the engine died of."""
        # Below: touched by the thread alone.
        self._waiting: deque[_Ticket] = deque()
        self._expected = 0
        self._suspended = False
        self._drained: list[Callable[[], None]] = []
        self._finished: list[tuple[_Ticket, Generation]] = []
        self._counts = {"steps": 0, "sampled_tokens": 0, "prefill_tokens": 0, "reused_tokens": 0}
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="agentenv-transformers-engine", daemon=True)
        self._thread.start()

    updates_while_running = True
    """No suspend is needed around ``update_weights``."""

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn; see :class:`~agentenv.inference.protocol.Engine`."""
        if not request.prompt_ids:
            raise UsageError(f"request {request.request_id!r} has an empty prompt")
        if len(request.prompt_ids) >= self.max_length:
            raise UsageError(
                f"request {request.request_id!r}: a prompt of {len(request.prompt_ids)} tokens leaves no room below "
                f"max_length {self.max_length}"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            raise UsageError(
                f"request {request.request_id!r}: prompt ids range from {min(request.prompt_ids)} to "
                f"{max(request.prompt_ids)}, the model's vocabulary has {self._vocabulary} tokens"
            )
        loop = asyncio.get_running_loop()
        ticket = _Ticket(self._with_eos(request), loop, loop.create_future())
        self._post(lambda: self._waiting.append(ticket))
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._send(lambda: self._abort(request.request_id))
            raise

    async def abort(self, request_id: str) -> None:
        """Make the request return what it has; unknown ids are ignored."""
        self._send(lambda: self._abort(request_id))

    async def suspend(self) -> None:
        """Stop sampling after the current step (on_update "finish": after the turns in flight)."""

        def stop() -> None:
            self._suspended = True

        await self._do(stop, when_drained=self._on_update == "finish")

    async def resume(self) -> None:
        """Go on sampling."""

        def go() -> None:
            self._suspended = False

        await self._do(go)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Use these weights from the next step on; generation goes on while they are copied.

        Args:
            weights: a state dict of the model; tied weights may be left out.
            version: greater than or equal to the current one.

        Raises:
            UsageError: names or shapes do not fit, or the version goes back.
            ModelError: the engine died or is closed.
        """
        async with self._weights_lock:
            if version < self._version:
                raise UsageError(
                    f"update_weights: version {version} is older than the current {self._version}"
                )
            spare = 1 - self._in_use
            await asyncio.to_thread(copy_weights, self._models[spare], weights)

            def swap() -> None:
                self._in_use = spare
                self._version = version

            await self._do(swap, when_drained=self._on_update == "finish")

    async def release(self, episode_id: str) -> None:
        """The episode is over: its keys and values may go first."""
        self._send(lambda: self._slots.release(episode_id))

    def expect_requests(self, number: int) -> None:
        """Make no step while fewer requests than this are in; 0, as at first: wait for none.

        Requests that are in are then admitted in the order of their ids. A turn's end makes the engine wait for the
        next request, or for a lower number.
        """

        def expect() -> None:
            self._expected = number

        self._send(expect)

    async def close(self) -> None:
        """End all requests with ModelError and the thread with them; idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the engine's thread is still in a step after %g s", _CLOSE_TIMEOUT_S)

    def stats(self) -> dict[str, float]:
        """Totals since the start: steps, sampled, prefilled and reused tokens, seconds spent in steps."""
        return {**self._counts, "busy_s": self._busy_s}

    # -- from the loop's side ------------------------------------------------------------------------------------

    def _with_eos(self, request: GenerationRequest) -> GenerationRequest:
        stops = request.sampling.stop_token_ids
        if all(token in stops for token in self._eos):
            return request
        sampling = copy.copy(request.sampling)
        object.__setattr__(sampling, "stop_token_ids", (*stops, *self._eos))
        request = copy.copy(request)
        object.__setattr__(request, "sampling", sampling)
        return request

    def _post(self, command: Callable[[], None]) -> None:
        """Have the thread call this between two steps.

        Raises:
            ModelError: there is no thread any more.
        """
        with self._wake:
            if self.error is not None:
                raise ModelError(f"the engine died: {self.error!r}") from self.error
            if self._closed:
                raise ModelError("the engine is closed")
            self._inbox.append(command)
            self._wake.notify()

    def _send(self, command: Callable[[], None]) -> None:
        """As :meth:`_post`, for what is moot once the engine is gone."""
        try:
            self._post(command)
        except ModelError:
            logger.debug("command to an engine that is gone")

    async def _do(self, command: Callable[[], None], *, when_drained: bool = False) -> None:
        """Have the thread call this and wait; ``when_drained``: once no turn is in flight, starting none till then."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            command()
            _call_loop(loop, lambda: _resolve([(done, None)]))

        self._post((lambda: self._drained.append(call)) if when_drained else call)
        while True:
            finished, _ = await asyncio.wait({done}, timeout=0.2)
            if finished:
                return
            if not self._thread.is_alive():
                raise ModelError(f"the engine ended while a command waited: {self.error!r}") from self.error

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with torch.inference_mode():
                while self._prepare():
                    started = time.perf_counter()
                    self._step()
                    self._busy_s += time.perf_counter() - started
                    self._deliver()
        except BaseException as error:  # the thread ends here: whoever waits must learn why
            logger.exception("the engine's thread died")
            failure = error
        with self._wake:
            self.error = failure
            self._closed = True
        self._fail_everyone(failure)

    def _prepare(self) -> bool:
        """Take commands and admit requests until there is a step to make; False: closed."""
        while True:
            while self._inbox:
                self._inbox.popleft()()
            if self._closed:
                return False
            if self._drained and not self._slots.num_active:
                calls, self._drained = self._drained, []
                for call in calls:
                    call()
            is_complete = self._slots.num_active + len(self._waiting) >= self._expected
            if is_complete and not self._suspended and not self._drained:
                self._admit()
            self._deliver()
            # A draining engine runs its turns to their end even while suspended: the update waits for them.
            may_step = is_complete and (not self._suspended or bool(self._drained))
            if may_step and self._slots.num_active:
                return True
            with self._wake:
                if (
                    not self._inbox
                    and not self._closed
                    and not (self._drained and not self._slots.num_active)
                ):
                    self._wake.wait()

    def _admit(self) -> None:
        if self._expected and len(self._waiting) > 1:
            self._waiting = deque(sorted(self._waiting, key=lambda ticket: ticket.request.request_id))
        while self._waiting:
            ticket = self._waiting[0]
            request = ticket.request
            reused = self._slots.admit(
                request,
                ticket,
                version=self._version,
                seed=next(self._seeds) if request.seed is None else request.seed,
                allow_stale=self._stale_prefix == "keep",
            )
            if reused is None:
                return
            self._counts["reused_tokens"] += reused
            self._waiting.popleft()

    def _step(self) -> None:
        slots = self._slots
        work = slots.plan(self._max_prefill)
        self._cache.reserve(int((work.starts + work.counts).max()))
        step = RaggedStep.build(self._cache, work.slots, work.starts, work.counts, self._device)
        ids = torch.from_numpy(work.ids).to(self._device)[None]
        last = torch.from_numpy(work.last).to(self._device)
        options: dict[str, Any] = {"logits_to_keep": last} if self._keeps_logits else {}
        model = self._models[self._in_use]
        with running(step):
            logits = model(
                input_ids=ids, position_ids=step.positions[None], use_cache=False, **options
            ).logits[0]
        finished: list[tuple[int, FinishReason]]
        if len(work.complete):
            rows = work.slots[work.complete]
            sampling = slots.sampling_rows(rows)
            history = None
            if (sampling.repetition_penalty != 1.0).any():
                history = [slots.ids[slot, : slots.length[slot]] for slot in rows.tolist()]
            tokens, logprobs = draw(
                logits if self._keeps_logits else logits[last], sampling, slots.uniforms(rows), history
            )
            chosen = logprobs.cpu().numpy()
            if not np.isfinite(chosen).all():
                raise ModelError(f"weights of version {self._version} gave log-probs that are not finite")
            finished = slots.advance(work, tokens.cpu().numpy(), chosen, self._version)
        else:
            finished = slots.advance(work, np.zeros(0, np.int64), np.zeros(0, np.float32), self._version)
        for slot, reason in finished:
            self._finished.append(slots.finish(slot, reason))
        self._counts["steps"] += 1
        self._counts["sampled_tokens"] += len(work.complete)
        self._counts["prefill_tokens"] += len(work.ids) - len(work.complete)

    def _abort(self, request_id: str) -> None:
        for ticket in self._waiting:
            if ticket.request.request_id == request_id:
                self._waiting.remove(ticket)
                self._finished.append((ticket, Generation([], [], [], "abort")))
                return
        for slot, active in enumerate(self._slots.tickets):
            if active is not None and active.request.request_id == request_id:
                self._finished.append(self._slots.finish(slot, "abort"))
                return

    def _deliver(self) -> None:
        """Hand finished turns to their loops, one callback per loop."""
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        for loop in {id(ticket.loop): ticket.loop for ticket, _ in finished}.values():
            mine = [(ticket.future, generation) for ticket, generation in finished if ticket.loop is loop]
            _call_loop(loop, partial(_resolve, mine))

    def _fail_everyone(self, failure: BaseException | None) -> None:
        self._deliver()
        while self._inbox:  # requests that were posted but not seen
            self._inbox.popleft()()
        story = "the engine was closed" if failure is None else f"the engine died: {failure!r}"
        tickets = [*self._waiting, *(ticket for ticket in self._slots.tickets if ticket is not None)]
        for ticket in tickets:
            error = ModelError(story)
            error.__cause__ = failure
            _call_loop(ticket.loop, partial(_reject, ticket.future, error))


def _resolve(results: Sequence[tuple[asyncio.Future[_Result], _Result]]) -> None:
    for future, result in results:
        if not future.done():
            future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _call_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop is closed: nobody waits any more
        logger.debug("a result came after its event loop was closed")
