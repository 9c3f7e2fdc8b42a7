"""SAO learns: a two-turn bandit whose reward is in the tokens, and a control whose reward is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentenv_trainers import SAOConfig, SAOTrainer
from agentenv_trainers.testing import BanditController

GOOD = frozenset(range(12, 24))
"""Half of the vocabulary: a random policy scores 0.5."""
STEPS = 25


def share_of_good(tokens: Sequence[int]) -> float:
    return sum(token in GOOD for token in tokens) / len(tokens)


def learn(
    make_policy: Callable[..., Qwen3ForCausalLM],
    make_config: Callable[..., SAOConfig],
    tokenizer: PreTrainedTokenizerFast,
    reward: Callable[[Sequence[int]], float],
    **changes: Any,
) -> list[float]:
    """Share of good tokens in each batch, whatever was rewarded."""
    shares: list[float] = []

    def watched(tokens: Sequence[int]) -> float:
        shares.append(share_of_good(tokens))
        return reward(tokens)

    policy = make_policy()
    controller = BanditController(policy, batch_size=32, reward=watched)
    config = make_config(
        per_device_train_batch_size=32,
        max_steps=STEPS,
        learning_rate=5e-3,
        critic_learning_rate=5e-3,
        logging_strategy="no",
        **changes,
    )
    SAOTrainer(policy, config, controller, tokenizer).train()
    return [sum(shares[i : i + 32]) / 32 for i in range(0, len(shares), 32)]


def test_the_rewarded_tokens_become_frequent(
    make_policy: Callable[..., Qwen3ForCausalLM],
    make_config: Callable[..., SAOConfig],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    shares = learn(make_policy, make_config, tokenizer, share_of_good)
    assert 0.35 < shares[0] < 0.65
    assert sum(shares[-5:]) / 5 > 0.85


def test_a_reward_that_has_nothing_to_do_with_the_tokens_teaches_nothing(
    make_policy: Callable[..., Qwen3ForCausalLM],
    make_config: Callable[..., SAOConfig],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random(3)
    shares = learn(make_policy, make_config, tokenizer, lambda tokens: float(rng.random() < 0.5))
    assert 0.3 < sum(shares[-5:]) / 5 < 0.7
