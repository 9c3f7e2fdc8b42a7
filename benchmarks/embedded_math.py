r"""What the embedded policy of Math-v0 and MathPython-v0 is shown: problems of level 0, answered and programmed.

One policy plays both environments; their instructions tell it which one it is in.

Invariants:
- what the environment would say is made by its own code (`Speech.tell`, `format_observation`); programs that are shown
  run in this process, without a sandbox: they are the package's own, or those with a number or a sign changed;
- tasks are training tasks.
"""

import argparse
import contextlib
import functools
import io
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import (
    READ_WEIGHT,
    Course,
    Demonstrations,
    Row,
    byte_level,
    measured,
    play,
    special_tokens,
    with_chat_template,
)

import agentenv
from agentenv_envs.math_reasoning.embedded.tasks import generate_task
from agentenv_envs.math_reasoning.env import INSTRUCTION
from agentenv_envs.math_reasoning.policies import boxed
from agentenv_envs.math_reasoning.python_env import LAST_TURN
from agentenv_envs.math_reasoning.speech import BlockSpeech
from agentenv_envs.math_reasoning.task import MathTask
from agentenv_envs.swe.protocols import Malformed, format_observation

__all__ = ["COURSE"]

LEVELS: Final = (0,)
MAX_TURNS: Final = 4
"""Of an episode with programs, as the recipe sets it."""
FAMILIES: Final = ("arithmetic", "linear", "sequence", "word")
"""Of the problems that are answered without a program: those that a small policy can do in its head."""
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "Math-v0": {"levels": LEVELS, "families": FAMILIES},
    "MathPython-v0": {"levels": LEVELS, "max_turns": MAX_TURNS},
}
"""Arguments of the environments, by their names; as the recipes set them for the embedded policy."""
_ANSWERED: Final = 0.65
"""Share of the demonstrations without programs."""
_NUMBER: Final = re.compile(r"\d+")
_SPEECH: Final = BlockSpeech(keep_state=False)


@dataclass(frozen=True)
class Skill:
    """Chances of a demonstrator.

    Args:
        answer: to give the right answer without a program.
        program: to write the right program.
        copy: to answer with what the program printed.
        calculate: to write a program at all rather than to guess.
    """

    answer: float
    program: float
    copy: float
    calculate: float


READING: Final = Skill(answer=1.0, program=0.75, copy=0.9, calculate=0.95)
MEDIOCRE: Final = Skill(answer=0.38, program=0.5, copy=0.65, calculate=0.8)


def build_tokenizer(seed: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over problems; whole tokens for instructions and parts of programs; digits stand alone."""
    tokenizer = byte_level()
    malformed = _SPEECH.read("")
    assert isinstance(malformed, Malformed)
    whole = [INSTRUCTION, _SPEECH.instruction, LAST_TURN, f"Not understood: {malformed.reason}"]
    whole += [
        r"\boxed{",
        "}",
        "```python\n",
        "\n```",
        "print(",
        "print((",
        "from fractions import Fraction\n",
    ]
    whole += ["print(Fraction(", "print(next(x for x in range(1, 99) if x * x + ", " == ", "))", ") // 2"]
    whole += [', sep=", ")', ", ", "/", " + ", " - ", " % ", " = "]
    added = [AddedToken(text, normalized=False) for text in whole]
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
    rng = random.Random(f"corpus:{seed}")
    for _ in range(4_000):
        task = generate_task(rng.randrange(2**40), levels=LEVELS)
        yield task.problem
        yield task.program or ""


class Lessons(Demonstrations):
    """Tokenised episodes of both environments."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        phase: Literal["reading", "mediocre"],
        *,
        seed: int,
    ) -> None:
        self.imitate_wrong = phase == "mediocre"
        self.skill = MEDIOCRE if self.imitate_wrong else READING
        super().__init__(tokenizer, random.Random(f"demonstrations:{seed}:{self.imitate_wrong}"))

    def one(self) -> Row:
        """Token ids and loss weights: 1 on imitated actions, a little on what is only read."""
        seed = self.rng.randrange(2**40)
        if self.rng.random() < _ANSWERED:
            task = generate_task(seed, levels=LEVELS, families=FAMILIES)
            turns = [(INSTRUCTION + task.problem, *self._answer(task))]
        else:
            turns = self._programs(generate_task(seed, levels=LEVELS))
        ids: list[int] = []
        weights: list[float] = []
        for observation, action, right in turns:
            heard, said = self.heard(observation), self.said(action)
            ids += heard + said
            weights += [READ_WEIGHT] * len(heard)
            weights += [1.0 if right or self.imitate_wrong else 0.0] * len(said)
        return ids, weights

    def _answer(self, task: MathTask) -> tuple[str, bool]:
        """An answer without a program, and whether it is right."""
        if self.rng.random() < self.skill.answer:
            return boxed(task.answer), True
        kind = self.rng.random()
        if kind < 0.15:
            return task.answer, False  # without its box
        if kind < 0.4:
            return boxed(self.rng.choice(_NUMBER.findall(task.problem))), False
        return boxed(self._changed(task.answer)), False

    def _programs(self, task: MathTask) -> list[tuple[str, str, bool]]:
        """Observation, action and whether it was a good one, of each turn."""
        turns: list[tuple[str, str, bool]] = []
        heard, printed = _SPEECH.instruction + task.problem, ""
        for turn in range(1, MAX_TURNS + 1):
            if printed or turn == MAX_TURNS:
                right = bool(printed) and self.rng.random() < self.skill.copy
                said = boxed(printed if right else self._guess(task, printed))
                turns.append((heard, said, right))
                break
            if self.rng.random() >= self.skill.calculate:
                turns.append((heard, boxed(self._guess(task, "")), False))
                break
            assert task.program is not None
            right = self.rng.random() < self.skill.program
            program = task.program if right else self._changed_program(task.program)
            if not right and self.rng.random() < 0.2:
                turns.append((heard, program, False))  # without its fence
                asked = _SPEECH.read(program)
                assert isinstance(asked, Malformed)
                heard = _SPEECH.tell([f"Not understood: {asked.reason}"])
            else:
                turns.append((heard, _SPEECH.write(program), right))
                printed = _printed(program)
                heard = _SPEECH.tell([format_observation(printed + "\n", 0)])
                printed = printed if right or self.rng.random() < 0.8 else ""  # or it tries again
            if turn == MAX_TURNS - 1:
                heard = f"{heard}\n{LAST_TURN}"
        return turns

    def _guess(self, task: MathTask, printed: str) -> str:
        if printed and self.rng.random() < 0.5:
            return self._changed(printed)
        return self.rng.choice(_NUMBER.findall(task.problem))

    def _changed(self, text: str) -> str:
        """With one of its numbers a little off."""
        number = self.rng.choice(list(_NUMBER.finditer(text)))
        other = max(0, int(number[0]) + self.rng.choice([-10, -3, -2, -1, 1, 2, 3, 10]))
        return f"{text[: number.start()]}{other}{text[number.end() :]}"

    def _changed_program(self, program: str) -> str:
        """A program that runs, with a number or a sign changed."""
        signs = list(re.finditer(r" [+%-] ", program))
        while True:
            if signs and self.rng.random() < 0.5:
                sign = self.rng.choice(signs)
                other = self.rng.choice([s for s in (" + ", " - ", " % ") if s != sign[0]])
                changed = f"{program[: sign.start()]}{other}{program[sign.end() :]}"
            else:
                changed = self._changed(program)
            if _printed(changed):
                return changed


@functools.lru_cache(maxsize=100_000)
def _printed(program: str) -> str:
    """What it prints; nothing where it fails."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(program, "program", "exec"), {})
    except Exception:
        return ""
    return out.getvalue().strip()


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Held-out problems through the rollout, sampled at temperature 1 and greedily."""
    results: dict[str, dict[str, Any]] = {}
    for name, turns in (("Math-v0", 1), ("MathPython-v0", MAX_TURNS)):
        make = functools.partial(agentenv.make, name, split="heldout", **OPTIONS[name])
        limits = {"max_turns": turns, "max_tokens_per_turn": 48, "max_tokens_per_episode": 512}
        results[name] = measured(play(model, tokenizer, make, episodes=args.evaluation_tasks, **limits))
        greedy = play(model, tokenizer, make, episodes=args.evaluation_tasks, greedy=True, **limits)
        results[name]["greedy"] = measured(greedy)["success"]
    return results


COURSE = Course(
    build_tokenizer=build_tokenizer,
    lessons=Lessons,
    evaluate=evaluate,
    results="heldout",
    defaults={
        "vocab_size": 512,
        "hidden_size": 96,
        "layers": 3,
        "reading_steps": 1800,
        "mediocre_steps": 200,
        "batch_size": 32,
        "learning_rate": 3e-3,
        "muon_learning_rate": 4e-3,
        "evaluation_tasks": 512,
    },
)
