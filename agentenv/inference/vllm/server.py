"""A vLLM server as an engine's backend, over its HTTP interface.

The server needs VLLM_SERVER_DEV_MODE=1 (pause, abort, loading of weights) and ``--logprobs-mode processed_logprobs``
(log-probs after temperature, top-k, top-p and penalties); :mod:`agentenv.inference.vllm.connect` tells.

Invariants:

* Every sampling parameter is sent: none comes from the server's or the model's own defaults.
* A request that the server is too busy for (429, 503) is sent again until the caller's patience ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from agentenv.errors import ModelError, UsageError
from agentenv.inference.protocol import DistantPrompt, FinishReason, SamplingParams
from agentenv.inference.vllm.backend import Completion
from agentenv.inference.vllm.json_http import ConnectionLostError, JsonHttp, NoAnswerError, Response

__all__ = ["ServerBackend", "ServerOwner"]

_CONTROL_TIMEOUT_S = 60.0
_HEALTH_TIMEOUT_S = 15.0
_BUSY = (429, 503)
_BUSY_PAUSE_S = 0.5
_FAILURES = 3
"""How often a request that the living server fails at (5xx) is sent."""


class ServerOwner(Protocol):
    """Who can start the server anew."""

    @property
    def is_running(self) -> bool:
        """Its process lives."""
        ...

    def restart(self) -> None:
        """End what is left of it and start it; returns before it answers."""
        ...

    def stop(self) -> None:
        """End it; idempotent."""
        ...

    def why(self) -> str:
        """The end of its log."""
        ...


class ServerBackend:
    """One server.

    Args:
        http: client of it.
        model: the name it serves its model under.
        max_length: its ``max_model_len``.
        load_timeout_s: of one loading of weights.
        owner: starts and stops it; None: somebody else does.
    """

    takes_distant_prompts = True

    def __init__(
        self,
        http: JsonHttp,
        *,
        model: str,
        max_length: int,
        load_timeout_s: float = 300.0,
        owner: ServerOwner | None = None,
    ) -> None:
        self.name, self.max_length = http.base_url, max_length
        self.incarnation = 0
        self._http, self._model, self._owner = http, model, owner
        self._load_timeout_s = load_timeout_s
        self._adapter: str | None = None
        """Name of the one that requests are sent to; None: they are sent to the model."""

    async def complete(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, seed: int | None
    ) -> Completion:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        model = self._adapter or self._model
        if isinstance(prompt_ids, DistantPrompt):
            completion: Completion = await prompt_ids.send(self.name, model, request_id, sampling, seed)
            return completion
        body: dict[str, Any] = {
            "model": model,
            "request_id": request_id,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            # The tokenizer's end of sequence is one of those; a model's own list may have more.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if seed is not None:
            body["seed"] = seed
        choice = await self._completion(body)
        reason: FinishReason = choice["finish_reason"] or "abort"
        return Completion(
            choice["token_ids"] or [], (choice["logprobs"] or {}).get("token_logprobs") or [], reason
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        choice = await self._completion(
            {
                "model": self._adapter or self._model,
                "prompt": list(token_ids),
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            }
        )
        rows = choice["prompt_logprobs"][1:]
        return [
            float(row[str(token)]["logprob"]) for row, token in zip(rows, list(token_ids)[1:], strict=True)
        ]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        if request_ids:  # an empty list would end them all
            await self._control(
                "/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in request_ids]}
            )

    async def pause(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        await self._control("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        await self._control("/resume")

    async def load_folder(self, folder: Path) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._control("/collective_rpc", body, timeout_s=self._load_timeout_s)
        await self.drop_adapter()

    async def load_adapter(self, folder: Path, name: str) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        # Another run, or this one before it was killed, may have left adapters there.
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        body = {"lora_name": unique, "lora_path": str(folder)}
        answer = await self._ask("/v1/load_lora_adapter", body, timeout_s=self._load_timeout_s)
        if answer.status == 404 and "lora" not in answer.text().lower():
            raise ModelError(
                f"{self.name}: takes no adapters: start it with --enable-lora, and with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        if answer.status != 200:
            if answer.status >= 500 and not await self._answers():
                raise ConnectionLostError(f"{self.name}: its engine has died")
            raise ModelError(f"{self.name} did not take an adapter: {_message(answer)}")
        await self.drop_adapter()
        self._adapter = unique

    async def drop_adapter(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        former, self._adapter = self._adapter, None
        if former is not None:
            answer = await self._ask("/v1/unload_lora_adapter", {"lora_name": former}, timeout_s=timeout_s)
            if answer.status not in (200, 404):  # a server that was started anew does not know it
                raise ModelError(f"{self.name} did not unload {former}: {_message(answer)}")

    async def reset_prefix_cache(self) -> bool:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        answer = await self._control("/reset_prefix_cache")
        # Servers from before vLLM told how it went answered without a body.
        return not answer.body or bool((answer.json() or {}).get("success", True))

    async def is_alive(self) -> bool:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        if self._owner is not None and not self._owner.is_running:
            return False
        try:
            return (await self._http.get("/health", timeout_s=_HEALTH_TIMEOUT_S)).status == 200
        except ConnectionLostError:
            return False

    async def recover(self, deadline: float) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        if self._owner is not None:
            await asyncio.to_thread(self._owner.restart)
        self.incarnation += 1
        loop = asyncio.get_running_loop()
        while loop.time() <= deadline:
            if self._owner is not None and not self._owner.is_running:
                raise ModelError(f"the vLLM server ended while it started: {self._owner.why()}")
            try:
                if await self.is_alive():
                    return
            except TimeoutError:
                pass
            await asyncio.sleep(0.5)
        raise ModelError("nothing answers there any more")

    async def close(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`; others' servers keep no adapter of ours."""
        if self._owner is None:
            with contextlib.suppress(ModelError):  # it may have gone
                await self.drop_adapter(timeout_s=_HEALTH_TIMEOUT_S)
        await self._http.close()
        if self._owner is not None:
            await asyncio.to_thread(self._owner.stop)

    async def _completion(self, body: dict[str, Any]) -> Any:
        """The one choice of a completion."""
        failures = 0
        while True:
            answer = await self._http.request("POST", "/v1/completions", body, timeout_s=None)
            if answer.status == 200:
                return answer.json()["choices"][0]
            if answer.status in _BUSY:
                await asyncio.sleep(_BUSY_PAUSE_S)
            elif answer.status < 500:
                raise UsageError(f"{self.name} answered {answer.status}: {_message(answer)}")
            else:
                failures += 1
                if failures == _FAILURES:
                    raise ModelError(f"{self.name} answered {answer.status}: {_message(answer)}")
                await asyncio.sleep(_BUSY_PAUSE_S)
            if not await self._answers():
                raise ConnectionLostError(f"{self.name}: its engine has died")

    async def _answers(self) -> bool:
        try:
            return await self.is_alive()
        except TimeoutError:
            return True

    async def _ask(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> Response:
        try:
            return await self._http.post(path, body, timeout_s=timeout_s)
        except TimeoutError:
            raise NoAnswerError(
                f"{self.name} did not answer {path.partition('?')[0]} within {timeout_s:g} s"
            ) from None

    async def _control(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> Response:
        answer = await self._ask(path, body, timeout_s=timeout_s)
        if answer.status == 404:
            raise ModelError(
                f"{self.name} has no {path.partition('?')[0]}: start it with VLLM_SERVER_DEV_MODE=1"
            )
        if answer.status != 200:
            if answer.status >= 500 and not await self._answers():
                raise ConnectionLostError(f"{self.name}: its engine has died")
            raise ModelError(
                f"{self.name} answered {answer.status} to {path.partition('?')[0]}: {_message(answer)}"
            )
        return answer


def _message(answer: Response) -> str:
    try:
        value = answer.json()
    except ModelError:
        return answer.text()
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), str(value))
    return " ".join(str(value).split())[:300]
