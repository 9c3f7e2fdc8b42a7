"""Make the policies for the text environments that ship in the package.

    python benchmarks/make_text_policy.py --course pair --output_dir envs/agentenv_envs/text/policy
    python benchmarks/make_text_policy.py --course all --output_dir envs/agentenv_envs/text/policy_all

One plays KeyDoor and StyledReply and is what the learning experiments start from; the other plays all four. A very
small Qwen3, whose tokenizer has whole tokens for the environments' words, cells and numbers, learns from each
environment's own demonstrator on training tasks. First it learns to read: the demonstrator's mistakes are shown but not
imitated. Then it imitates a mediocre demonstrator in everything, so that the right action keeps a real probability in
every state and reinforcement learning has something to raise. Everything is drawn from --seed. A line every hundred
steps says how it goes; then the policy plays held-out tasks through the rollout, sampled at temperature 1, and the
success is kept in made.json.
"""

import argparse
import functools
import json
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import warm_start
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import (
    Demonstrations,
    Row,
    build_model,
    byte_level,
    measured,
    special_tokens,
    train,
    with_chat_template,
)

import agentenv
from agentenv.trajectory import Trajectory
from agentenv_envs.text.key_door import ACTIONS, cell_name
from agentenv_envs.text.styled_reply import COLOURS, FORMS
from agentenv_envs.text.task_env import TextTaskEnv
from agentenv_envs.text.tool_arithmetic import TOOLS


@dataclass(frozen=True)
class Lesson:
    """What is demonstrated of an environment.

    Args:
        share: of the batches.
        rows: episodes per batch, in units of --batch_size: more where they are short.
        reading: skill of the demonstrator while the policy learns to read.
        mediocre: its skill while the policy imitates everything.
    """

    share: float
    rows: int
    reading: float
    mediocre: float


@dataclass(frozen=True)
class Course:
    """What a policy learns, by environment, and in how many steps."""

    lessons: dict[str, Lesson]
    reading_steps: int
    mediocre_steps: int


COURSES = {
    "pair": Course(
        {
            "KeyDoor-v0": Lesson(share=0.55, rows=1, reading=0.75, mediocre=0.66),
            "StyledReply-v0": Lesson(share=0.45, rows=4, reading=0.9, mediocre=0.72),
        },
        reading_steps=900,
        mediocre_steps=200,
    ),
    "all": Course(
        {
            "KeyDoor-v0": Lesson(share=0.25, rows=1, reading=0.75, mediocre=0.7),
            "StyledReply-v0": Lesson(share=0.2, rows=4, reading=0.9, mediocre=0.72),
            "GuessNumber-v0": Lesson(share=0.25, rows=2, reading=0.75, mediocre=0.5),
            "ToolArithmetic-v0": Lesson(share=0.3, rows=2, reading=0.75, mediocre=0.75),
        },
        reading_steps=2400,
        mediocre_steps=300,
    ),
}


def whole_tokens(names: Collection[str]) -> list[str]:
    """Texts of these environments that are one token each; everything else is spelt in bytes."""
    first = {name: agentenv.make(name).reset(seed=0)[0] for name in names}
    numbers = [f"{tens}{ones}" for tens in range(10) for ones in range(10)]
    texts: list[str] = []
    if "KeyDoor-v0" in names:
        texts += [first["KeyDoor-v0"].partition(" You are at ")[0], " You are at ", ". The key is at "]
        texts += [
            ". The door is at ",
            ". The key is here.",
            ". The door is here.",
            "The door opens.",
            *ACTIONS,
        ]
        events = ("", "A wall stops you. ", "There is nothing to take. ", "There is nothing to open. ")
        texts += [f"{event}You are at " for event in (*events, "You have the key. ", "The door is locked. ")]
        texts += [cell_name((x, y)) for x in range(6) for y in range(6)]
    texts += numbers
    if "StyledReply-v0" in names:
        texts += ["Prices: ", ". How much is ", *COLOURS, *(f" {price}" for price in range(1, 10))]
        texts += [form.format("") for form in FORMS.values() if form != "{}"]
    if "GuessNumber-v0" in names:
        texts += [first["GuessNumber-v0"].partition("It is from ")[0] + "It is from ", " to "]
        texts += ["higher", "lower"]
    if "ToolArithmetic-v0" in names:
        texts += [
            first["ToolArithmetic-v0"].partition("(")[0] + "(",
            *(f"{tool} " for tool in TOOLS),
            "answer ",
        ]
        texts += [f"{before} {symbol} " for before in ("", ")") for symbol in "+-*"]
        texts += [f" {number}" for number in numbers]  # or a price would be the first half of an operand
    return texts


def build_tokenizer(names: Collection[str]) -> PreTrainedTokenizerFast:
    """Bytes, and `whole_tokens` of these environments; nothing is trained."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_level({byte: number for number, byte in enumerate(alphabet)})
    tokenizer.add_special_tokens(special_tokens())
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole_tokens(names)])
    return with_chat_template(tokenizer)


class Episodes(Demonstrations):
    """Tokenised episodes of the environments' demonstrators on training tasks.

    Args:
        tokenizer: of the policy.
        lessons: by environment.
        phase: "reading" or "mediocre"; in the second, mistakes are imitated too.
        seed: of the tasks and of chance.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        lessons: dict[str, Lesson],
        phase: Literal["reading", "mediocre"],
        *,
        seed: int,
    ) -> None:
        self.imitate_wrong = phase == "mediocre"
        super().__init__(tokenizer, random.Random(f"demonstrations:{seed}:{self.imitate_wrong}"))
        self.lessons = lessons
        self.skills: dict[str, float] = {name: getattr(lesson, phase) for name, lesson in lessons.items()}
        self.envs: dict[str, TextTaskEnv[Any]] = {name: agentenv.make(name) for name in lessons}  # type: ignore[misc]

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """See `Demonstrations.batches`; each batch is of one environment."""
        names = list(self.envs)
        shares = [self.lessons[name].share for name in names]
        while True:
            (name,) = self.rng.choices(names, weights=shares)
            yield self.pad([self.episode(name) for _ in range(size * self.lessons[name].rows)])

    def episode(self, name: str) -> Row:
        """Token ids and loss weights of an episode: 1 on imitated actions, 0 on what is read."""
        env, skill = self.envs[name], self.skills[name]
        observation, _ = env.reset(seed=self.rng.randrange(2**31))
        ids: list[int] = []
        weights: list[float] = []
        ended = False
        while not ended:
            heard = self.heard(observation)
            right = env.solutions()
            action = env.demonstrate(skill, self.rng)
            said = self.said(action)
            imitated = self.imitate_wrong or action in right
            ids += heard + said
            weights += [0.0] * len(heard) + [float(imitated)] * len(said)
            observation, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
        return ids, weights


def play(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str, *, episodes: int
) -> list[Trajectory]:
    """Held-out episodes through the rollout, sampled at temperature 1."""
    held_out = functools.partial(agentenv.make, name, split="heldout")
    limits = {"max_tokens_per_turn": 12, "max_tokens_per_episode": 512}
    return warm_start.play(model, tokenizer, held_out, episodes=episodes, **limits)


def main() -> None:
    """Build, train in two phases, evaluate, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--course", choices=COURSES, default="all", help="what is learnt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--intermediate_size", type=int, default=160)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--reading_steps", type=int, help="default: the course's")
    parser.add_argument("--mediocre_steps", type=int, help="default: the course's")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="of AdamW, in the first phase")
    parser.add_argument("--muon_learning_rate", type=float, default=6e-3, help="in the first phase")
    parser.add_argument("--evaluation_episodes", type=int, default=512)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    course = COURSES[args.course]
    for name in ("reading_steps", "mediocre_steps"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(course, name))
    tokenizer = build_tokenizer(course.lessons)
    model = build_model(
        tokenizer,
        args.hidden_size,
        args.layers,
        intermediate_size=args.intermediate_size,
        max_position_embeddings=1024,
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens")
    results: dict[str, dict[str, Any]] = {}
    phases: tuple[tuple[Literal["reading", "mediocre"], int, float], ...] = (
        ("reading", args.reading_steps, 1.0),
        ("mediocre", args.mediocre_steps, 0.25),
    )
    for phase, steps, scale in phases:
        train(
            model,
            Episodes(tokenizer, course.lessons, phase, seed=args.seed),
            steps=steps,
            batch_size=args.batch_size,
            lr=scale * args.learning_rate,
            muon_lr=scale * args.muon_learning_rate,
        )
        results[phase] = {
            name: measured(play(model, tokenizer, name, episodes=args.evaluation_episodes))
            for name in course.lessons
        }
        print(f"held-out tasks after {phase}: {json.dumps(results[phase])}", flush=True)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    made = {
        "arguments": {k: v for k, v in vars(args).items() if k != "output_dir"},
        "parameters": parameters,
        "seconds": round(time.monotonic() - started),
        "heldout": results,
    }
    (args.output_dir / "made.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
