"""Train a shopper by SAO: find what somebody wants among near-identical goods, and buy it (arXiv 2601.18225).

    python recipes/shop_sao.py                              the embedded policy, on 2 cores, in minutes
    python recipes/shop_sao.py --smoke                      the whole way at a tiny size
    python recipes/shop_sao.py --model Qwen/Qwen3-0.6B      your model on the synthetic shop, on a GPU
    python recipes/shop_sao.py --model MODEL --task multi-turn --data items.json.gz   dialogues, on the official files
    python recipes/shop_sao.py --output_dir DIR --resume    go on after Ctrl-C or a crash

The agent searches, reads pages, chooses options and buys; the reward says how well the goods fit the wish. Needs the
extra [shop].
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentenv_envs import shop
from agentenv_trainers.recipe import (
    OWN_MODEL,
    Parsed,
    Recipe,
    RecipeArguments,
    Setup,
    run_recipe,
    split_setup,
)
from agentenv_trainers.rollout_settings import setting
from agentenv_trainers.sao import SAOConfig

ENVIRONMENTS = {
    "single-turn": "ShopSimulator-SingleTurn-v0",
    "multi-turn": "ShopSimulator-MultiTurn-v0",
    "persona": "ShopSimulator-Persona-v0",
}

EMBEDDED: dict[str, Any] = {
    "max_steps": 80,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_envs": 16,
    "max_turns": 10,
    "max_tokens_per_turn": 48,
    "max_tokens_per_episode": 1024,
    "learning_rate": 2e-4,
    "critic_learning_rate": 1e-3,
    "value_pretrain_episodes": 256,
    "value_pretrain_steps": 16,
    "truncation": "zero",
    "save_steps": 40,
    "save_total_limit": 2,
}
"""Settings for the embedded policy; a visit that the turns cut off has bought nothing, and is worth nothing."""

EMBEDDED_SHOP: dict[str, Any] = {"products": 360, "page_size": 4}
"""The shop that the embedded policy knows: three kinds of goods, and short pages."""

OWN: dict[str, Any] = {**OWN_MODEL, "value_pretrain_episodes": 256, "truncation": "zero"}
"""Settings for a model of yours. ``--preset swe`` sets SAO's batch, context, turns and clip bounds for agents. That
paper does not train on shopping; ShopSimulator's found the strict reward, the default here, to train better."""

SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "max_turns": 4,
    "max_tokens_per_turn": 16,
    "eval_episodes": 4,
    "value_pretrain_episodes": 4,
    "value_pretrain_steps": 2,
    "save_steps": 1,
}
"""Sizes for ``--smoke``."""


@dataclass
class ShopArguments(RecipeArguments):
    """The recipe's own options."""

    task: Literal["single-turn", "multi-turn", "persona"] = setting(
        "single-turn", "The whole wish at once; needs that have to be asked for; or habits that tell them."
    )
    data: str = setting("synthetic", "synthetic, or an official file: .json, .json.gz, .jsonl, .jsonl.gz.")
    language: Literal["en", "zh", "mixed"] = setting("en", "Of the synthetic shop.")
    reward: Literal["strict", "loose", "success"] = setting(
        "strict", "What is trained on; success is reported."
    )


def set_up(parsed: Parsed[ShopArguments, SAOConfig]) -> Setup:
    """Find the environments."""
    arguments = parsed.arguments
    train: dict[str, Any] = {"reward": arguments.reward}
    if arguments.data != "synthetic":
        tasks, held_out = "Wishes with the official tag eval, never trained on.", "eval"
        train["data"] = arguments.data
    else:
        tasks, held_out = "Synthetic wishes that training never sees; no result of ShopSimulator.", "heldout"
        train["language"] = arguments.language
        train |= EMBEDDED_SHOP if arguments.model == "embedded" else {}
    return split_setup(parsed, ENVIRONMENTS[arguments.task], tasks, train=train, held_out={"split": held_out})


RECIPE = Recipe(
    "shop_sao",
    ShopArguments,
    SAOConfig,
    Path(shop.__file__).parent / "policy",
    set_up,
    embedded=EMBEDDED,
    own_model=OWN,
    smoke=SMOKE,
    description=__doc__,
)
main = RECIPE.main

if __name__ == "__main__":
    sys.exit(run_recipe(main))
