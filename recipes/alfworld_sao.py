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
from pathlib import Path
from typing import Any

from agentenv_envs import alfworld
from agentenv_trainers.recipe import (
    OWN_MODEL,
    HouseholdArguments,
    Recipe,
    run_recipe,
)
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


RECIPE = Recipe(
    "alfworld_sao",
    HouseholdArguments,
    SAOConfig,
    Path(alfworld.__file__).parent / "policy",
    HouseholdArguments.set_up,
    embedded=EMBEDDED,
    own_model=OWN,
    smoke=SMOKE,
    description=__doc__,
)
main = RECIPE.main

if __name__ == "__main__":
    sys.exit(run_recipe(main))
