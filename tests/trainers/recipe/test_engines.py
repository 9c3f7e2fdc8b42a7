"""Engines from a recipe's options: which are opened, and what a mistake says."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from agentenv.errors import MissingExtraError, UsageError
from agentenv.inference.policy import Policy
from agentenv_trainers.recipe import RecipeArguments
from agentenv_trainers.recipe import engines as module
from agentenv_trainers.sao.config import SAOConfig


@dataclass
class _Opened:
    """What ``open_vllm`` was called with."""

    options: Any = None
    sizes: Any = None


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> _Opened:
    calls = _Opened()

    def open_vllm(policy: Any, options: Any, **sizes: Any) -> list[str]:
        calls.options, calls.sizes = options, sizes
        return ["an engine"]

    monkeypatch.setattr(module, "open_vllm", open_vllm)
    return calls


def _config(tmp_path: Any, **options: Any) -> SAOConfig:
    return SAOConfig(
        output_dir=str(tmp_path), num_envs=6, max_tokens_per_episode=300, use_cpu=True, bf16=False, **options
    )


def test_the_servers_named_are_opened_for_the_runs_sizes(opened: _Opened, tmp_path: Any) -> None:
    arguments = RecipeArguments(
        engine="vllm",
        vllm_url="http://a:1, http://b:2,",
        weight_transfer="filesystem",
        weight_folder="/mnt/w",
    )
    assert arguments.open_engines("policy", _config(tmp_path)) == ["an engine"]
    assert opened.options.urls == ("http://a:1", "http://b:2")
    assert (opened.options.transfer, opened.options.folder) == ("filesystem", "/mnt/w")
    assert opened.sizes["max_batch"] == 6 and opened.sizes["max_length"] == 300


def test_an_update_may_last_as_long_as_a_server_takes_to_come_back(opened: _Opened, tmp_path: Any) -> None:
    arguments = RecipeArguments(engine="vllm", vllm_start_timeout_s=50.0)
    free, chosen = _config(tmp_path), _config(tmp_path, sync_timeout_s=20.0)
    arguments.open_engines("policy", free)
    assert opened.options.update_timeout_s == pytest.approx(200.0)
    arguments.open_engines("policy", chosen, {"sync_timeout_s"})
    # One of several servers is given up before the update is.
    assert opened.options.update_timeout_s == pytest.approx(40.0 / 3.0)
    assert (free.sync_timeout_s, chosen.sync_timeout_s) == (350.0, 20.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_url": "http://a"}, "--vllm_url is for --engine vllm"),
        ({"weight_folder": "/mnt"}, "--weight_folder is for --engine vllm"),
        ({"weight_transfer": "nccl"}, "--weight_transfer is for --engine vllm"),
        ({"lora_sync": "adapter", "use_peft": True}, "--lora_sync is for --engine vllm"),
        ({"vllm_dtype": "bfloat16"}, "--vllm_dtype is for --engine vllm"),
        ({"engine": "vllm", "vllm_url": "http://a", "vllm_args": "--seed 1"}, "--vllm_args is for"),
        ({"engine": "vllm-in-process", "vllm_url": "http://a"}, "takes no --vllm_url"),
        ({"engine": "vllm", "vllm_start_timeout_s": 0.0}, "--vllm_start_timeout_s is 0.0"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RecipeArguments(**options).check_engine()


def test_vllm_is_tried_with_an_adapter_such_as_the_run_trains(
    opened: _Opened, tmp_path: Any, make_policy: Any
) -> None:
    pytest.importorskip("peft")
    arguments = RecipeArguments(engine="vllm", use_peft=True, lora_r=3, lora_sync="adapter")
    policy = Policy("tiny", make_policy(), cast(Any, None))
    arguments.open_engines(policy, _config(tmp_path), peft_config=arguments.peft_config)
    assert opened.options.lora_sync == "adapter"
    assert opened.sizes["trial"].adapter.rank == 3
    arguments = RecipeArguments(engine="vllm")
    arguments.open_engines(policy, _config(tmp_path))
    assert opened.sizes["trial"] is None
    with pytest.raises(UsageError, match="--lora_sync merged is for --use_peft true"):
        RecipeArguments(engine="vllm", lora_sync="merged").open_engines(policy, _config(tmp_path))


def test_an_engine_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.inference.vllm.server_process._installed", lambda: None)
    for engine in ("vllm", "vllm-in-process"):
        with pytest.raises(MissingExtraError, match=r"agentenv-rl\[vllm\]"):
            RecipeArguments(engine=engine).check_engine()


def test_a_deterministic_run_needs_the_engine_of_this_process(opened: _Opened, tmp_path: Any) -> None:
    config = _config(tmp_path, mode="sync", deterministic=True)
    with pytest.raises(UsageError, match="--deterministic needs --engine transformers, not vllm"):
        RecipeArguments(engine="vllm").open_engines("policy", config)


def test_transformers_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(module, "open_engine", lambda policy, **sizes: (policy, sizes))
    arguments = RecipeArguments()
    arguments.check_engine()
    (engine,) = arguments.open_engines("policy", _config(tmp_path))
    assert engine == ("policy", {"max_batch": 6, "max_length": 300})
