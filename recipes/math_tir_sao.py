"""Train on mathematics with Python as a tool, by SAO: programs over several turns, then the answer (arXiv 2607.07508).

    python recipes/math_tir_sao.py                            the embedded policy, on 2 cores, in minutes
    python recipes/math_tir_sao.py --smoke                    the whole way at a tiny size
    python recipes/math_tir_sao.py --model Qwen/Qwen3-0.6B    your model on generated problems, on a GPU
    python recipes/math_tir_sao.py --model MODEL --preset math --dataset BytedTsinghua-SIA/DAPO-Math-17k \\
        --eval_dataset HuggingFaceH4/MATH-500                 the paper's settings; data sets need the extra [math]
    python recipes/math_tir_sao.py --output_dir DIR --resume  go on after Ctrl-C or a crash

The agent writes a Python program a turn, which runs in a sandbox, reads what it prints, and ends with the answer in a
box.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentenv_envs import math_reasoning
from agentenv_envs.swe.sandbox import open_backend
from agentenv_envs.swe.sandbox.images import ensure_base_image
from agentenv_trainers.recipe import (
    OWN_MODEL,
    DataSetArguments,
    Parsed,
    Recipe,
    Setup,
    other_environment,
    run_recipe,
    show_lines,
    split_setup,
)
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.sao import SAOConfig

EMBEDDED: dict[str, Any] = {
    "max_steps": 60,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_envs": 16,
    "max_turns": 4,
    "max_tokens_per_turn": 48,
    "max_tokens_per_episode": 512,
    "learning_rate": 2e-4,
    "critic_learning_rate": 1e-3,
    "value_pretrain_episodes": 256,
    "value_pretrain_steps": 16,
    "truncation": "zero",
    "save_steps": 30,
    "save_total_limit": 2,
}
"""Settings for the embedded policy; an episode that the turns cut off has no answer, and is worth nothing."""

EMBEDDED_PROBLEMS: dict[str, Any] = {"levels": [0]}
"""The easiest of the generated problems."""

OWN: dict[str, Any] = {**OWN_MODEL, "value_pretrain_episodes": 256, "truncation": "zero", "max_turns": 8}
"""Settings for a model of yours; ``--preset math`` sets the paper's: a batch of 128, 50 turns, a context of 131,072
tokens, and clip bounds of 0.3 and 5."""

SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "max_turns": 2,
    "max_tokens_per_turn": 16,
    "eval_episodes": 4,
    "value_pretrain_episodes": 4,
    "value_pretrain_steps": 2,
    "save_steps": 1,
}
"""Sizes for ``--smoke``."""


@dataclass
class MathArguments(DataSetArguments):
    """The recipe's own options."""

    sandbox: Literal["auto", "docker", "local-unisolated"] = setting(
        "auto",
        "Where programs run. auto: Docker where an engine answers, else without isolation, said loudly.",
    )
    sandbox_url: str | None = setting(
        None, "Take the sandboxes from a service, or several with commas between: docs/sandbox-service.md."
    )


def set_up(parsed: Parsed[MathArguments, SAOConfig]) -> Setup:
    """Find the environments; their pool of sandboxes is held open for the whole run, so that they share it."""
    arguments = parsed.arguments
    if arguments.env is not None:
        return other_environment(arguments, arguments.env)
    sandboxes = open_backend(arguments.sandbox, url=arguments.sandbox_url)
    train, held_out, tasks = arguments.splits
    train |= {"sandbox": sandboxes.kind, "sandbox_url": arguments.sandbox_url}
    if arguments.model == "embedded" and arguments.dataset == "embedded":
        train |= EMBEDDED_PROBLEMS
    client = getattr(sandboxes.backend, "client", None)

    def make_image() -> None:
        """Episodes would not wait that long."""
        if client is not None:
            show_lines(
                "making the image of the sandboxes, once a machine",
                lambda show: ensure_base_image(client, progress=show),
            )

    return split_setup(
        parsed,
        "MathPython-v0",
        tasks,
        train=train,
        held_out=held_out,
        sandboxes=sandboxes,
        before_start=make_image,
    )


RECIPE = Recipe(
    "math_tir_sao",
    MathArguments,
    SAOConfig,
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
