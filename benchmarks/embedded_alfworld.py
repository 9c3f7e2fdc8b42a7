"""What the embedded policy of ALFWorld-v0 is shown: tasks in small households, played on the real engine.

The demonstrator is the environment's own: with some probability the command that leads on, otherwise any admissible
one. It knows where things are; a policy can only learn where such things tend to be, and to go and look.

Invariants:
- games are training games, with the recipe's settings; a set of them is played again and again, for the engine takes
  long over a new one;
- observations do not list the admissible commands: the context would be several times as long.
"""

import argparse
import functools
import itertools
import random
import re
from typing import Any, Final

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import (
    READ_WEIGHT,
    Course,
    Demonstrations,
    Phase,
    Row,
    byte_level,
    measured,
    play,
    special_tokens,
    with_chat_template,
)

import agentenv
from agentenv_envs.alfworld.env import ALFWorldEnv

__all__ = ["COURSE"]

ENV_ID: Final = "ALFWorld-v0"
OPTIONS: Final[dict[str, Any]] = {"size": "small", "show_commands": False, "max_turns": 16}
"""As recipes/alfworld_sao.py sets them for the embedded policy."""
NUM_GAMES: Final = 400
EPISODES: Final = 4
"""Of each game, in each phase."""
SKILLS: Final[dict[Phase, float]] = {"reading": 0.75, "mediocre": 0.65}

Turn = tuple[str, str, bool]
"""Observation, action and whether it leads on."""


def visits(skill: float, rng: random.Random, *, games: int, episodes: int) -> list[list[Turn]]:
    """Episodes of the demonstrator."""
    env = agentenv.make(ENV_ID, split="train", **OPTIONS).unwrapped
    assert isinstance(env, ALFWorldEnv)
    played: list[list[Turn]] = []
    seeds = [rng.randrange(2**31) for _ in range(games)]
    try:
        for seed in seeds:
            for _ in range(episodes):
                turns: list[Turn] = []
                observation, _ = env.reset(seed=seed)
                ended = False
                while not ended:
                    best, action = env.solution(), env.demonstrate(skill, rng)
                    turns.append((observation, action, action == best))
                    observation, _, terminated, truncated, _ = env.step(action)
                    ended = terminated or truncated
                played.append(turns)
    finally:
        env.close()
    return played


class Visits(Demonstrations):
    """Tokenised episodes of one phase."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, phase: Phase, *, seed: int) -> None:
        self.imitate_wrong = phase == "mediocre"
        super().__init__(tokenizer, random.Random(f"demonstrations:{seed}:{self.imitate_wrong}"))
        self.visits = visits(SKILLS[phase], self.rng, games=NUM_GAMES, episodes=EPISODES)

    def one(self) -> Row:
        """Token ids and loss weights: 1 on imitated actions, a little on what is only read."""
        ids: list[int] = []
        weights: list[float] = []
        for observation, action, right in self.rng.choice(self.visits):
            heard, said = self.heard(observation), self.said(action)
            ids += heard + said
            weights += [READ_WEIGHT] * len(heard)
            weights += [1.0 if right or self.imitate_wrong else 0.0] * len(said)
        return ids, weights


def build_tokenizer(seed: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over episodes; whole tokens for the rules, for numbers and for what is said often."""
    shown = visits(0.5, random.Random(f"corpus:{seed}"), games=60, episodes=1)
    whole = [shown[0][0][0].partition("\n")[0]]
    whole += {
        heard[0] for turns in shown for (_, said, _), heard in itertools.pairwise(turns) if said == "help"
    }
    whole += ["\n\nYou are in the middle of a room. Looking quickly around you, you see", "Nothing happens."]
    whole += [
        "\n\nYour task is to: ",
        "You arrive at",
        " is closed.",
        " is open.",
        "In it, you see",
        ", you see",
    ]
    whole += ["go to", "On the", "You pick up the", "You move the", "You open the"]
    whole += [f" {number}" for number in range(1, 10)]
    added = [AddedToken(text, normalized=False) for text in dict.fromkeys(whole)]
    special = special_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added) - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for turns in shown for observation, action, _ in turns for text in (observation, action))
    tokenizer = byte_level()
    tokenizer.train_from_iterator((re.sub(r"\d", "", text) for text in texts), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(added)
    return with_chat_template(tokenizer)


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Held-out games through the rollout, sampled at temperature 1 and greedily."""
    make = functools.partial(agentenv.make, ENV_ID, split="heldout", **OPTIONS)
    limits = {
        "num_envs": 8,
        "max_turns": OPTIONS["max_turns"],
        "max_tokens_per_turn": 24,
        "max_tokens_per_episode": 1536,
    }
    result = measured(play(model, tokenizer, make, episodes=args.evaluation_tasks, **limits))
    greedy = play(model, tokenizer, make, episodes=args.evaluation_tasks, greedy=True, **limits)
    return {ENV_ID: {**result, "greedy": measured(greedy)["success"]}}


COURSE = Course(
    build_tokenizer=build_tokenizer,
    lessons=Visits,
    evaluate=evaluate,
    results="heldout",
    defaults={
        "vocab_size": 640,
        "hidden_size": 96,
        "layers": 3,
        "reading_steps": 600,
        "mediocre_steps": 120,
        "batch_size": 12,
        "learning_rate": 3e-3,
        "muon_learning_rate": 4e-3,
        "evaluation_tasks": 200,
    },
)
