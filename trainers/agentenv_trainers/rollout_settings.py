"""Settings of the rollouts as fields of a trainer's config, so that one command line or YAML file sets
everything.

Invariant: every field of ``agentenv.rollout.RolloutConfig`` is reachable from a trainer's config under the
same name (``batch_size`` and ``num_steps`` follow from the trainer's own batch and steps; the sampling fields
are those of TRL's config).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv.rollout.config import RolloutConfig


def setting(default: Any, help_text: str) -> Any:
    """A dataclass field with the help text that TRL's parser shows."""
    return field(default=default, metadata={"help": help_text})


@dataclass
class RolloutSettings:
    """Fields of :class:`~agentenv.rollout.RolloutConfig` that a trainer's config carries."""

    group_size: int = setting(1, "Episodes per task. The paper's SAO: 1.")
    num_envs: int = setting(32, "Environment slots that run side by side.")
    asynchrony: float = setting(
        1.0,
        "alpha >= 0: a batch of step n holds only episodes started by weights n - alpha or newer.",
    )
    mode: Literal["async", "sync", "batch"] = setting(
        "async", "sync: no episode runs while the trainer trains; batch: all episodes in lockstep, too."
    )
    worker: Literal["auto", "inline", "thread", "process", "ray"] = setting(
        "auto",
        "Where environments run: event loop, thread, process or a Ray cluster's nodes; auto: as their class says.",
    )
    ray_address: str = setting(
        "auto",
        "worker=ray: HOST:PORT of the cluster's head; auto: of this machine's cluster; local: one for this run.",
    )
    ray_envs_per_actor: int = setting(32, "worker=ray: environments that share an actor.")
    ray_shards: int = setting(
        0, "worker=ray: actors that play whole episodes, with their share of the slots; 0: slots stay here."
    )
    ray_resources: str = setting(
        "CPU=1", "worker=ray: what each actor takes of its node, such as CPU=2,docker=1."
    )
    redundant_groups: int = setting(0, "Groups played beyond what a batch needs; the surplus is cancelled.")
    redundant_members: int = setting(
        0, "Episodes per group beyond group_size; the first to end make the group."
    )
    partial_groups: bool = setting(False, "A batch takes any finished episodes, not only full groups.")
    filter_zero_variance: bool = setting(
        False, "Discard groups whose members all have the same reward, and play other tasks instead."
    )
    prompt_replication: bool = setting(
        True, "Send the episodes of a group to the engines one by one; false: all to one engine."
    )
    max_turns: int | None = setting(
        None, "Turns per episode; unset: what the environment advises. The paper: 300 (swe), 50 (math)."
    )
    max_tokens_per_turn: int = setting(512, "Most tokens that the policy writes in one turn.")
    max_tokens_per_episode: int | None = setting(
        None, "Context of an episode, prompt and completion together. Unset: 8192; the paper: 131072."
    )
    reset_timeout_s: float = setting(
        120.0, "Longest reset of an environment, making it included, in seconds."
    )
    reset_retries: int = setting(2, "How often a failed reset is tried again, in a new environment.")
    reset_backoff_s: float = setting(
        0.25, "Pause before the first retry of a reset, in seconds; doubles with each."
    )
    step_timeout_s: float = setting(120.0, "Longest step of an environment, in seconds.")
    generate_timeout_s: float = setting(600.0, "Longest turn of the policy, in seconds.")
    reward_timeout_s: float = setting(120.0, "Longest computation of one reward, in seconds.")
    num_reward_workers: int = setting(16, "Rewards computed side by side.")
    episode_timeout_s: float = setting(3600.0, "Longest episode, its reward not included, in seconds.")
    batch_timeout_s: float = setting(7200.0, "Longest wait for a batch, in seconds.")
    sync_timeout_s: float = setting(300.0, "Longest weight update of the engines, in seconds.")
    shutdown_timeout_s: float = setting(30.0, "Longest wait for environments to close, in seconds.")
    heartbeat_s: float = setting(0.5, "How soon the death of an engine is noticed, in seconds.")
    max_failure_rate: float = setting(
        0.5, "The run stops when more than this share of recent episodes failed."
    )
    failure_window: int = setting(64, "Episodes over which the failure rate is taken.")
    stop_token_ids: list[int] | None = field(
        default=None, metadata={"help": "Token ids that end a turn besides the end-of-sequence token."}
    )
    system_prompt: str | None = setting(None, "Text put before the first observation.")
    history: Literal["append", "fork"] = setting(
        "append", "Where a chat template rewrites history: keep the sampled sequence, or start a new segment."
    )
    on_stale: Literal["wait", "abort"] = setting(
        "wait",
        "Running episodes that would be too old for the next batch: waited for, or aborted and tried again.",
    )
    on_sync: Literal["continue", "restart"] = setting(
        "continue", "A turn being sampled when new weights come: goes on with them, or starts again."
    )
    deterministic: bool = setting(
        False,
        "mode=sync: the same seed gives the same batches to the last bit, after a resume too. The engine waits "
        "while any episode is between two turns.",
    )
    max_retries: int = setting(2, "How often a group tries its task again after failed or aborted episodes.")

    def rollout_config(self) -> RolloutConfig:
        """The settings for an ``AsyncController``, one batch of it being one training step.

        Raises:
            ValueError: a value is outside its range, or the batch is no multiple of ``group_size``.
        """
        values = {name: getattr(self, name) for name in RolloutConfig.field_names() if hasattr(self, name)}
        values["batch_size"] = self.trajectories_per_step
        values["num_steps"] = self.num_training_steps
        values["stop_token_ids"] = tuple(self.stop_token_ids or ())
        if self.max_tokens_per_episode is None:
            del values["max_tokens_per_episode"]
        return RolloutConfig(**values)

    @property
    def num_training_steps(self) -> int | None:
        """Training steps of the run; None where they are not known beforehand."""
        return None

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of one training step over all processes."""
        raise NotImplementedError
