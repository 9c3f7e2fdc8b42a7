"""A small model, and engines of every kind over it, for the tests that all of them must pass.

The kinds: ``transformers``; ``fake server``, which is the engine over vLLM's protocol with a server of these tests
behind it; ``vllm server`` and ``in process``, which are vLLM and skip where there is none. The former takes vLLM of
the interpreter that AGENTENV_TEST_VLLM_PYTHON names, or a running server that AGENTENV_TEST_VLLM_URL names.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from aiohttp import web
from safetensors.torch import load_file

from agentenv.errors import MissingExtraError, UsageError
from agentenv.inference import Engine, Generation, GenerationRequest, SamplingParams
from agentenv.inference.adapters import AdaptedWeights, Adapter
from agentenv.inference.model_skeleton import ModelSkeleton
from agentenv.inference.policy import Policy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.inference.vllm import VLLMEngine, connect
from agentenv.inference.vllm.opening import VLLMOptions, open_in_process, start_server
from agentenv.inference.vllm.server_process import find_vllm
from agentenv.inference.weight_sync import WeightSync
from agentenv.inference.weight_transfer import WeightTransfer, open_transfer

MAX_LENGTH = 4096
"""A turn of so many tokens takes many seconds on any machine."""
MAX_LORA_RANK = 8
_START_TIMEOUT_S = float(os.environ.get("AGENTENV_TEST_VLLM_START_S", "900"))
Weights = Mapping[str, torch.Tensor]


@dataclass
class SmallModel:
    """Half a million parameters with weights drawn at random, tied embeddings, and a tokenizer."""

    policy: Policy

    def __post_init__(self) -> None:
        self.weights: Weights = {name: t.clone() for name, t in self.policy.model.state_dict().items()}
        self.skeleton = ModelSkeleton(self.policy.model)
        self.vocabulary = self.skeleton.vocab_size

    def other_weights(self, seed: int, scale: float = 0.1) -> Weights:
        """Weights near those of the model, by noise of so many standard deviations."""
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: t + scale * t.std() * torch.randn(t.shape, generator=generator) if t.ndim > 1 else t.clone()
            for name, t in self.weights.items()
        }
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        return weights

    def logits(self, weights: Weights, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] of a plain forward pass."""
        model = self.policy.model
        model.load_state_dict(weights)
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    def logprobs(self, weights: Weights, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Of the completion's tokens, by a plain forward pass."""
        rows = self.logits(weights, [*prompt, *completion]).log_softmax(-1)[len(prompt) - 1 : -1]
        return rows.gather(-1, torch.tensor(list(completion), dtype=torch.long)[:, None])[:, 0].tolist()

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Ids at random."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocabulary, (length,), generator=generator).tolist()


class SmallAdapter:
    """An adapter on the small model, as training has it: a ``peft.PeftModel``, whose matrices are drawn anew.

    Args:
        small: the model; left as it is.
        options: of ``peft.LoraConfig``.
    """

    def __init__(self, small: SmallModel, **options: Any) -> None:
        self._peft = pytest.importorskip("peft")
        model = copy.deepcopy(small.policy.model)
        model.load_state_dict(small.weights)
        settings = {"r": MAX_LORA_RANK, "lora_alpha": 16, "target_modules": "all-linear", **options}
        self.model = self._peft.get_peft_model(model, self._peft.LoraConfig(**settings)).eval()

    def weights(self, seed: int = 0) -> AdaptedWeights:
        """Those of a version, and those that :meth:`logprobs` has from now on."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_B." in name:
                parameter.data.copy_(0.03 * torch.randn(parameter.shape, generator=generator))
        config = json.loads(json.dumps(self.model.peft_config["default"].to_dict(), default=sorted))
        tensors = {n: t.clone() for n, t in self._peft.get_peft_model_state_dict(self.model).items()}
        merged = copy.deepcopy(self.model).merge_and_unload()
        return AdaptedWeights(merged.state_dict(), Adapter(config, tensors))

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Of the completion's tokens, by PEFT's forward pass."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return rows.gather(-1, torch.tensor(list(completion))[:, None])[:, 0].tolist()


def make_small_model(repository: Path, folder: Path) -> SmallModel:
    """The model, saved in a folder that is called ``model``."""
    source = repository / "envs/agentenv_envs/swe/policy"
    config = transformers.AutoConfig.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # far from uniform, so that a wrong mask or position shows
    path = str(folder / "model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return SmallModel(Policy(path, model, tokenizer, path))


class FakeVLLM:
    """A server with vLLM's HTTP interface over the transformers engine, in a thread.

    Args:
        small: what it serves.
        answers: instead of its own, ``{path: (status, value)}``; None: it never answers.
        version, max_length: what it says of itself.
        shift: added to all log-probs.
        max_lora_rank: of adapters that it takes; None: it takes none.
    """

    def __init__(
        self,
        small: SmallModel,
        *,
        answers: Mapping[str, tuple[int, Any] | None] | None = None,
        version: str = "0.32.0",
        max_length: int = MAX_LENGTH,
        shift: float = 0.0,
        max_lora_rank: int | None = MAX_LORA_RANK,
    ) -> None:
        self.max_lora_rank = max_lora_rank
        self._small, self.answers = small, dict[str, Any](answers or {})
        self.shift = shift
        self._version, self._max_length = version, max_length
        self.root = str(small.policy.source)
        self.calls: list[str] = []
        self.most_requests = self._requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, with the weights that the folder holds; after a crash on the same port."""
        self._small.policy.model.load_state_dict(self._small.weights)
        self._engine = TransformersEngine(self._small.policy.model, max_batch=64, max_length=self._max_length)
        self._weights: Weights = self._small.weights
        self.adapters: dict[str, Weights] = {}
        """Merged, by name."""
        self._sampled_with = self._weights
        self._call(self._listen())

    def hold(self) -> None:
        """Sample nothing until it is started again; requests stay."""
        self._call(self._engine.suspend())

    def crash(self) -> None:
        """Cut all connections and listen no more."""
        self._call(self._hang_up())

    def close(self) -> None:
        self.crash()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener).start()

    async def _hang_up(self) -> None:
        if self._runner.server is None:
            return  # it has crashed before
        # Connections that asyncio has taken and not yet begun are lost, unclosed, if the listener closes before.
        self._loop.remove_reader(self._listener.fileno())
        await asyncio.sleep(0.01)
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        await self._engine.close()

    async def _serve(self, request: web.Request) -> web.Response:
        status, value = await self._answer(request.path, json.loads(await request.read() or b"{}"))
        return web.json_response(value, status=status)

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.calls.append(path)
        if path in self.answers:
            answer = self.answers[path]
            if answer is None:
                await asyncio.Event().wait()
            return answer
        if path == "/v1/completions":
            self._requests += 1
            self.most_requests = max(self.most_requests, self._requests)
            try:
                return await self._complete(body)
            finally:
                self._requests -= 1
        value: Any = {}
        if path == "/version":
            value = {"version": self._version}
        elif path == "/v1/models":
            value = {"data": [{"id": "policy", "root": self.root, "max_model_len": self._max_length}]}
        elif path == "/is_paused":
            value = {"is_paused": False}
        elif path == "/tokenize":
            value = {"tokens": self._small.policy.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        elif path == "/pause":
            await self._engine.suspend()
        elif path == "/resume":
            await self._engine.resume()
        elif path == "/abort_requests":
            for name in body["request_ids"]:
                await self._engine.abort(name.removeprefix("cmpl-").removesuffix("-0"))
        elif path == "/collective_rpc":
            self._weights = load_file(f"{body['kwargs']['weights_path']}/model.safetensors")
        elif path == "/v1/load_lora_adapter" and self.max_lora_rank is not None:
            return self._load_adapter(body["lora_name"], Path(body["lora_path"]))
        elif path == "/v1/unload_lora_adapter" and self.max_lora_rank is not None:
            if self.adapters.pop(body["lora_name"], None) is None:
                return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        elif path == "/reset_prefix_cache":
            value = {"success": True}
        elif path != "/health":
            return 404, {"detail": "Not Found"}
        return 200, value

    def _load_adapter(self, name: str, folder: Path) -> tuple[int, Any]:
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > (self.max_lora_rank or 0):
            return 500, {"error": {"message": f"LoRA rank {config['r']} is greater than max_lora_rank"}}
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        tensors = load_file(folder / "adapter_model.safetensors")
        merged = dict(self._weights)
        for of_a, a in tensors.items():
            layer, is_a, _ = of_a.removeprefix("base_model.model.").partition(".lora_A.")
            if is_a:
                b = tensors[of_a.replace(".lora_A.", ".lora_B.")]
                merged[f"{layer}.weight"] = (
                    merged[f"{layer}.weight"] + config["lora_alpha"] / config["r"] * b @ a
                )
        self.adapters[name] = merged
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    async def _complete(self, body: Any) -> tuple[int, Any]:
        prompt, model = body["prompt"], body["model"]
        if model != "policy" and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        weights = self._weights if model == "policy" else self.adapters[model]
        if weights is not self._sampled_with:
            self._sampled_with = weights
            await self._engine.update_weights(weights, self._engine.version + 1)
        if len(prompt) >= self._max_length:
            return 400, {"error": {"message": "too long"}}
        if body.get("prompt_logprobs") is not None:
            scores = self._small.skeleton.logprobs(weights, prompt)
            rows = [None] + [
                {str(t): {"logprob": s + self.shift}} for t, s in zip(prompt[1:], scores, strict=True)
            ]
            return 200, {"choices": [{"prompt_logprobs": rows}]}
        sampling = SamplingParams(
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(body["top_k"], 0),
            repetition_penalty=body["repetition_penalty"],
            max_tokens=body["max_tokens"],
            stop_token_ids=tuple(body["stop_token_ids"]),
        )
        generation = await self._engine.generate(
            GenerationRequest(body["request_id"], prompt, sampling, seed=body.get("seed"))
        )
        choice = {
            "token_ids": generation.token_ids,
            "logprobs": {"token_logprobs": [value + self.shift for value in generation.logprobs]},
            "finish_reason": generation.finish_reason,
        }
        return 200, {"choices": [choice]}


def make_sync(
    small: SmallModel, transfer: WeightTransfer | None = None, *, adapters_only: bool = False
) -> WeightSync:
    return WeightSync(small.skeleton, transfer or open_transfer("shared-memory"), adapters_only=adapters_only)


def connect_engine(
    small: SmallModel,
    url: str,
    *,
    max_length: int = MAX_LENGTH,
    end: int | None = None,
    transfer: WeightTransfer | None = None,
    adapters_only: bool = False,
    **options: Any,
) -> VLLMEngine:
    """An engine over the server at an address, with the model's own weights.

    Args:
        transfer: the way for weights; None: shared memory.
        end: the token that ends a sequence; None: none does, so that lengths are known.
        adapters_only: see ``WeightSync``.
    """
    sync = make_sync(small, transfer, adapters_only=adapters_only)

    async def opened() -> Any:
        try:
            return await connect(
                url,
                model=small.policy.source,
                tokenizer=small.policy.tokenizer,
                max_length=max_length,
                weight_sync=sync,
                weights=small.weights,
            )
        except UsageError:
            await sync.close()
            raise

    backend = asyncio.run(opened())
    eos = () if end is None else (end,)
    return VLLMEngine(backend, sync, eos_token_ids=eos, max_length=max_length, **options)


async def sample_past(engine: Any, prompt: list[int], name: str) -> None:
    """Until every turn that was sent before has been sampled from.

    The first of two short turns in a row may overtake one that was sent just before it. When it has ended, the server
    has both; the second takes four steps more, of all turns that are there.
    """
    for number in range(2):
        request = GenerationRequest(f"{name} {number}", prompt, SamplingParams(max_tokens=4))
        await engine.generate(request)


async def begin_turn(engine: Any, prompt: list[int], name: str = "long") -> asyncio.Task[Generation]:
    """A turn of which some tokens are sampled, and which ends by an abort: by itself it would last too long."""
    request = GenerationRequest(name, prompt, SamplingParams(max_tokens=MAX_LENGTH))
    turn = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)
    await sample_past(engine, prompt[:5], f"beside {name}")
    return turn


@pytest.fixture(name="sample_past")
def sample_past_fixture() -> Callable[..., Awaitable[None]]:
    return sample_past


@pytest.fixture
def begin_long_turn() -> Callable[..., Awaitable[asyncio.Task[Generation]]]:
    return begin_turn


@pytest.fixture(scope="session")
def small(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return make_small_model(repository, tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make_adapter(small: SmallModel) -> Callable[..., SmallAdapter]:
    """Puts an adapter on the small model."""
    return functools.partial(SmallAdapter, small)


@pytest.fixture
def make_fake(small: SmallModel) -> Iterator[Callable[..., FakeVLLM]]:
    """Starts fake servers, which end with the test."""
    servers = []

    def make(**options: Any) -> FakeVLLM:
        servers.append(FakeVLLM(small, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def fake_vllm(make_fake: Callable[..., FakeVLLM]) -> FakeVLLM:
    return make_fake()


@pytest.fixture
def connect_to(small: SmallModel) -> Callable[..., VLLMEngine]:
    """Opens an engine over the server at a URL."""
    return functools.partial(connect_engine, small)


@pytest.fixture(scope="session")
def vllm_server_url(small: SmallModel) -> Iterator[str]:
    """A vLLM server of the small model."""
    url = os.environ.get("AGENTENV_TEST_VLLM_URL")
    if url:
        yield url
        return
    options = VLLMOptions(python=os.environ.get("AGENTENV_TEST_VLLM_PYTHON"))
    try:
        find_vllm(options.python)
    except MissingExtraError:
        pytest.skip("vllm is not installed")
    sizes = {"max_batch": 64, "max_length": MAX_LENGTH, "max_lora_rank": MAX_LORA_RANK}
    server = start_server(small.policy, small.skeleton, options, **sizes)
    started = time.monotonic()
    while not _answers(server.url):
        assert server.is_running, server.why()
        assert time.monotonic() - started < _START_TIMEOUT_S, server.why()
        time.sleep(0.5)
    yield server.url
    server.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def loop_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def vllm_in_process(small: SmallModel, loop_runner: asyncio.Runner) -> Iterator[Any]:
    """vLLM in this process, which engines of several tests use one after another."""
    options = VLLMOptions(in_process=True)
    try:
        find_vllm()
    except MissingExtraError:
        pytest.skip("vllm is not installed")
    sizes = {"max_batch": 64, "max_length": MAX_LENGTH, "max_lora_rank": MAX_LORA_RANK}
    backend = open_in_process(small.policy, small.skeleton, options, **sizes)
    close = backend.close

    async def stay_open() -> None:
        await backend.resume()  # a test may have left it paused

    backend.close = stay_open  # type: ignore[method-assign]
    yield backend
    loop_runner.run(close())


OpenEngine = Callable[..., Engine]


@pytest.fixture(
    params=[
        "transformers",
        "fake server",
        pytest.param("vllm server", marks=pytest.mark.vllm),
        pytest.param("in process", marks=pytest.mark.vllm),
    ]
)
def open_engine(request: pytest.FixtureRequest, small: SmallModel) -> OpenEngine:
    """Opens an engine with the small model's weights; the test closes it."""
    if request.param == "transformers":

        def over_transformers(
            *, max_length: int = MAX_LENGTH, end: int | None = None, adapters_only: bool = False
        ) -> Engine:
            # It takes merged weights whatever else they carry.
            small.policy.model.load_state_dict(small.weights)
            tokenizer = None if end is None else copy.deepcopy(small.policy.tokenizer)
            if tokenizer is not None:
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
            return TransformersEngine(small.policy.model, tokenizer, max_batch=64, max_length=max_length)

        return over_transformers
    if request.param == "in process":
        backend = request.getfixturevalue("vllm_in_process")
        runner: asyncio.Runner = request.getfixturevalue("loop_runner")

        def in_process(
            *, max_length: int = MAX_LENGTH, end: int | None = None, adapters_only: bool = False
        ) -> Engine:
            sync = make_sync(small, adapters_only=adapters_only)

            async def give_first_weights() -> None:
                await sync.publish(small.weights, 0)
                await sync.load(backend)
                await backend.reset_prefix_cache()
                await sync.check(backend)

            runner.run(give_first_weights())
            eos = () if end is None else (end,)
            return VLLMEngine(backend, sync, eos_token_ids=eos, max_length=max_length)

        return in_process
    url = (
        request.getfixturevalue("fake_vllm").url
        if request.param == "fake server"
        else request.getfixturevalue("vllm_server_url")
    )
    return lambda **options: connect_engine(small, url, **options)
