"""Options of the recipes that train on ALFWorld, and the environments that they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from agentenv_trainers.recipe.arguments import Parsed, RecipeArguments
from agentenv_trainers.recipe.training import Setup, split_setup
from agentenv_trainers.rollout_settings import setting

__all__ = ["HouseholdArguments"]

_FOR_EMBEDDED: Final = {"size": "small", "show_commands": False}
"""Small households, and no list of commands after each turn: the context of the embedded policy would not hold them."""


@dataclass
class HouseholdArguments(RecipeArguments):
    """Options of such a recipe."""

    data: str = setting(
        "synthetic", "synthetic households, official, or a folder of games in the official layout."
    )
    eval_split: Literal["valid_unseen", "valid_seen"] = setting(
        "valid_unseen", "Of the official games: rooms that training never sees, or that it does."
    )
    cache_dir: str | None = setting(
        None, "Folder for what the first reset of a game computes; environments and later runs share it."
    )

    @staticmethod
    def set_up(parsed: Parsed[HouseholdArguments, Any]) -> Setup:
        """Find the environments."""
        arguments = parsed.arguments
        train: dict[str, Any] = {"cache_dir": arguments.cache_dir}
        if arguments.data == "synthetic":
            tasks, held_out = (
                "Synthetic households that training never sees; no result of ALFWorld.",
                "heldout",
            )
            train |= _FOR_EMBEDDED if arguments.model == "embedded" else {}
        else:
            tasks = f"Games of the split {arguments.eval_split}, never trained on."
            held_out = arguments.eval_split
            train["data"] = arguments.data
        return split_setup(parsed, "ALFWorld-v0", tasks, train=train, held_out={"split": held_out})
