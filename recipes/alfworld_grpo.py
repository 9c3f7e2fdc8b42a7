"""Train an agent that does household tasks by text commands, by GRPO, on the real engine of ALFWorld.

    python recipes/alfworld_grpo.py                            the embedded policy, on 2 cores, in minutes
    python recipes/alfworld_grpo.py --smoke                    the whole way at a tiny size
    python recipes/alfworld_grpo.py --model Qwen/Qwen3-0.6B    your model on synthetic households, on a GPU
    python recipes/alfworld_grpo.py --model MODEL --data official   on the official games
    python recipes/alfworld_grpo.py --output_dir DIR --resume  go on after Ctrl-C or a crash

The agent plays each household several times; an episode is paid 1 when the task is done, and compared with the others
of its household. Needs the extra [alfworld]; the official games come by `agentenv alfworld download`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentenv_envs import alfworld
from agentenv_trainers.grpo import GRPOConfig
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

ROLLOUTS: dict[str, Any] = {"group_size": 8, "redundant_groups": 1}
"""Eight episodes of each task, and a task more than a step needs, so that a slow or broken household holds up nobody:
the redundant environments of ROLL Flash (arXiv 2510.11345)."""

EMBEDDED: dict[str, Any] = {
    **ROLLOUTS,
    "max_steps": 60,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_envs": 12,
    "max_turns": 16,
    "max_tokens_per_turn": 32,
    "max_tokens_per_episode": 1536,
    "learning_rate": 2e-4,
    "save_steps": 30,
    "save_total_limit": 2,
}
"""Settings for the embedded policy."""

EMBEDDED_GAMES: dict[str, Any] = {"size": "small", "show_commands": False}
"""Small households, and no list of commands after each turn: its context would not hold them."""

OWN: dict[str, Any] = {
    **OWN_MODEL,
    **ROLLOUTS,
    "gradient_accumulation_steps": 64,
    "num_envs": 72,
    "max_turns": 50,
    "max_tokens_per_turn": 512,
    "max_tokens_per_episode": 16384,
}
"""Settings for a model of yours: eight tasks a step, with ALFWorld's own 50 turns. The greatest gain in ROLL Flash's
figure 10 has 36 groups of 12 for a batch of 32 of 8: --gradient_accumulation_steps 256 --redundant_groups 4
--redundant_members 4 --num_envs 432."""

SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "group_size": 2,
    "redundant_groups": 0,
    "num_envs": 2,
    "max_turns": 2,
    "max_tokens_per_turn": 8,
    "eval_episodes": 4,
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
    return layered_defaults("alfworld_grpo", given, embedded=EMBEDDED, own_model=OWN, smoke=SMOKE)


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
    "alfworld_grpo",
    ALFWorldArguments,
    GRPOConfig,
    Path(alfworld.__file__).parent / "policy",
    defaults,
    set_up,
    __doc__,
)
main = RECIPE.main

if __name__ == "__main__":
    sys.exit(run_recipe(main))
