"""What is wrong with a vLLM server is said in one error before the first episode."""

import asyncio
import socket
from typing import Any

import pytest

from agentenv.errors import MissingExtraError, UsageError
from agentenv.inference import GenerationRequest, SamplingParams
from agentenv.inference.vllm.backend import is_supported
from agentenv.inference.vllm.opening import VLLMOptions, check_vllm, open_vllm

_ON_PROCESSORS_IN_PIECES = {
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": True},
}


def test_nothing_listens_there(connect_to: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"{url}: nothing listens there.*is the vLLM server running\?"):
            connect_to(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://host:99999", "http://"])
def test_an_address_that_is_none(connect_to: Any, url: str) -> None:
    with pytest.raises(UsageError, match="must be like http://"):
        connect_to(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "0.21.3"}, r"is version 0\.21\.3, must be at least 0\.22 and below 0\.33"),
        ({"version": "0.33.0"}, r"is version 0\.33\.0, must be"),
        (
            {"max_length": 100},
            "takes sequences of 100 tokens, episodes have up to 4096: .*--max-model-len 4096",
        ),
        ({"answers": {"/is_paused": (404, {})}}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"answers": {"/version": (404, {})}}, "is no vLLM server"),
        ({"answers": {"/v1/models": (200, {"data": []})}}, "is no vLLM server"),
        ({"answers": {"/version": (401, {})}}, "refuses the key .*VLLM_API_KEY"),
        (
            {"answers": {"/tokenize": (200, {"tokens": [1, 2, 3]})}},
            "its tokenizer is not the trainer's: .* makes 3",
        ),
        ({"shift": -0.5}, "--logprobs-mode processed_logprobs"),
        (
            {"answers": {"/server_info": (200, {"vllm_config": _ON_PROCESSORS_IN_PIECES})}},
            "--no-enable-chunked-prefill",
        ),
    ],
    ids=["old", "new", "short", "flag", "other", "models", "key", "tokenizer", "logprobs", "pieces"],
)
def test_a_server_that_does_not_fit(
    make_fake: Any, connect_to: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        connect_to(make_fake(**options).url)


def test_another_model_is_served(make_fake: Any, connect_to: Any, small: Any) -> None:
    server = make_fake()
    server.root = "someone/else-7B"
    server._weights = small.other_weights(1)
    with pytest.raises(UsageError, match=r"serves someone/else-7B, which is not .*/model .*--model .*/model"):
        connect_to(server.url)
    assert "/collective_rpc" not in server.calls


def test_the_served_model_computes_in_another_precision(make_fake: Any, connect_to: Any, small: Any) -> None:
    server = make_fake()
    server._weights = small.other_weights(1, scale=1e-3)
    with pytest.raises(UsageError, match="computes in another precision; start it with --dtype"):
        connect_to(server.url)


def test_the_same_model_with_weights_of_another_run_is_given_the_trainers(
    make_fake: Any, connect_to: Any, small: Any
) -> None:
    server = make_fake()
    server._weights = small.other_weights(3)
    engine = connect_to(server.url)
    assert "/collective_rpc" in server.calls
    prompt = small.prompt(9)

    async def work() -> Any:
        try:
            return await engine.generate(GenerationRequest("r", prompt, SamplingParams(max_tokens=6)))
        finally:
            await engine.close()

    generation = asyncio.run(work())
    expected = small.logprobs(small.weights, prompt, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.22.0", True), ("0.32.1+cpu", True), ("0.21.9", False), ("1.0", False), ("dev", True)],
)
def test_versions(version: str, supported: bool) -> None:
    assert is_supported(version) is supported


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": ("http://a", "http://a")}, "--vllm_url names a server twice"),
        ({"urls": ("http://a",), "python": "python"}, "--vllm_python is for a server that is started here"),
        ({"start_timeout_s": 0.0}, "--vllm_start_timeout_s is 0.0, must be above 0"),
        ({"in_process": True, "urls": ("http://a",)}, "--engine vllm-in-process takes no --vllm_url"),
        ({"in_process": True, "transfer": "nccl"}, "takes no --weight_transfer nccl"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        VLLMOptions(**options)


def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.inference.vllm.server_process._installed", lambda: None)
    with pytest.raises(MissingExtraError, match=r"agentenv-rl\[vllm\]"):
        check_vllm(VLLMOptions())


def test_an_interpreter_without_vllm_or_none_at_all(tmp_path: Any) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(UsageError, match="that Python has no vllm"):
        check_vllm(VLLMOptions(python=str(tmp_path / "python")))
    with pytest.raises(UsageError, match="cannot be run"):
        check_vllm(VLLMOptions(python=str(tmp_path / "nothing")))


def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="the trainer has no GPU"):
        check_vllm(VLLMOptions(urls=("http://a",), transfer="nccl"))


def test_opening_leaves_nothing_behind_where_a_server_is_wrong(
    make_fake: Any, small: Any, tmp_path: Any
) -> None:
    urls = (make_fake().url, make_fake(version="0.1").url)
    options = VLLMOptions(urls=urls, transfer="filesystem", folder=str(tmp_path))
    with pytest.raises(UsageError, match=r"is version 0\.1"):
        open_vllm(small.policy, options, max_batch=4, max_length=100)
    assert list(tmp_path.iterdir()) == []


def test_a_server_in_a_precision_that_is_named_is_taken(make_fake: Any, small: Any) -> None:
    small.policy.model.load_state_dict(small.weights)
    server = make_fake()
    server._weights = small.other_weights(1, scale=1e-3)
    with pytest.raises(UsageError, match="or name its type: --vllm_dtype"):
        open_vllm(small.policy, VLLMOptions(urls=(server.url,)), max_batch=4, max_length=100)
    options = VLLMOptions(urls=(server.url,), dtype="bfloat16")
    (engine,) = open_vllm(small.policy, options, max_batch=4, max_length=100)
    asyncio.run(engine.close())
    with pytest.raises(UsageError, match="--vllm_dtype is 'int8', must be one of float32"):
        VLLMOptions(dtype="int8")


def test_opening_gives_one_engine_for_each_server(make_fake: Any, small: Any) -> None:
    small.policy.model.load_state_dict(small.weights)
    options = VLLMOptions(urls=(make_fake().url, make_fake().url), update_timeout_s=7.0)
    engines = open_vllm(small.policy, options, max_batch=4, max_length=100)
    assert [engine.max_length for engine in engines] == [100, 100]
    assert [engine._update_timeout_s for engine in engines] == [7.0, 7.0]
    for engine in engines:
        asyncio.run(engine.close())
