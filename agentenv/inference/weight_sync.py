"""Weights of one version for all engines: checked, published once, loaded, and seen to have arrived.

Invariants:

* Engines that are given the same weights at the same time share one publication.
* Weights have arrived where an engine's log-probs of a fixed sequence are those of a forward pass with them.
* :meth:`WeightSync.load` and :meth:`WeightSync.check` are of the same weights only if no publication began meanwhile:
  whoever calls them compares ``publication`` before and after.
* Where an adapter alone is sent, the probe still tells whether an engine's model and the adapter together compute what
  the merged weights do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentenv.errors import ModelError
from agentenv.inference.adapters import AdaptedWeights
from agentenv.inference.model_skeleton import ModelSkeleton
from agentenv.inference.weight_transfer import Receiver, WeightTransfer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Publication", "ScoringReceiver", "WeightSync", "probe_tolerance"]

_PROBE_TOKENS = 32


class ScoringReceiver(Receiver, Protocol):
    """Takes weights and tells log-probs under them."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, under the weights in use, from no cache."""
        ...

    async def drop_adapter(self) -> None:
        """Sample with the model's own weights again."""
        ...


@dataclass(frozen=True, eq=False)
class Publication:
    """Weights that engines can load; one is equal to itself alone."""

    version: int


def probe_tolerance(dtype: str) -> float:
    """Largest mean difference of log-probs that is rounding, where either side computes in ``dtype``."""
    return 3e-4 if dtype in ("float32", "float64") else 0.05


class WeightSync:
    """Brings weights to engines.

    Args:
        skeleton: of the model.
        transfer: the way; owned.
        tolerance: largest mean absolute difference of the probe's log-probs; None: by the model's type.
        adapters_only: of AdaptedWeights send the adapter alone.
    """

    def __init__(
        self,
        skeleton: ModelSkeleton,
        transfer: WeightTransfer,
        *,
        tolerance: float | None = None,
        adapters_only: bool = False,
    ) -> None:
        dtype = str(skeleton.dtype).removeprefix("torch.")
        self.tolerance = probe_tolerance(dtype) if tolerance is None else tolerance
        self._skeleton, self._transfer = skeleton, transfer
        self.adapters_only = adapters_only
        """May be changed before the first publication."""
        ids = np.random.default_rng(0).integers(0, skeleton.vocab_size, _PROBE_TOKENS)
        self.probe_ids: list[int] = ids.tolist()
        self._lock = asyncio.Lock()
        self._callers = 0
        self._published: Mapping[str, Tensor] | None = None
        """The mapping itself: kept while callers that may bring the same one are in."""
        self._expected: list[float] = []
        self.publication: Publication | None = None
        """The newest, complete or not; None: there are no weights to load."""

    def expected(self, weights: Mapping[str, Tensor]) -> list[float]:
        """The probe's log-probs under weights."""
        return self._skeleton.logprobs(weights, self.probe_ids)

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Make these the weights that :meth:`load` gives.

        Raises:
            UsageError: they are none of the model.
            ModelError: there is no room for them.
        """
        self._callers += 1
        try:
            async with self._lock:
                if self._published is weights:
                    return
                self._skeleton.check(weights)
                former, self._published = self.publication, None
                self.publication = Publication(version)
                try:
                    await self._send(weights, f"policy-v{version}")
                    self._expected = await asyncio.to_thread(self.expected, weights)
                except BaseException:
                    self.publication = former
                    raise
                self._published = weights
        finally:
            self._callers -= 1
            if not self._callers:
                self._published = None

    async def settled(self) -> Publication | None:
        """The newest publication, once it is complete."""
        async with self._lock:
            return self.publication

    async def load(self, receiver: ScoringReceiver) -> None:
        """Give an engine the weights that were published last.

        Raises:
            ConnectionLostError: the engine has gone.
            ModelError: it did not take them.
        """
        await self._transfer.load(receiver)

    async def try_adapter(self, receiver: ScoringReceiver, weights: AdaptedWeights) -> None:
        """Whether an engine that has the model's weights can serve adapters such as this one; it has none afterwards.

        Raises:
            ConnectionLostError: the engine has gone.
            ModelError: it does not take it, or computes something else with it.
        """
        async with self._lock:
            self._skeleton.check(weights)
            await self._send(weights, "policy-trial")
            try:
                await self.load(receiver)
                self._expected = await asyncio.to_thread(self.expected, weights)
                await self.check(receiver)
            finally:
                await receiver.drop_adapter()

    async def check(self, receiver: ScoringReceiver) -> None:
        """Whether the weights have arrived.

        Raises:
            ModelError: the engine's log-probs are others.
        """
        difference = await self.difference(receiver, self._expected)
        if not difference <= self.tolerance:  # not finite neither
            raise ModelError(
                f"{receiver.name} does not have the trainer's weights: log-probs of a probe differ by {difference:.2g} "
                f"on average after the update, allowed is {self.tolerance:g}"
            )

    async def difference(self, receiver: ScoringReceiver, expected: Sequence[float]) -> float:
        """Mean absolute difference of an engine's log-probs of the probe to those expected."""
        scores = await receiver.score(self.probe_ids)
        return float(np.mean(np.abs(np.subtract(scores, expected))))

    async def _send(self, weights: Mapping[str, Tensor], name: str) -> None:
        if self.adapters_only and isinstance(weights, AdaptedWeights):
            await self._transfer.publish_adapter(weights.adapter, name)
        else:
            await self._transfer.publish(self._skeleton, weights)

    async def close(self) -> None:
        """Free what was published; idempotent."""
        await self._transfer.close()
