"""What an engine needs of a vLLM, wherever that runs.

Invariants:

* ``complete`` of a request that was aborted returns the tokens sampled so far.
* A vLLM that has gone raises :class:`ConnectionLostError` from every call, and may come back by ``recover``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.inference.protocol import FinishReason, SamplingParams

__all__ = ["MAX_VERSION", "MIN_VERSION", "Backend", "Completion", "is_supported"]

MIN_VERSION, MAX_VERSION = (0, 22), (0, 33)
"""vLLM from the first on and below the second."""


def is_supported(version: str) -> bool:
    """Whether a version of vLLM is in the range; a version that cannot be read, as of a build from source, is."""
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return True
    return MIN_VERSION <= (int(parts[0]), int(parts[1])) < MAX_VERSION


@dataclass(frozen=True)
class Completion:
    """The tokens of one request to vLLM."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class Backend(Protocol):
    """One vLLM. All calls come from one event loop at a time; each ends within its own time-out."""

    name: str
    """For messages."""
    max_length: int
    """Tokens of the longest sequence."""
    incarnation: int
    """How often it has gone and come back."""
    takes_distant_prompts: bool
    """``complete`` takes a DistantPrompt, too."""

    async def complete(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, seed: int | None
    ) -> Completion:
        """Sample; only ``sampling.stop_token_ids`` end a turn early.

        Raises:
            ConnectionLostError: vLLM has gone.
            UsageError: it does not take the request.
            ModelError: it failed at the request.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, under the weights in use, from no cache."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Have requests return what they have; unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Sample nothing until :meth:`resume`; requests are kept."""
        ...

    async def resume(self) -> None:
        """Go on; also where it was not paused."""
        ...

    async def load_folder(self, folder: Path) -> None:
        """Take the weights of a checkpoint."""
        ...

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Sample with a LoRA adapter from now on; the one before is unloaded.

        Called while no request is there, or where it has gone and come back, since it then has none.

        Args:
            folder: as PEFT writes it; vLLM may read it as long as the adapter is in use.
            name: of this version; vLLM knows it under one that it has never had before, so that its prefix cache,
                which is keyed by the name, gives no keys and values of another version.

        Raises:
            ModelError: it was not started for adapters, or cannot serve this one.
        """
        ...

    async def drop_adapter(self) -> None:
        """Sample with the model's own weights again."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget keys and values of former prompts; False: requests still hold some."""
        ...

    async def is_alive(self) -> bool:
        """Whether it answers.

        Raises:
            TimeoutError: it does not say.
        """
        ...

    async def recover(self, deadline: float) -> None:
        """Wait until a vLLM that has gone answers again, or start it anew.

        Args:
            deadline: of the event loop's clock.

        Raises:
            ModelError: it stays away.
        """
        ...

    async def close(self) -> None:
        """Free what is ours; idempotent."""
        ...
