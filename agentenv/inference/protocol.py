"""What an inference engine is: ids in, sampled ids with their log-probs and weight versions out.

Invariants every engine keeps:

* ``Generation.logprobs`` are those of the distribution that each token was really sampled from, after temperature,
  top-k, top-p and penalties, under the weights named by ``policy_versions``.
* An aborted request returns the tokens sampled so far with ``finish_reason="abort"``; it raises nothing.
* ``update_weights`` returns when every token sampled afterwards comes from the new weights.
* When the engine dies, every waiting and every later call raises :class:`~agentenv.errors.ModelError`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one turn. The defaults sample from the policy itself."""

    temperature: float = 1.0
    """0 is greedy: the log-prob is then 0.0, that of the point mass really sampled from."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already in the sequence; 1.0 is off."""
    max_tokens: int = 256
    """Most tokens of the turn."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the turn; the stop token is part of the turn's tokens."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, 0.0 <= self.temperature < math.inf, ">= 0 and finite"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0.0 < self.repetition_penalty < math.inf,
                "> 0 and finite",
            ),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, ">= 1"),
        )
        for name, value, valid, allowed in checks:
            if not valid:
                raise ValueError(f"SamplingParams.{name} is {value}, must be {allowed}")


class DistantPrompt(Sequence[int]):
    """A prompt whose ids another process has, which also sends it to the server.

    What the engine adds to it, the turn's tokens so far, is kept here. Only an engine that says
    ``takes_distant_prompts`` is given one.

    Args:
        length: tokens of it.
        ask: ``ask(server, more_ids, model, request_id, sampling, seed)`` has the other process send it, followed by
            more ids; its result is what the engine's own call of the server would return.
        more_ids: that follow.
    """

    def __init__(self, length: int, ask: Callable[..., Awaitable[Any]], more_ids: Sequence[int] = ()) -> None:
        self._length, self._ask, self._more_ids = length, ask, list(more_ids)

    def followed_by(self, token_ids: Sequence[int]) -> DistantPrompt:
        """The prompt and these."""
        return DistantPrompt(self._length, self._ask, [*self._more_ids, *token_ids])

    async def send(
        self, server: str, model: str, request_id: str, sampling: SamplingParams, seed: int | None
    ) -> Any:
        """Have the other process send it."""
        return await self._ask(server, self._more_ids, model, request_id, sampling, seed)

    def __len__(self) -> int:
        return self._length + len(self._more_ids)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the ids of this prompt are in another process")


@dataclass(frozen=True)
class GenerationRequest:
    """One turn of one episode."""

    request_id: str
    prompt_ids: list[int] | DistantPrompt
    """The whole sequence so far; engines find the part they already hold by ``episode_id``. The list is the
    conversation's own: it must not be changed, and what is kept after :meth:`Engine.generate` has ended is a copy."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    episode_id: str = ""
    """Requests of one episode share a prefix; empty: the request stands alone."""
    affinity: str = ""
    """Episodes of one affinity go to one engine; empty: each goes where there is least to do."""
    deadline: float | None = None
    """Time of the event loop's clock after which :class:`LLMProxy` gives the turn up; None: no deadline."""
    seed: int | None = None
    """Makes the sampled tokens a function of (weights, prompt, seed), whatever else runs in the batch."""


@dataclass
class Generation:
    """The tokens of one turn; the three lists have one length."""

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason


@runtime_checkable
class Engine(Protocol):
    """An inference engine. All methods are called from one asyncio loop."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn.

        Raises:
            UsageError: the request cannot be served (prompt too long, duplicate id).
            ModelError: the engine died or is closed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Make the request's ``generate`` return what it has; unknown or finished ids are ignored."""
        ...

    async def suspend(self) -> None:
        """Stop sampling after the current step; requests wait until :meth:`resume`."""
        ...

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Use these weights from the next token on."""
        ...

    async def resume(self) -> None:
        """Go on after :meth:`suspend`."""
        ...

    async def close(self) -> None:
        """End all requests and free everything; idempotent."""
        ...
