"""Train on mathematics by verified answers and GRPO, with ROLL Flash's rollouts (arXiv 2510.11345).

    python recipes/math_rlvr_grpo.py                            the embedded policy, on 2 cores, in minutes
    python recipes/math_rlvr_grpo.py --smoke                    the whole way at a tiny size
    python recipes/math_rlvr_grpo.py --model Qwen/Qwen3-0.6B    your model on generated problems, on a GPU
    python recipes/math_rlvr_grpo.py --model MODEL --dataset BytedTsinghua-SIA/DAPO-Math-17k \\
        --eval_dataset HuggingFaceH4/MATH-500                   data sets need the extra [math]
    python recipes/math_rlvr_grpo.py --output_dir DIR --resume  go on after Ctrl-C or a crash

The agent answers each problem several times, one turn each; an answer is right or not. Queue scheduling: every answer
is graded as it ends, and its slot takes the next. Prompt replication: the answers to a problem go to the engines one by
one. Dynamic filtering: problems that all answers get right, or none, are replaced (filter_zero_variance,
redundant_groups).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentenv_envs import math_reasoning
from agentenv_trainers.grpo import GRPOConfig
from agentenv_trainers.recipe import (
    OWN_MODEL,
    DataSetArguments,
    Parsed,
    Recipe,
    Setup,
    run_recipe,
    split_setup,
)

ROLLOUTS: dict[str, Any] = {
    "group_size": 8,
    "mode": "async",
    "asynchrony": 2.0,
    "prompt_replication": True,
    "filter_zero_variance": True,
}
"""ROLL Flash: 8 answers a problem, and an asynchrony of 2, at which it finds the gain near its greatest."""

EMBEDDED: dict[str, Any] = {
    **ROLLOUTS,
    "max_steps": 90,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "redundant_groups": 2,
    "num_envs": 32,
    "max_tokens_per_turn": 32,
    "max_tokens_per_episode": 256,
    "learning_rate": 3e-4,
    "save_steps": 30,
    "save_total_limit": 2,
}
"""Settings for the embedded policy."""

EMBEDDED_PROBLEMS: dict[str, Any] = {
    "levels": [0],
    "families": ["arithmetic", "linear", "sequence", "word"],
}
"""Of the easiest generated problems those that the embedded policy can do in its head."""

OWN: dict[str, Any] = {
    **OWN_MODEL,
    **ROLLOUTS,
    "gradient_accumulation_steps": 64,
    "redundant_groups": 8,
    "num_envs": 96,
    "max_tokens_per_turn": 2048,
    "max_tokens_per_episode": 3072,
}
"""Settings for a model of yours: 8 problems a step. The paper has up to 16 more problems in flight, for which the keys
and values of as many answers have to fit the GPU: --redundant_groups 16 --num_envs 192. ``--preset math`` with
``--objective dis`` is the baseline GRPO + DIS of the SAO paper, with its batch, context and clip bounds."""

SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "group_size": 2,
    "redundant_groups": 1,
    "num_envs": 4,
    "max_tokens_per_turn": 16,
    "eval_episodes": 4,
    "save_steps": 1,
    "filter_zero_variance": False,
}
"""Sizes for ``--smoke``; nothing is filtered, for a policy that is always wrong would never fill a batch."""


def set_up(parsed: Parsed[DataSetArguments, GRPOConfig]) -> Setup:
    """Find the environments."""
    arguments = parsed.arguments
    train, held_out, tasks = arguments.splits
    if arguments.model == "embedded" and arguments.dataset == "embedded":
        train |= EMBEDDED_PROBLEMS
    return split_setup(parsed, "Math-v0", tasks, train=train, held_out=held_out, several_turns=False)


RECIPE = Recipe(
    "math_rlvr_grpo",
    DataSetArguments,
    GRPOConfig,
    Path(math_reasoning.__file__).parent / "policy",
    set_up,
    embedded=EMBEDDED,
    own_model=OWN,
    smoke=SMOKE,
    description=__doc__,
)
main = RECIPE.main

if __name__ == "__main__":
    sys.exit(run_recipe(main))
