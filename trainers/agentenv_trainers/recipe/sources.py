"""What a run is made of, found by name: the environment and the policy.

Invariant: whatever can't be found or can't work is a UsageError before anything is written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from agentenv.environment_source import EnvFactory, find_environment
from agentenv.errors import UsageError
from agentenv.inference.policy import Policy, load_policy
from agentenv_trainers.rollout_settings import RolloutSettings

__all__ = [
    "EnvFactory",
    "Policy",
    "find_environment",
    "fit_context",
    "load_policy",
]

logger = logging.getLogger(__name__)


def fit_context(config: RolloutSettings, policy: Policy, given: Collection[str]) -> None:
    """Limit episodes to the model's positions, unless the user gave their length: then it must fit.

    Args:
        config: ``max_tokens_per_episode`` is changed.
        policy: whose positions count.
        given: names of the options that the user set.

    Raises:
        UsageError: a length was given that the model cannot hold.
    """
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    wanted = config.rollout_config().max_tokens_per_episode  # an unset one has its default there
    if positions is None or wanted <= positions:
        return
    if "max_tokens_per_episode" in given:
        raise UsageError(
            f"--max_tokens_per_episode is {wanted}, but model {policy.name} has {positions} positions"
        )
    logger.warning("episodes are limited to the %d positions of model %s", positions, policy.name)
    config.max_tokens_per_episode = positions
