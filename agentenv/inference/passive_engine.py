"""The base of engines that only answer: nothing runs in them that could be stopped, updated or freed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PassiveEngine"]


class PassiveEngine:
    """All of :class:`agentenv.inference.Engine` but ``generate``, which a subclass has."""

    updates_while_running = True
    version = 0
    """Of the last update; an engine without weights stays at 0."""

    async def abort(self, request_id: str) -> None:
        """Nothing: what was asked is answered to its end."""

    async def suspend(self) -> None:
        """Nothing."""

    async def resume(self) -> None:
        """Nothing."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Only the number."""
        self.version = version

    async def close(self) -> None:
        """Nothing."""
