"""Objectives as pure functions of tensors: no model, no optimizer, no state."""

from agentenv_trainers.objectives.advantages import AdvantageEstimate, ValueGranularity, estimate_advantages
from agentenv_trainers.objectives.divergence import k3_divergence
from agentenv_trainers.objectives.double_sided import (
    DoubleSidedRegions,
    double_sided_regions,
    double_sided_weights,
)
from agentenv_trainers.objectives.gae import (
    discounted_suffix_sums,
    length_adaptive_lambda,
    skip_observation_gae,
)
from agentenv_trainers.objectives.statistics import explained_variance

__all__ = [
    "AdvantageEstimate",
    "DoubleSidedRegions",
    "ValueGranularity",
    "discounted_suffix_sums",
    "double_sided_regions",
    "double_sided_weights",
    "estimate_advantages",
    "explained_variance",
    "k3_divergence",
    "length_adaptive_lambda",
    "skip_observation_gae",
]
