"""SAO over the real controller and engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentenv import BaseEnv
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController
from agentenv.testing import ByteTokenizer
from agentenv_trainers import SAOConfig, SAOTrainer


class ParityEnv(BaseEnv):
    """Two turns; the reward is whether the text of the last one has an even sum of characters."""

    max_turns = 2

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._turns = 0
        return f"Task {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        done = self._turns == 2
        return "Go on.", float(done and sum(map(ord, action)) % 2 == 0), done, False, {}


MakeConfig = Callable[..., SAOConfig]


@pytest.fixture
def run(make_policy: Callable[..., Qwen3ForCausalLM], make_config: MakeConfig) -> Callable[..., Any]:
    """Train; returns the trainer and the controller's counts at the end."""

    def train(resume: str | None = None, **changes: Any) -> tuple[SAOTrainer, dict[str, Any]]:
        size = ByteTokenizer.vocab_size
        # TRL wants a tokenizer of transformers; only its special ids are used.
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
        policy = make_policy(vocab_size=size, max_position_embeddings=256)
        config = make_config(
            num_envs=4,
            max_turns=2,
            max_tokens_per_turn=5,
            max_tokens_per_episode=256,
            learning_rate=1e-2,
            **changes,
        )
        engine = TransformersEngine(policy, ByteTokenizer(), max_batch=4, max_length=256)
        with AsyncController(
            ParityEnv, LLMProxy([engine]), ByteTokenizer(), config.rollout_config()
        ) as controller:
            trainer = SAOTrainer(policy, config, controller, tokenizer)
            trainer.train(resume_from_checkpoint=resume)
            return trainer, controller.counts()

    return train


def test_on_policy_the_importance_ratio_is_one_so_that_bounds_of_one_percent_mask_nothing(
    run: Callable[..., Any],
) -> None:
    trainer, counts = run(mode="sync", clip_low=0.01, clip_high=0.01, max_steps=3)
    logs = trainer.state.log_history[:3]
    assert [entry["masked_share"] for entry in logs] == [0.0, 0.0, 0.0]
    assert [entry["staleness_max"] for entry in logs] == [0.0, 0.0, 0.0]
    assert counts["consumed"] == 24
    assert all(entry["episodes_per_s"] > 0 and 0 < entry["reward"] < 1 for entry in logs)


def test_off_policy_the_same_bounds_mask_and_staleness_stays_within_alpha(run: Callable[..., Any]) -> None:
    trainer, _ = run(asynchrony=1.0, clip_low=0.01, clip_high=0.01, max_steps=3)
    logs = trainer.state.log_history[:3]
    assert max(entry["masked_share"] for entry in logs) > 0.1
    assert all(entry["staleness_max"] <= 1.0 for entry in logs)


def test_a_run_is_continued_with_the_controllers_ledger(run: Callable[..., Any], tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2}
    run(max_steps=2, **settings)
    trainer, counts = run(resume=str(tmp_path / "run" / "checkpoint-2"), max_steps=4, **settings)
    assert trainer.state.global_step == 4
    assert counts["consumed"] == 32
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())
