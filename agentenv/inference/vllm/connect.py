"""From the address of a vLLM server to a backend, with everything that can be wrong found before the first episode.

Invariant: a server that :func:`connect` returns is a vLLM of a supported version, has the flags that the engine needs,
takes sequences of the length that episodes have, makes the same tokens of a text, and has the trainer's weights; with a
``trial`` adapter, it can serve such adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.errors import ModelError, UsageError
from agentenv.inference.adapters import AdaptedWeights
from agentenv.inference.protocol import SamplingParams
from agentenv.inference.vllm.json_http import ConnectionLostError, JsonHttp
from agentenv.inference.vllm.server import ServerBackend
from agentenv.inference.vllm.server_process import ServerProcess, check_version
from agentenv.inference.weight_sync import WeightSync, probe_tolerance

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdaptersRefusedError", "connect"]

_TIMEOUT_S = 60.0
_NO_LORA = "does not support LoRA"
"""In the log of a vLLM whose model takes no adapters."""
_SAMPLE_TEXT = "def f(x):\n    return x[0] + 12  # naïve 漢字\n\n\tdone."


class AdaptersRefusedError(UsageError):
    """vLLM cannot serve the adapters; whole weights it may."""


async def connect(
    url: str,
    *,
    model: str,
    tokenizer: Any,
    max_length: int,
    weight_sync: WeightSync,
    weights: Mapping[str, Tensor],
    trial: AdaptedWeights | None = None,
    api_key: str | None = None,
    load_timeout_s: float = 300.0,
    owner: ServerProcess | None = None,
    start_timeout_s: float = 900.0,
) -> ServerBackend:
    """Check a server and see that it has the weights.

    Args:
        url: its base, without ``/v1``.
        model: folder or name of the model that is trained.
        tokenizer: of that model.
        max_length: tokens of the longest episode.
        weight_sync: brings weights to it.
        weights: those that episodes begin with.
        trial: those with an adapter such as will be sent alone; None: whole weights will be.
        api_key: where the server wants one.
        load_timeout_s: of one loading of weights.
        owner: the process, where it is ours; it is waited for.
        start_timeout_s: how long.

    Raises:
        AdaptersRefusedError: it cannot serve the trial's adapter.
        UsageError: whatever else is wrong, and what to do.
    """
    http = JsonHttp(url.removesuffix("/").removesuffix("/v1"), api_key=api_key)
    try:
        if owner is not None:
            await _wait_for(http, owner, start_timeout_s, with_adapters=trial is not None)
        name, root, positions = await _identify(http)
        if positions < max_length:
            raise UsageError(
                f"{url}: takes sequences of {positions} tokens, episodes have up to {max_length}: start it with "
                f"--max-model-len {max_length}, or give --max_tokens_per_episode {positions}"
            )
        backend = ServerBackend(
            http, model=name, max_length=positions, load_timeout_s=load_timeout_s, owner=owner
        )
        await _check_flags(http, backend, weight_sync)
        if owner is None:
            await _check_prefill(http)
        await _check_tokens(http, name, tokenizer)
        await _check_weights(backend, model, root, weight_sync, weights, owner is not None)
        if trial is not None:
            await _check_adapters(backend, weight_sync, trial)
        return backend
    except ConnectionLostError as error:
        raise UsageError(f"{error}; is the vLLM server running?") from error
    except TimeoutError as error:
        raise UsageError(f"{url}: no answer within {_TIMEOUT_S:g} s") from error
    except ModelError as error:
        raise UsageError(str(error)) from error
    finally:
        await http.close()  # the engine works in another event loop


async def _wait_for(http: JsonHttp, owner: ServerProcess, timeout_s: float, *, with_adapters: bool) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        if not owner.is_running:
            if with_adapters and _NO_LORA in owner.log.read_text("utf-8", "replace"):
                raise AdaptersRefusedError("vLLM knows no LoRA for this model")
            raise UsageError(f"the vLLM server ended while it started: {owner.why()}")
        try:
            if (await http.get("/health", timeout_s=5.0)).status == 200:
                return
        except (ConnectionLostError, TimeoutError):
            pass
        if asyncio.get_running_loop().time() > deadline:
            raise UsageError(f"the vLLM server did not start within {timeout_s:g} s (log: {owner.log})")
        await asyncio.sleep(0.5)


async def _identify(http: JsonHttp) -> tuple[str, str, int]:
    """Name, origin and positions of the served model."""
    version = await http.get("/version", timeout_s=_TIMEOUT_S)
    if version.status in (401, 403):
        raise UsageError(f"{http.base_url}: refuses the key (give it in VLLM_API_KEY)")
    try:
        check_version(str(version.json()["version"]), f"vLLM at {http.base_url}")
        listed = await http.get("/v1/models", timeout_s=_TIMEOUT_S)
        if listed.status in (401, 403):
            raise UsageError(f"{http.base_url}: refuses the key (give it in VLLM_API_KEY)")
        models = [m for m in listed.json()["data"] if not m.get("parent")]  # adapters have one
        return str(models[0]["id"]), str(models[0].get("root") or ""), int(models[0]["max_model_len"])
    except (ModelError, KeyError, TypeError, IndexError) as error:
        raise UsageError(
            f"{http.base_url}: is no vLLM server (its /version or /v1/models is another)"
        ) from error


async def _check_flags(http: JsonHttp, backend: ServerBackend, weight_sync: WeightSync) -> None:
    if (await http.get("/is_paused", timeout_s=_TIMEOUT_S)).status == 404:
        raise UsageError(
            f"{backend.name}: takes no new weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        )
    await backend.abort(["agentenv-nothing"])  # whether it can
    await backend.resume()  # a run that was killed may have left it paused
    only = await backend.complete(
        "agentenv-flags", weight_sync.probe_ids, SamplingParams(top_k=1, max_tokens=1), None
    )
    if any(abs(logprob) > 1e-6 for logprob in only.logprobs):
        raise UsageError(
            f"{backend.name}: tells log-probs from before top-k, top-p and temperature: start it with --logprobs-mode "
            "processed_logprobs"
        )


async def _check_prefill(http: JsonHttp) -> None:
    """Whether a server on processors would die of the first seeded prompt that it computes in pieces."""
    try:
        config = (await http.get("/server_info?config_format=json", timeout_s=_TIMEOUT_S)).json()[
            "vllm_config"
        ]
        on_processor = config["device_config"]["device"] == "cpu"
        in_pieces = bool(config["scheduler_config"]["enable_chunked_prefill"])
    except (ModelError, KeyError, TypeError, TimeoutError):
        return  # a version that does not tell
    if on_processor and in_pieces:
        raise UsageError(
            f"{http.base_url}: runs on processors, where vLLM's core dies of seeded requests whose prompts it computes "
            "in pieces: start it with --no-enable-chunked-prefill"
        )


async def _check_tokens(http: JsonHttp, model: str, tokenizer: Any) -> None:
    body = {"model": model, "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    answer = await http.post("/tokenize", body, timeout_s=_TIMEOUT_S)
    if answer.status != 200:
        return  # a server without tokenizer: episodes need none of it
    theirs = list(answer.json().get("tokens") or [])
    own = tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False)
    if theirs != own:
        at = next((i for i, (a, b) in enumerate(zip(theirs, own, strict=False)) if a != b), -1)
        raise UsageError(
            f"{http.base_url}: its tokenizer is not the trainer's: of the same text it makes {len(theirs)} tokens and "
            f"the trainer's {len(own)}, the first that differs is number {max(at, 0)}; serve the model with its own "
            "tokenizer"
        )


async def _check_weights(
    backend: ServerBackend,
    model: str,
    root: str,
    weight_sync: WeightSync,
    weights: Mapping[str, Tensor],
    is_ours: bool,
) -> None:
    expected = await asyncio.to_thread(weight_sync.expected, weights)
    try:
        difference = await weight_sync.difference(backend, expected)
    except UsageError as error:
        raise UsageError(f"{backend.name}: serves {root}, which is not {model}: {error}") from error
    if difference <= weight_sync.tolerance:
        return
    if difference <= probe_tolerance("bfloat16"):
        raise UsageError(
            f"{backend.name}: log-probs differ from the trainer's by {difference:.2g} on average, allowed is "
            f"{weight_sync.tolerance:g}: it computes in another precision; start it with --dtype as the trainer has "
            "it, or name its type: --vllm_dtype"
        )
    if not is_ours and Path(root).name != Path(model).name:
        raise UsageError(
            f"{backend.name}: serves {root}, which is not {model} (log-probs of a probe differ by {difference:.2g} on "
            f"average): start it with --model {model}"
        )
    # The same model, with the weights of another run.
    await weight_sync.publish(weights, 0)
    await weight_sync.load(backend)
    await backend.reset_prefix_cache()
    await weight_sync.check(backend)


async def _check_adapters(backend: ServerBackend, weight_sync: WeightSync, trial: AdaptedWeights) -> None:
    try:
        await weight_sync.try_adapter(backend, trial)
    except ConnectionLostError:
        raise
    except ModelError as error:
        raise AdaptersRefusedError(str(error)) from error
