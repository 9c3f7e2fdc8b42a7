"""vLLM in this process as an engine's backend: no port and no HTTP; its core is a child process.

Invariants:

* vLLM's objects belong to the event loop of the first request; it is made outside of any.
* A core that died is replaced by a new one, which starts with the weights of the folder it was made from.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import ModelError, UsageError
from agentenv.inference.protocol import FinishReason, SamplingParams
from agentenv.inference.vllm.backend import Completion
from agentenv.inference.vllm.json_http import ConnectionLostError
from agentenv.inference.vllm.server_process import find_vllm

__all__ = ["InProcessBackend"]

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 60.0


class InProcessBackend:
    """Loads the model at once, which takes a minute.

    Args:
        model: folder or name on the hub.
        dtype: of its weights, such as float32.
        max_length: longest sequence.
        max_requests: most requests side by side.
        arguments: more of vLLM's AsyncEngineArgs, over those set here.
        load_timeout_s: of one loading of weights.
        folder: what ``model`` lies in, removed in the end.

    Raises:
        UsageError: vLLM is not installed, of a wrong version, or does not take the model or an argument.
    """

    name = "vLLM in this process"

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_length: int,
        max_requests: int,
        arguments: Mapping[str, Any] | None = None,
        load_timeout_s: float = 300.0,
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        _, on_processor = find_vllm()
        if on_processor:
            # vLLM would take half of the memory, and all processors, which the trainer needs as well.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self.max_length, self.incarnation = max_length, 0
        self.takes_distant_prompts = False
        self._folder, self._load_timeout_s = folder, load_timeout_s
        self._arguments: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_length,
            "max_num_seqs": max_requests,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enforce_eager": on_processor,
            "disable_log_stats": True,
            # See ServerProcess.
            **({"enable_chunked_prefill": False} if on_processor else {}),
            **(arguments or {}),
        }
        self._adapter: Any = None
        """vLLM's ``LoRARequest`` of the adapter in use."""
        self._adapter_ids = itertools.count(1)
        try:
            self._llm: Any = self._open()
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise UsageError(f"vLLM can't load {model}: {str(error).strip().splitlines()[0]}") from error

    async def complete(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, seed: int | None
    ) -> Completion:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        output = await self._generate(
            request_id,
            prompt_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=list(sampling.stop_token_ids),
            # The tokenizer's end of sequence is one of those; a model's own list may have more.
            ignore_eos=True,
            logprobs=0,
            seed=seed,
        )
        choice = output.outputs[0]
        token_ids = list(choice.token_ids)
        rows = choice.logprobs or []
        reason: FinishReason = choice.finish_reason or "abort"
        return Completion(
            token_ids,
            [float(row[token].logprob) for row, token in zip(rows, token_ids, strict=True)],
            reason,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        output = await self._generate(
            f"agentenv-score-{self.incarnation}", token_ids, max_tokens=1, prompt_logprobs=0
        )
        rows = output.prompt_logprobs[1:]
        return [float(row[token].logprob) for row, token in zip(rows, list(token_ids)[1:], strict=True)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        await self._control(self._llm.abort(list(request_ids)))

    async def pause(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        await self._control(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        await self._control(self._llm.resume_generation())

    async def load_folder(self, folder: Path) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        reload = self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        await self._control(reload, timeout_s=self._load_timeout_s)
        await self.drop_adapter()

    async def load_adapter(self, folder: Path, name: str) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        from vllm.lora.request import LoRARequest

        if not self._arguments.get("enable_lora"):
            raise ModelError(f"{self.name}: takes no adapters: give it enable_lora")
        number = next(self._adapter_ids)
        # vLLM's worker knows it by its number, the prefix cache by its name.
        request = LoRARequest(f"{name}-{number}", number, str(folder))
        await self._control(self._llm.add_lora(request), timeout_s=self._load_timeout_s)
        await self.drop_adapter()
        self._adapter = request

    async def drop_adapter(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        former, self._adapter = self._adapter, None
        if former is not None:
            # False where the newer one took its place already.
            await self._control(self._llm.remove_lora(former.lora_int_id))

    async def reset_prefix_cache(self) -> bool:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        return bool(await self._control(self._llm.reset_prefix_cache()))

    async def is_alive(self) -> bool:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        return not self._llm.errored

    async def recover(self, deadline: float) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        self.incarnation += 1
        self._adapter = None  # a new core has none
        await asyncio.to_thread(self._llm.shutdown)
        try:
            async with asyncio.timeout_at(deadline):
                self._llm = await asyncio.to_thread(self._open)
        except (TimeoutError, ValueError, OSError, RuntimeError) as error:
            raise ModelError(f"its core could not be started anew: {error}") from error

    async def close(self) -> None:
        """See :class:`~agentenv.inference.vllm.backend.Backend`."""
        await asyncio.to_thread(self._llm.shutdown)
        if self._folder is not None:
            self._folder.cleanup()

    def _open(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))

    async def _generate(self, request_id: str, prompt_ids: Sequence[int], **options: Any) -> Any:
        """The final output of one request."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params = VLLMSamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, **options)
        final = None
        try:
            async for output in self._llm.generate(
                {"prompt_token_ids": list(prompt_ids)},
                params,
                request_id=request_id,
                lora_request=self._adapter,
            ):
                final = output
        except EngineDeadError as error:
            raise ConnectionLostError(f"{self.name}: its core has died") from error
        except ValueError as error:
            raise UsageError(f"{self.name} refused a request: {error}") from error
        except Exception as error:
            if self._llm.errored:
                raise ConnectionLostError(f"{self.name}: its core has died") from error
            raise ModelError(f"{self.name} failed: {error!r}") from error
        if final is None:
            raise ConnectionLostError(f"{self.name}: a request ended without output")
        return final

    async def _control(self, work: Any, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise ModelError(f"{self.name} did not answer within {timeout_s:g} s") from None
        except Exception as error:
            if self._llm.errored:
                raise ConnectionLostError(f"{self.name}: its core has died") from error
            raise ModelError(f"{self.name} failed: {error}") from error
