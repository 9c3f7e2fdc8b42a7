"""Train an agent that does household tasks by text commands, by SAO, on the real engine of ALFWorld.

    python recipes/alfworld_sao.py                            the embedded policy, on 2 cores, in minutes
    python recipes/alfworld_sao.py --smoke                    the whole way at a tiny size
    python recipes/alfworld_sao.py --model Qwen/Qwen3-0.6B    your model on synthetic households, on a GPU
    python recipes/alfworld_sao.py --model MODEL --preset swe --data official   on the official games
    python recipes/alfworld_sao.py --output_dir DIR --resume  go on after Ctrl-C or a crash

The agent writes one command a turn and is paid 1 when the task is done. Needs the extra [alfworld]; the official games
come by `agentenv alfworld download`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentenv_envs import alfworld
from agentenv_trainers.recipe import (
    OWN_MODEL,
    Parsed,
    Recipe,
    RecipeArguments,
    Setup,
    layered_defaults,
    run_recipe,
    split_setup,
)
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.sao import SAOConfig

EMBEDDED: dict[str, Any] = {
    "max_steps": 60,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_envs": 8,
    "max_turns": 16,
    "max_tokens_per_turn": 32,
    "max_tokens_per_episode": 1536,
    "learning_rate": 2e-4,
    "critic_learning_rate": 1e-3,
    "value_pretrain_episodes": 256,
    "value_pretrain_steps": 16,
    "truncation": "zero",
    "save_steps": 30,
    "save_total_limit": 2,
}
"""Settings for the embedded policy; a task that the turns cut off is not done, and is worth nothing."""

EMBEDDED_GAMES: dict[str, Any] = {"size": "small", "show_commands": False}
"""Small households, and no list of commands after each turn: its context would not hold them."""

OWN: dict[str, Any] = {
    **OWN_MODEL,
    "num_envs": 32,
    "max_turns": 50,
    "max_tokens_per_turn": 512,
    "max_tokens_per_episode": 16384,
    "value_pretrain_episodes": 256,
    "truncation": "zero",
}
"""Settings for a model of yours, with ALFWorld's own 50 turns. SAO's paper does not train on ALFWorld: ``--preset swe``
sets what it has for agents, a batch of 128, 300 turns, a context of 131,072 tokens, and its clip bounds."""

SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 2,
    "max_turns": 2,
    "max_tokens_per_turn": 8,
    "eval_episodes": 4,
    "value_pretrain_episodes": 4,
    "value_pretrain_steps": 2,
    "save_steps": 1,
}
"""Sizes for ``--smoke``."""


@dataclass
class ALFWorldArguments(RecipeArguments):
    """The recipe's own options."""

    data: str = setting(
        "synthetic", "synthetic households, official, or a folder of games in the official layout."
    )
    eval_split: Literal["valid_unseen", "valid_seen"] = setting(
        "valid_unseen", "Of the official games: rooms that training never sees, or that it does."
    )
    cache_dir: str | None = setting(
        None, "Folder for what the first reset of a game computes; environments and later runs share it."
    )


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand below what the user set."""
    return layered_defaults("alfworld_sao", given, embedded=EMBEDDED, own_model=OWN, smoke=SMOKE)


def set_up(parsed: Parsed[ALFWorldArguments, Any]) -> Setup:
    """Find the environments."""
    arguments = parsed.arguments
    train: dict[str, Any] = {"cache_dir": arguments.cache_dir}
    if parsed.config.max_turns is not None:
        train["max_turns"] = parsed.config.max_turns  # its own limit would come first
    if arguments.data == "synthetic":
        tasks, held_out = "Synthetic households that training never sees; no result of ALFWorld.", "heldout"
        train |= EMBEDDED_GAMES if arguments.model == "embedded" else {}
    else:
        tasks, held_out = (
            f"Games of the split {arguments.eval_split}, never trained on.",
            arguments.eval_split,
        )
        train["data"] = arguments.data
    return split_setup(arguments, "ALFWorld-v0", tasks, train=train, held_out={"split": held_out})


RECIPE = Recipe(
    "alfworld_sao",
    ALFWorldArguments,
    SAOConfig,
    Path(alfworld.__file__).parent / "policy",
    defaults,
    set_up,
    __doc__,
)
main = RECIPE.main

if __name__ == "__main__":
    sys.exit(run_recipe(main))
