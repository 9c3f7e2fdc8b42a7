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
from agentenv_trainers.objectives.group_advantages import (
    AdvantageScale,
    group_advantages,
    zero_variance_share,
)
from agentenv_trainers.objectives.importance import cispo_weights, proximal_weights, topr_weights
from agentenv_trainers.objectives.running_mean import RunningMeanBaseline
from agentenv_trainers.objectives.statistics import explained_share, explained_variance

__all__ = [
    "AdvantageEstimate",
    "AdvantageScale",
    "DoubleSidedRegions",
    "RunningMeanBaseline",
    "ValueGranularity",
    "cispo_weights",
    "discounted_suffix_sums",
    "double_sided_regions",
    "double_sided_weights",
    "estimate_advantages",
    "explained_share",
    "explained_variance",
    "group_advantages",
    "k3_divergence",
    "length_adaptive_lambda",
    "proximal_weights",
    "skip_observation_gae",
    "topr_weights",
    "zero_variance_share",
]
