"""Supervised warm starts of small policies: what make_embedded_policy.py and make_text_policy.py share.

Invariants:
- texts are put together as the chat template puts them together, so that rollouts show a policy what it was trained on;
- everything is drawn from the seeds that the callers give.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentenv.environment_source import EnvFactory
from agentenv.evaluation import success_rate
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.trajectory import Trajectory

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Row = tuple[list[int], list[float]]
"""Token ids of a demonstration, and what each weighs in the loss."""

EVALUATION_SEED = 2**31
"""First task seed of the evaluations."""

READ_WEIGHT = 0.05
"""Loss weight of tokens that the policy reads: a little helps it to learn the language of the tasks."""


def byte_level(vocabulary: Mapping[str, int] | None = None) -> Tokenizer:
    """A byte-level tokenizer in which digits stand alone; without merges as long as it is not trained.

    Args:
        vocabulary: ids of the bytes; None where it is to be trained.
    """
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), []) if vocabulary is not None else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def special_tokens() -> list[AddedToken]:
    """Padding and the parts of the chat template."""
    return [AddedToken(text, special=True, normalized=False) for text in (PAD, END, USER, ASSISTANT)]


def with_chat_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """As transformers knows it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )


class Demonstrations:
    """Batches of tokenised demonstrations; subclasses write `one`, or `batches`.

    Args:
        tokenizer: with the special tokens above.
        rng: of the order of the batches, and for the subclass.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        self.cache: dict[str, list[int]] = {}

    def one(self) -> Row:
        """The next demonstration."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids = self.cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(self.cache) < 200_000:
                self.cache[text] = ids
        return ids

    def heard(self, text: str) -> list[int]:
        """Ids of what the environment says, up to where the policy answers."""
        return self.encode(f"{USER}{text}{END}{ASSISTANT}")

    def said(self, text: str) -> list[int]:
        """Ids of an action."""
        return self.encode(f"{text}{END}")

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """ids, attention mask and weights, [size, T] each, right-padded, rows of like length together."""
        while True:
            rows = sorted((self.one() for _ in range(size * 16)), key=lambda row: len(row[0]))
            chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
            self.rng.shuffle(chunks)
            yield from map(self.pad, chunks)

    def pad(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One batch of these rows."""
        size = len(rows)
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((size, longest), self.tokenizer.pad_token_id)
        weights = torch.zeros(size, longest)
        for row, (tokens, weight) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, : len(tokens)] = torch.tensor(weight)
        return ids, (ids != self.tokenizer.pad_token_id).long(), weights


Phase = Literal["reading", "mediocre"]
"""First a policy learns to read: mistakes are shown but not imitated. Then it imitates a mediocre demonstrator."""


class Lessons(Protocol):
    """Makes the demonstrations of a phase."""

    def __call__(self, tokenizer: PreTrainedTokenizerFast, phase: Phase, *, seed: int) -> Demonstrations:
        """The demonstrations."""


@dataclass(frozen=True)
class Course:
    """How the policy of an environment is made.

    Args:
        build_tokenizer: from a seed and the size of the vocabulary.
        lessons: what is demonstrated.
        evaluate: success on held-out tasks of the policy after a phase.
        results: what made.json calls it.
        defaults: of the options, see make_embedded_policy.py.
    """

    build_tokenizer: Callable[[int, int], PreTrainedTokenizerFast]
    lessons: Lessons
    evaluate: Callable[
        [Qwen3ForCausalLM, PreTrainedTokenizerFast, argparse.Namespace], dict[str, dict[str, Any]]
    ]
    results: str
    defaults: Mapping[str, int | float]


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int, **changes: Any
) -> Qwen3ForCausalLM:
    """A small Qwen3 with random weights; `changes` are fields of its config."""
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(fields | changes)))


def train(
    model: Qwen3ForCausalLM,
    demonstrations: Demonstrations,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    muon_lr: float,
) -> None:
    """Supervised fine-tuning: Muon on the hidden matrices, AdamW on the rest, linear decay to a tenth."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    schedule = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 50) * max(0.1, 1 - 0.9 * s / steps))
        for o in optimizers
    ]
    model.train()
    started, running = time.monotonic(), 0.0
    for step, (ids, mask, weights) in zip(
        range(1, steps + 1), demonstrations.batches(batch_size), strict=False
    ):
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
        target, weight = ids[:, 1:], weights[:, 1:]
        used = weight > 0
        logits = model.lm_head(hidden[used])
        losses = torch.nn.functional.cross_entropy(logits, target[used], reduction="none")
        loss = (losses * weight[used]).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedule:
            scheduler.step()
        now = losses.detach()[weight[used] >= 1.0].mean().item()
        running = now if step == 1 else 0.99 * running + 0.01 * now
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss on actions {running:.4f}  {seconds:.0f} s", flush=True)


def play(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    make_env: EnvFactory,
    *,
    episodes: int,
    greedy: bool = False,
    **settings: Any,
) -> list[Trajectory]:
    """Episodes through the rollout, sampled at temperature 1 unless `greedy`; `settings` are of `RolloutConfig`."""
    config = RolloutConfig(**{"num_envs": 32, **settings})
    engine = TransformersEngine(
        model, tokenizer, max_batch=config.num_envs, max_length=config.max_tokens_per_episode
    )
    with AsyncController(make_env, LLMProxy([engine]), tokenizer, config) as controller:
        return controller.evaluate(None, range(EVALUATION_SEED, EVALUATION_SEED + episodes), greedy=greedy)


def measured(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Success with its interval, length, and the environment's own metrics."""
    rate = success_rate(trajectories)
    result: dict[str, Any] = {
        "success": round(rate.rate, 4),
        "interval": [round(rate.low, 4), round(rate.high, 4)],
        "episodes": rate.episodes,
        "failed": rate.failed,
        "tokens": round(statistics.mean(len(t.prompt_ids) + len(t.completion_ids) for t in trajectories), 1),
    }
    metrics = [trajectory.info.get("metrics", {}) for trajectory in trajectories]
    for key in sorted({key for one in metrics for key in one}):
        result[key] = round(statistics.mean(one.get(key, 0.0) for one in metrics), 4)
    return result
