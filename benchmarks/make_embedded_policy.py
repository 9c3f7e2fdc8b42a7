"""Make the policy that the SWE recipe starts from, and that ships in the package.

    python benchmarks/make_embedded_policy.py --output_dir envs/agentenv_envs/swe/policy

A small Qwen3 with a tokenizer trained on the environment's own texts learns from scripted demonstrations on
generated training tasks; no sandbox is needed, the demonstrations are simulated. First it learns to read: the
demonstrators' wrong edits are shown but not imitated. Then it imitates a mediocre demonstrator in everything.
Everything is drawn from --seed. A line every hundred steps says how it goes; after each phase comes the share of
held-out tasks whose first edit is right, and what it was is kept in made.json. It takes about five minutes.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import (
    ASSISTANT,
    END,
    READ_WEIGHT,
    USER,
    Demonstrations,
    Row,
    build_model,
    byte_level,
    special_tokens,
    train,
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
        self, tokenizer: PreTrainedTokenizerFast, skill: Skill, *, seed: int, imitate_wrong: bool
    ) -> None:
        super().__init__(tokenizer, random.Random(f"demonstrations:{seed}:{imitate_wrong}"))
        self.skill = skill
        self.imitate_wrong = imitate_wrong

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


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, split: str, *, tasks: int, seed: int
) -> dict[str, float]:
    """First-guess accuracy: how often the first edit is a right one; sampled at temperature 1, and greedy.

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


def main() -> None:
    """Build, train in two phases, evaluate, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab_size", type=int, default=768)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--reading_steps", type=int, default=800)
    parser.add_argument("--mediocre_steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of AdamW, in the first phase")
    parser.add_argument("--muon_learning_rate", type=float, default=3e-3, help="in the first phase")
    parser.add_argument("--evaluation_tasks", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(args.seed, args.vocab_size)
    model = build_model(tokenizer, args.hidden_size, args.layers)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    phases = {
        "reading": (READING, False, args.reading_steps, 1.0),
        "mediocre": (MEDIOCRE, True, args.mediocre_steps, 0.25),
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    for phase, (skill, imitate_wrong, steps, scale) in phases.items():
        demonstrations = Repairs(tokenizer, skill, seed=args.seed, imitate_wrong=imitate_wrong)
        train(
            model,
            demonstrations,
            steps=steps,
            batch_size=args.batch_size,
            lr=scale * args.learning_rate,
            muon_lr=scale * args.muon_learning_rate,
        )
        results[phase] = {
            split: evaluate(model, tokenizer, split, tasks=args.evaluation_tasks, seed=args.seed)
            for split in ("heldout", "heldout_families")
        }
        print(f"first guess after {phase}: {json.dumps(results[phase])}", flush=True)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    made = {"arguments": {k: v for k, v in vars(args).items() if k != "output_dir"}, "first_guess": results}
    (args.output_dir / "made.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
