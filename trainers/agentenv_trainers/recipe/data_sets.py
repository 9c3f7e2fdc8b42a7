"""Recipes whose problems are generated, or those of a data set, with or without another one to evaluate on.

Invariant: what is evaluated on is never trained on, unless the user names two data sets that share problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentenv.errors import UsageError
from agentenv_trainers.recipe.arguments import RecipeArguments
from agentenv_trainers.rollout_settings import setting

__all__ = ["DataSetArguments"]

_HELD_OUT_SHARE = 0.1


@dataclass
class DataSetArguments(RecipeArguments):
    """Options of such a recipe; its environment takes ``split``, ``dataset`` and ``heldout_share``."""

    dataset: str = setting(
        "embedded", "embedded (generated problems), a JSONL, JSON or Parquet file, or a name on the hub."
    )
    eval_dataset: str | None = setting(
        None,
        "Data set to evaluate on. Unset: what is held out of --dataset, of a data set one problem in ten.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_dataset is not None and self.env is not None:
            raise UsageError("--eval_dataset belongs to the recipe's own environment, --env names another")

    @property
    def splits(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Arguments of the environment for training and, over those, for evaluation; and what the latter plays."""
        train: dict[str, Any] = {"split": "train"}
        if self.dataset != "embedded":
            train["dataset"] = self.dataset
        if self.eval_dataset is not None:
            held_out = {"split": None, "dataset": self.eval_dataset, "heldout_share": 0.0}
            return train, held_out, f"Problems of {self.eval_dataset}."
        if self.dataset == "embedded":
            return train, {"split": "heldout"}, "Generated problems that training never sees."
        train["heldout_share"] = _HELD_OUT_SHARE
        return train, {"split": "heldout"}, "One problem in ten, by a hash of its text, never trained on."
