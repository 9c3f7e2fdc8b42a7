"""An engine whose turns come from a chat server: for evaluations, since it tells no token ids and no log-probs.

Invariants:

* An episode's tokens, as the server counts them, are kept until :meth:`ChatEngine.take_usage`.
* A server that no request can reach any more is the engine's death: :attr:`ChatEngine.error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from agentenv.errors import ModelError
from agentenv.inference.chat_server import ChatServer, ServerGoneError
from agentenv.inference.passive_engine import PassiveEngine
from agentenv.inference.protocol import Generation, GenerationRequest
from agentenv.inference.text_turns import read_messages, text_generation

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChatEngine", "Usage"]

_Result = TypeVar("_Result")


@dataclass
class Usage:
    """Of one episode."""

    turns: int = 0
    """Answers of the server."""
    prompt_tokens: int | None = 0
    """Summed over its turns; None: the server does not count."""
    completion_tokens: int | None = 0


class ChatEngine(PassiveEngine):
    """Engine over a chat server; its conversations are those of ``TextTokenizer``.

    Args:
        server: answers turns.
    """

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self._usage: dict[str, Usage] = {}
        self.error: BaseException | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """One turn.

        Raises:
            ModelError: the server failed.
        """
        sampling = request.sampling
        if self.error is not None:
            raise ModelError(str(self.error)) from self.error
        try:
            answer = await _in_thread(
                lambda: self._server.complete(
                    read_messages(request.prompt_ids),
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=request.seed,
                ),
            )
        except ServerGoneError as error:
            self.error = error
            raise
        usage = self._usage.setdefault(request.episode_id, Usage())
        usage.turns += 1
        usage.prompt_tokens = _plus(usage.prompt_tokens, answer.prompt_tokens)
        usage.completion_tokens = _plus(usage.completion_tokens, answer.completion_tokens)
        return text_generation(answer.text, "length" if answer.finish_reason == "length" else "stop")

    def take_usage(self, episode_id: str) -> Usage:
        """What an episode that has ended used; forgotten here."""
        return self._usage.pop(episode_id, Usage())

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Refused.

        Raises:
            ModelError: always.
        """
        raise ModelError("the weights of a chat server cannot be updated")

    async def close(self) -> None:
        """Give up what waits to be tried again; requests in flight end by themselves."""
        self._server.close()


async def _in_thread(call: Callable[[], _Result]) -> _Result:
    """Run a call in a thread of its own, which an end of the process does not wait for, as it would for a pool's."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="agentenv-chat", daemon=True).start()
    return await future


def _plus(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + int(more)
