"""What the recipes share: options, what a run is made of, its stages, and how it ends.

A recipe is a short script over this: it names environment and default settings and tells the story of a run.
"""

from agentenv_trainers.recipe.arguments import Parsed, RecipeArguments, parse, parse_json_object
from agentenv_trainers.recipe.command import run_recipe
from agentenv_trainers.recipe.data_sets import DataSetArguments
from agentenv_trainers.recipe.experiment import Experiment
from agentenv_trainers.recipe.households import HouseholdArguments
from agentenv_trainers.recipe.interruption import Interrupted, Interruption
from agentenv_trainers.recipe.results import evaluation_result
from agentenv_trainers.recipe.sandboxes import Sandboxes, show_lines
from agentenv_trainers.recipe.sources import (
    EnvFactory,
    Policy,
    find_environment,
    fit_context,
    load_policy,
)
from agentenv_trainers.recipe.training import OWN_MODEL, Recipe, Setup, other_environment, split_setup

__all__ = [
    "OWN_MODEL",
    "DataSetArguments",
    "EnvFactory",
    "Experiment",
    "HouseholdArguments",
    "Interrupted",
    "Interruption",
    "Parsed",
    "Policy",
    "Recipe",
    "RecipeArguments",
    "Sandboxes",
    "Setup",
    "evaluation_result",
    "find_environment",
    "fit_context",
    "load_policy",
    "other_environment",
    "parse",
    "parse_json_object",
    "run_recipe",
    "show_lines",
    "split_setup",
]
