"""What the embedded policy of SWE-v0 is shown: scripted repairs of generated modules; no sandbox is needed.

First it learns to read: the demonstrators' wrong edits are shown but not imitated. Then it imitates a mediocre
demonstrator in everything. What counts is how often the first edit is right.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Literal

import torch
from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import (
    ASSISTANT,
    END,
    READ_WEIGHT,
    USER,
    Course,
    Demonstrations,
    Row,
    byte_level,
    special_tokens,
    with_chat_template,
)

from agentenv_envs.swe.embedded.demonstrations import MEDIOCRE, Skill, first_edit, next_edit, simulate
from agentenv_envs.swe.embedded.families import FAMILIES, NAMES
from agentenv_envs.swe.embedded.tasks import EMBEDDED_WORKDIR, TEST_COMMAND, EmbeddedTask, generate_task
from agentenv_envs.swe.protocols import as_action, first_observation

#: While it learns to read, wrong edits happen (so that there is something to retry) but are not imitated.
READING = Skill(edit_right=0.5, test=0.6, retry=0.8)


def build_tokenizer(seed: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the environment's texts, with whole tokens for the parts of commands."""
    tokenizer = byte_level()
    whole = [first_observation("", workdir=EMBEDDED_WORKDIR, test_command=TEST_COMMAND)]
    whole += ["```bash\n", "\n```", "cat -n app.py", TEST_COMMAND, "submit", "sed -i.bak '", "sed '"]
    whole += ["/' app.py.bak >app.py", "/' app.py", "/", "(no output)", "\n[exit code 1]", "FAIL "]
    whole += [f"{line}s/" for line in range(1, 31)]
    whole += ["     1\t", *(f"\n{line:6d}\t" for line in range(2, 31))]
    whole += ["<=", ">=", "==", "!=", "<", ">", "+", "-", "*"]
    words = ["min", "max", "and", "or", "True", "False"]
    added = [AddedToken(text, normalized=False) for text in whole]
    added += [AddedToken(text, normalized=False, single_word=True) for text in words]
    special = special_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added) - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(added)
    return with_chat_template(tokenizer)


def _corpus(seed: int) -> Iterator[str]:
    """What the agent reads: issues, modules and test output, and every name of every family."""
    rng = random.Random(f"corpus:{seed}")
    for _ in range(2_000):
        task = generate_task(rng.randrange(2**40), levels=(1, 2, 3, 4))
        yield task.issue
        turns, _ = simulate(task, MEDIOCRE, rng) if task.level < 3 else ([("", task.files["app.py"])], False)
        yield from (observation for _, observation in turns)
    known = [name for pool in NAMES.values() for name in pool]
    known += [name for functions in FAMILIES.values() for f in functions for name in f.names]
    for name in known:
        yield from [f"{name} {name}("] * 50


#: Right edits are where reading is learned; while it is, they weigh more than the rest of what is said.
EDIT_WEIGHT = 4.0


class Repairs(Demonstrations):
    """Tokenised demonstrations of one skill."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, phase: Literal["reading", "mediocre"], *, seed: int
    ) -> None:
        self.imitate_wrong = phase == "mediocre"
        super().__init__(tokenizer, random.Random(f"demonstrations:{seed}:{self.imitate_wrong}"))
        self.skill = MEDIOCRE if self.imitate_wrong else READING

    def one(self) -> Row:
        """Token ids and loss weights: 1 on imitated actions, a little on what is only read."""
        task = generate_task(self.rng.randrange(2**40))
        turns, _ = simulate(task, self.skill, self.rng)
        right = {as_action(form(edit)) for edit in task.gold_edits for form in (first_edit, next_edit)}
        prompt = first_observation(task.issue, workdir=EMBEDDED_WORKDIR, test_command=TEST_COMMAND)
        ids = self.heard(prompt)
        weights = [READ_WEIGHT] * len(ids)
        for action, observation in turns:
            said = self.said(action)
            imitated = self.imitate_wrong or "sed" not in action or action in right
            heard = self.heard(observation) if observation else []
            ids = ids + said + heard
            said_weight = EDIT_WEIGHT if action in right and not self.imitate_wrong else 1.0
            weights += [said_weight if imitated else 0.0] * len(said) + [READ_WEIGHT] * len(heard)
        return ids, weights


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """First-guess accuracy on held-out tasks and on held-out families of them."""
    return {
        split: first_guess(model, tokenizer, split, tasks=args.evaluation_tasks, seed=args.seed)
        for split in ("heldout", "heldout_families")
    }


@torch.no_grad()
def first_guess(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, split: str, *, tasks: int, seed: int
) -> dict[str, float]:
    """How often the first edit is a right one; sampled at temperature 1, and greedy.

    The scripted first look is given, then the edit is generated.
    """
    model.eval()
    torch.manual_seed(seed)
    totals = {"sampled": 0, "greedy": 0}
    for start in range(0, tasks, 64):
        chosen = [generate_task(seed + i, split=split) for i in range(start, min(tasks, start + 64))]
        prompts = [_edit_prompt(task) for task in chosen]
        batch = tokenizer(
            prompts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False
        )
        for name, sample in (("sampled", True), ("greedy", False)):
            out = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=sample,
                temperature=1.0 if sample else None,
                top_k=0 if sample else None,
                top_p=None,
                max_new_tokens=16,
                pad_token_id=tokenizer.pad_token_id,
            )
            for task, row in zip(chosen, out[:, batch["input_ids"].shape[1] :], strict=True):
                text = tokenizer.decode(row, skip_special_tokens=True)
                totals[name] += text in {as_action(first_edit(edit)) for edit in task.gold_edits}
    return {name: total / tasks for name, total in totals.items()}


def _edit_prompt(task: EmbeddedTask) -> str:
    turns, _ = simulate(task, MEDIOCRE, random.Random(0))
    prompt = first_observation(task.issue, workdir=EMBEDDED_WORKDIR, test_command=TEST_COMMAND)
    return f"{USER}{prompt}{END}{ASSISTANT}{turns[0][0]}{END}{USER}{turns[0][1]}{END}{ASSISTANT}"


COURSE = Course(
    build_tokenizer=build_tokenizer,
    lessons=Repairs,
    evaluate=evaluate,
    results="first_guess",
    defaults={
        "vocab_size": 768,
        "hidden_size": 128,
        "layers": 3,
        "reading_steps": 800,
        "mediocre_steps": 300,
        "batch_size": 16,
        "learning_rate": 2e-3,
        "muon_learning_rate": 3e-3,
        "evaluation_tasks": 512,
    },
)
