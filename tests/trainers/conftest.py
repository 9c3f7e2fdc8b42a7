"""Tiny models, a tokenizer and trajectories for the trainers' tests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from agentenv.testing import ByteTokenizer  # noqa: E402
from agentenv.trajectory import Trajectory  # noqa: E402
from agentenv_trainers import SAOConfig, SAOTrainer  # noqa: E402
from agentenv_trainers.testing import ReplayController  # noqa: E402

VOCABULARY = 24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")


def make_byte_vocabulary() -> PreTrainedTokenizerFast:
    """What TRL needs of a tokenizer (its special ids) beside a ``ByteTokenizer``."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(ByteTokenizer.vocab_size)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")


def make_tiny_policy(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 of about 10,000 parameters."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes}))


def make_episode_list(
    count: int, seed: int = 0, *, truncated: bool = False, version: int = 0
) -> list[Trajectory]:
    """Random episodes of several turns; the same seed gives the same ones."""
    rng = random.Random(seed)
    return [_episode(rng, f"{seed}-{i}", truncated, version) for i in range(count)]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def make_policy() -> Callable[..., Qwen3ForCausalLM]:
    return make_tiny_policy


@pytest.fixture(scope="session")
def make_episodes() -> Callable[..., list[Trajectory]]:
    return make_episode_list


def _episode(rng: random.Random, name: str, truncated: bool, version: int) -> Trajectory:
    completion: list[int] = []
    mask: list[bool] = []
    turns = rng.randint(1, 3)
    for turn in range(turns):
        for is_action, length in ((True, rng.randint(1, 5)), (False, rng.randint(1, 4))):
            if is_action or turn < turns - 1 or rng.random() < 0.5:
                completion += [rng.randrange(VOCABULARY) for _ in range(length)]
                mask += [is_action] * length
    return Trajectory(
        prompt_ids=[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))],
        completion_ids=completion,
        rollout_logprobs=[min(-0.01, -3.2 + rng.gauss(0, 0.5)) if m else 0.0 for m in mask],
        action_mask=mask,
        policy_versions=[version if m else -1 for m in mask],
        reward=float(rng.random() < 0.5),
        terminated=not truncated,
        truncated=truncated,
        end_reason="max_turns" if truncated else "terminated",
        episode_id=name,
        start_version=version,
        turns=turns,
    )


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., SAOConfig]:
    def make(**changes: Any) -> SAOConfig:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 8,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "save_strategy": "no",
            "use_cpu": True,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
        }
        return SAOConfig(**{**settings, **changes})

    return make


@pytest.fixture
def make_trainer(
    make_policy: Callable[..., Qwen3ForCausalLM],
    make_config: Callable[..., SAOConfig],
    make_episodes: Callable[..., list[Trajectory]],
    tokenizer: PreTrainedTokenizerFast,
) -> Callable[..., SAOTrainer]:
    """A trainer on random episodes (those of step n have seed n); other keyword arguments are settings."""

    def make(
        *,
        controller: Any = None,
        callbacks: Any = (),
        policy: Any = None,
        critic: Any = None,
        peft_config: Any = None,
        critic_peft_config: Any = None,
        **changes: Any,
    ) -> SAOTrainer:
        config = make_config(**changes)
        source = controller or ReplayController(
            lambda step: make_episodes(config.trajectories_per_step, seed=step, version=step)
        )
        return SAOTrainer(
            policy or make_policy(),
            config,
            source,
            tokenizer,
            critic=critic,
            callbacks=callbacks,
            peft_config=peft_config,
            critic_peft_config=critic_peft_config,
        )

    return make


TRAINING_PROGRAM = Path(__file__).with_name("run_training.py")
SMALL_RUN: dict[str, Any] = {
    "mode": "sync",
    "deterministic": True,
    "num_envs": 5,
    "max_tokens_per_turn": 6,
    "max_tokens_per_episode": 256,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
SMALL_RUN_OF: dict[str, dict[str, Any]] = {
    "sao": {"critic_learning_rate": 1e-2, "value_pretrain_episodes": 8, "value_pretrain_steps": 2},
    "grpo": {"group_size": 4},
}


@dataclass
class Finished:
    """What a run of ``run_training.py`` left."""

    code: int
    stderr: str
    steps: dict[int, dict[str, Any]]
    """Numbers and digests by training step."""


@pytest.fixture
def small_run() -> Callable[[str], dict[str, Any]]:
    """Settings of a small run over ``run_training.py``, by algorithm."""
    return lambda algorithm: {**SMALL_RUN, **SMALL_RUN_OF[algorithm]}


@pytest.fixture
def run_training(tmp_path: Path) -> Callable[..., Finished]:
    """Run ``run_training.py``: over a launcher's command line, or alone."""

    def run(
        name: str,
        algorithm: str,
        *,
        launcher: tuple[str, ...] = (),
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Finished:
        log = tmp_path / f"{name}.jsonl"
        told = {
            "algorithm": algorithm,
            "log": str(log),
            "settings": {
                **SMALL_RUN,
                **SMALL_RUN_OF[algorithm],
                "output_dir": str(tmp_path / name),
                **settings,
            },
            **(options or {}),
        }
        done = subprocess.run(
            [sys.executable, *launcher, str(TRAINING_PROGRAM), json.dumps(told)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        steps = {line["step"]: line for line in map(json.loads, lines)}
        return Finished(done.returncode, done.stderr, steps)

    return run
