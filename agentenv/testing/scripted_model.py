"""An inference engine whose replies are written down beforehand.

Invariants (those of `agentenv.inference.Engine`):
- Each token carries the version that was current when it was emitted.
- An aborted request returns what it has so far with finish_reason "abort".
- A closed model raises `ModelError` from every waiting and every later call.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentenv.errors import ModelError, UsageError
from agentenv.inference import FinishReason, Generation, GenerationRequest
from agentenv.testing.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ScriptedModel"]

Reply = str | Sequence[int]


class _Running:
    """A request in flight: woken whenever the model's state or its own changes."""

    def __init__(self) -> None:
        self.aborted = False
        self.wake = asyncio.Event()


class ScriptedModel:
    """Answers the i-th request of every episode with the i-th response.

    Args:
        responses: texts or token ids, one per turn; or a function of the request. A text is encoded, and the
            tokenizer's end-of-sequence id is added; ids are taken as they are.
        tokenizer: encodes texts; `ByteTokenizer` by default.
        logprob: log-prob of every token, in nats.
        token_s: seconds that a token takes; 0: a reply comes at once.
        repeat: begin again after the last response instead of failing.

    Raises:
        UsageError: no responses, `logprob` above 0 or `token_s` below 0.
    """

    def __init__(
        self,
        responses: Sequence[Reply] | Callable[[GenerationRequest], Reply],
        *,
        tokenizer: Any = None,
        logprob: float = math.log(0.5),
        token_s: float = 0.0,
        repeat: bool = False,
    ) -> None:
        if isinstance(responses, str) or (not callable(responses) and not responses):
            raise UsageError(
                f"responses must be a non-empty list of texts or ids, or a function, got {responses!r}"
            )
        if not logprob <= 0.0:
            raise UsageError(f"logprob must be 0 or less, got {logprob}")
        if not token_s >= 0.0:
            raise UsageError(f"token_s must be 0 or more, got {token_s}")
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.requests: list[GenerationRequest] = []
        """Every request that was accepted, in order."""
        self.updates: list[int] = []
        """Versions that `update_weights` was called with, in order."""
        self._responses = responses if callable(responses) else list(responses)
        self._logprob = logprob
        self._token_s = token_s
        self._repeat = repeat
        self._turns: dict[str, int] = {}
        self._running: dict[str, _Running] = {}
        self._version = 0
        self._suspended = False
        self._closed = False

    @property
    def version(self) -> int:
        """Version given to the next token."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Reply to one turn, a token every `token_s` seconds; "length" if `max_tokens` cuts the reply.

        Raises:
            UsageError: a request of this id is running.
            ModelError: the script has no response for this turn, or the model is closed.
        """
        self._check_open()
        if request.request_id in self._running:
            raise UsageError(f"request {request.request_id!r} is running already")
        reply = self._next_reply(request)
        self.requests.append(dataclasses.replace(request, prompt_ids=list(request.prompt_ids)))
        cut = reply[: request.sampling.max_tokens]
        finish: FinishReason = "stop" if len(cut) == len(reply) else "length"
        generation = Generation([], [], [], finish)
        running = self._running[request.request_id] = _Running()
        try:
            # One turn of the loop even if no time passes: real engines never answer within the call.
            await asyncio.sleep(0)
            for token in cut:
                if not await self._may_go_on(running, request.deadline):
                    generation.finish_reason = "abort"
                    break
                generation.token_ids.append(token)
                generation.logprobs.append(self._logprob)
                generation.policy_versions.append(self._version)
        finally:
            del self._running[request.request_id]
        return generation

    async def abort(self, request_id: str) -> None:
        """Make the request return what it has; unknown ids are ignored."""
        running = self._running.get(request_id)
        if running is not None:
            running.aborted = True
            running.wake.set()

    async def suspend(self) -> None:
        """Emit no token until `resume`."""
        self._check_open()
        self._suspended = True

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Give `version` to the tokens from now on; the weights are not looked at."""
        self._check_open()
        self._version = version
        self.updates.append(version)

    async def resume(self) -> None:
        """Go on after `suspend`."""
        self._check_open()
        self._suspended = False
        self._wake_all()

    async def close(self) -> None:
        """Fail every waiting request; idempotent."""
        self._closed = True
        self._wake_all()

    def _next_reply(self, request: GenerationRequest) -> list[int]:
        if callable(self._responses):
            reply = self._responses(request)
        else:
            turn = self._turns.get(request.episode_id, 0)
            if turn >= len(self._responses) and not self._repeat:
                raise ModelError(
                    f"the script has {len(self._responses)} responses, "
                    f"and episode {request.episode_id!r} asks for number {turn + 1}"
                )
            self._turns[request.episode_id] = turn + 1
            reply = self._responses[turn % len(self._responses)]
        if not isinstance(reply, str):
            return [int(token) for token in reply]
        end = self.tokenizer.eos_token_id
        return [*self.tokenizer.encode(reply, add_special_tokens=False), *([] if end is None else [int(end)])]

    async def _may_go_on(self, running: _Running, deadline: float | None) -> bool:
        """Wait for a token's time and for `resume`; False when the request was aborted or ran out of time."""
        clock = asyncio.get_running_loop().time
        ready_at = clock() + self._token_s
        while True:
            self._check_open()
            now = clock()
            if running.aborted or (deadline is not None and now >= deadline):
                return False
            if now >= ready_at and not self._suspended:
                return True
            until = [] if self._suspended else [ready_at]
            until += [] if deadline is None else [deadline]
            running.wake.clear()
            try:
                async with asyncio.timeout(max(0.0, min(until) - now) if until else None):
                    await running.wake.wait()
            except TimeoutError:
                pass  # the loop's head decides which of the two times has come

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the scripted model is closed")

    def _wake_all(self) -> None:
        for running in self._running.values():
            running.wake.set()
