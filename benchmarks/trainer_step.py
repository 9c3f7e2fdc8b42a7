"""What a training step costs: our data path against TRL's GRPOTrainer, SAO against GRPO, even and uneven episodes.

    python benchmarks/trainer_step.py --json step.json --check

The same policy (a random Qwen3, made here), the same episodes, the same optimizer; generation is left out on both
sides. TRL gets the episodes as its own code lays them out: prompts padded on the left and completions on the right, to
the longest of the batch, then shuffled and split. A step is everything between two optimizer steps: fetching the batch,
collating, forward and backward passes, the optimizer, logging. The trainers take turns, a few steps each, round after
round; a figure is the median over rounds of the ratio within a round. Sizes, passes and threads are printed.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer as TRLTrainer
from trl.trainer.utils import pad

from agentenv.report.bars import Bar, print_bars
from agentenv.trajectory import Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOConfig, SAOTrainer
from agentenv_trainers.testing import ReplayController

VOCABULARY = 4096
ROWS, PASSES = 8, 2
GROUP = 4
STEPS_PER_ROUND = 2
EVEN_TOKENS = 256
UNEVEN_TOKENS = (64, 512)
TURN = (24, 40)
"""Tokens of an action and of the observation after it."""


def make_policy() -> Qwen3ForCausalLM:
    """A random Qwen3 of 4 million parameters."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=768,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def make_episodes(lengths: Sequence[int], seed: int) -> list[Trajectory]:
    """Episodes of given lengths in tokens: a short prompt, then actions and observations in turn."""
    rng = random.Random(seed)
    order = list(lengths)
    rng.shuffle(order)
    episodes = []
    for number, length in enumerate(order):
        prompt = 24
        mask: list[bool] = []
        while len(mask) < length - prompt:
            mask += [True] * TURN[0] + [False] * TURN[1]
        mask = mask[: length - prompt]
        mask[-1] = True
        episodes.append(
            Trajectory(
                prompt_ids=[rng.randrange(2, VOCABULARY) for _ in range(prompt)],
                completion_ids=[rng.randrange(2, VOCABULARY) for _ in mask],
                rollout_logprobs=[-8.3 + rng.gauss(0, 0.1) if is_action else 0.0 for is_action in mask],
                action_mask=mask,
                policy_versions=[0 if is_action else -1 for is_action in mask],
                reward=float(number % GROUP == 0),
                terminated=True,
                end_reason="terminated",
                episode_id=str(number),
                group_id=str(number // GROUP),
                task_id=str(number // GROUP),
            )
        )
    return episodes


class StepClock(TrainerCallback):
    """Seconds of each step, from its beginning to the beginning of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._last is not None:
            self.seconds.append(time.perf_counter() - self._last)


class PaddedGRPO(TRLTrainer):
    """``trl.GRPOTrainer`` on episodes that are given; layout, split, loss and optimizer are TRL's."""

    def __init__(self, *args: Any, episodes: Sequence[Trajectory], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episodes = episodes

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        def column(name: str, side: str = "right", dtype: torch.dtype = torch.long) -> torch.Tensor:
            rows = [torch.tensor(getattr(t, name), dtype=dtype) for t in self._episodes]
            return pad(rows, padding_value=0, padding_side=side)

        def ones(name: str, side: str) -> torch.Tensor:
            rows = [torch.ones(len(getattr(t, name)), dtype=torch.long) for t in self._episodes]
            return pad(rows, padding_value=0, padding_side=side)

        rewards = torch.tensor([t.reward for t in self._episodes]).view(-1, GROUP)
        scaled = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        tool_mask = column("action_mask")
        return {
            "prompt_ids": column("prompt_ids", "left"),
            "prompt_mask": ones("prompt_ids", "left"),
            "completion_ids": column("completion_ids"),
            "completion_mask": ones("completion_ids", "right"),
            "tool_mask": tool_mask,
            "advantages": scaled.view(-1),
            "old_per_token_logps": column("rollout_logprobs", dtype=torch.float32),
            "num_items_in_batch": tool_mask.sum().float(),
        }


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words; no text passes through it."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")


def settings(folder: Path) -> dict[str, Any]:
    """What all trainers have in common."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": PASSES,
        "max_steps": STEPS_PER_ROUND,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "max_grad_norm": 1.0,
    }


def make_trainers(episodes: Sequence[Trajectory], folder: Path) -> dict[str, tuple[Any, StepClock]]:
    """TRL's GRPO, our GRPO and SAO on the same episodes."""
    common = settings(folder)
    rewards: list[Callable[..., list[float]]] = [lambda completions, **_: [0.0] * len(completions)]
    source = ReplayController(lambda step: list(episodes))
    trainers: dict[str, Any] = {
        "TRL GRPO": PaddedGRPO(
            make_policy(),
            episodes=episodes,
            reward_funcs=rewards,
            args=TRLConfig(**common, num_generations=GROUP, max_completion_length=max(UNEVEN_TOKENS)),
            train_dataset=Dataset.from_dict({"prompt": ["t2"] * len(episodes)}),
            processing_class=tokenizer(),
        ),
        "GRPO": GRPOTrainer(make_policy(), GRPOConfig(**common, group_size=GROUP), source, tokenizer()),
        "SAO, K = 2": SAOTrainer(make_policy(), SAOConfig(**common), source, tokenizer()),
        "SAO, K = 1": SAOTrainer(make_policy(), SAOConfig(**common, critic_updates=1), source, tokenizer()),
    }
    clocks = {name: StepClock() for name in trainers}
    for name, trainer in trainers.items():
        trainer.add_callback(clocks[name])
        trainer.remove_callback(PrinterCallback)
    return {name: (trainer, clocks[name]) for name, trainer in trainers.items()}


def measure(lengths: Sequence[int], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each trainer, one number a round."""
    trainers = make_trainers(make_episodes(lengths, seed=1), folder)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(rounds + 1):
        for name, (trainer, clock) in trainers.items():
            clock.seconds.clear()
            trainer.train()
            if number:  # the first round warms up
                seconds[name].append(statistics.fmean(clock.seconds))
        print(
            f"round {number} of {rounds}: { ({n: round(s[-1], 2) for n, s in seconds.items() if s}) }",
            file=sys.stderr,
        )
    return seconds


def ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write figures and bars to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    count = ROWS * PASSES
    low, high = UNEVEN_TOKENS
    cases = {
        "even": [EVEN_TOKENS] * count,
        "uneven": [round(low + (high - low) * i / (count - 1)) for i in range(count)],
    }
    size = sum(p.numel() for p in make_policy().parameters())
    print(
        f"policy: {size / 1e6:.1f} M parameters, float32, {options.threads} threads; {PASSES} passes of {ROWS} episodes"
    )
    print(f"even: {EVEN_TOKENS} tokens each; uneven: {low} to {high}, evenly spread (1:{high // low})")
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, lengths in cases.items():
            seconds[case] = measure(lengths, options.rounds, Path(folder))
            tokens = sum(t.num_action_tokens for t in make_episodes(lengths, seed=1))
            for name, values in seconds[case].items():
                print(
                    f"{case:<7} {name:<11} {statistics.median(values):7.3f} s a step, {tokens} trained tokens"
                )
    bars = [
        Bar(
            "even: time per trained token, our GRPO / TRL's",
            ratio(seconds["even"], "GRPO", "TRL GRPO"),
            "<=",
            1.0,
            "x",
        ),
        Bar("uneven: TRL's padded GRPO / ours", ratio(seconds["uneven"], "TRL GRPO", "GRPO"), ">=", 1.5, "x"),
        Bar("even: SAO with K = 2 / our GRPO", ratio(seconds["even"], "SAO, K = 2", "GRPO"), "<=", 3.0, "x"),
    ]
    uneven_sao = ratio(seconds["uneven"], "SAO, K = 2", "GRPO")
    print(f"uneven: SAO with K = 2 / our GRPO: {uneven_sao:.3g} x, without a bar")
    held = print_bars(bars)
    if options.json:
        figures = {
            "bars": [bar.as_dict() for bar in bars],
            "uneven_sao": uneven_sao,
            "seconds": seconds,
            "parameters": size,
        }
        options.json.write_text(json.dumps(figures, indent=1))
    return int(options.check and not held)


if __name__ == "__main__":
    raise SystemExit(main())
