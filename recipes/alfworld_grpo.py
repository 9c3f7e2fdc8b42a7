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
from pathlib import Path
from typing import Any

from agentenv_envs import alfworld
from agentenv_trainers.grpo import GRPOConfig
from agentenv_trainers.recipe import (
    OWN_MODEL,
    HouseholdArguments,
    Recipe,
    run_recipe,
)

ROLLOUTS: dict[str, Any] = {"group_size": 8, "redundant_groups": 1}
"""Eight episodes of each task, and a task more than a step needs, so that a slow or broken household holds up nobody:
the redundant environments of ROLL Flash (arXiv 2510.11345)."""

EMBEDDED: dict[str, Any] = {
    **ROLLOUTS,
    "redundant_groups": 2,
    "filter_zero_variance": True,
    "max_steps": 80,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_envs": 24,
    "max_turns": 16,
    "max_tokens_per_turn": 32,
    "max_tokens_per_episode": 1536,
    "learning_rate": 3e-4,
    "save_steps": 30,
    "save_total_limit": 2,
}
"""Settings for the embedded policy: four households a step, of those that it sometimes wins and sometimes loses."""

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
    "filter_zero_variance": False,
}
"""Sizes for ``--smoke``; nothing is filtered, for a policy that never wins would never fill a batch."""


RECIPE = Recipe(
    "alfworld_grpo",
    HouseholdArguments,
    GRPOConfig,
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
