"""Settings of the rollout side, shared by all trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from agentenv.inference.protocol import SamplingParams

if TYPE_CHECKING:
    from agentenv.cluster.placement import Placement

_POSITIVE = (
    "batch_size",
    "group_size",
    "num_steps",
    "num_envs",
    "max_turns",
    "max_tokens_per_turn",
    "max_tokens_per_episode",
    "reset_timeout_s",
    "step_timeout_s",
    "generate_timeout_s",
    "episode_timeout_s",
    "batch_timeout_s",
    "sync_timeout_s",
    "shutdown_timeout_s",
    "failure_window",
    "reward_timeout_s",
    "num_reward_workers",
    "reset_backoff_s",
    "heartbeat_s",
    "ray_envs_per_actor",
)
_NOT_NEGATIVE = ("max_retries", "reset_retries", "redundant_groups", "redundant_members", "ray_shards")
_CHOICES = {
    "mode": ("async", "sync", "batch"),
    "worker": ("auto", "inline", "thread", "process", "ray"),
    "history": ("append", "fork"),
    "on_stale": ("wait", "abort"),
    "on_sync": ("continue", "restart"),
}


@dataclass
class RolloutConfig:
    """Sizes, limits and deadlines of the rollouts. All times are wall-clock seconds."""

    batch_size: int = 32
    """Trajectories per training step (not groups)."""
    group_size: int = 1
    """Episodes per task; ``batch_size`` must be a multiple of it."""
    num_steps: int | None = None
    """Training steps of the run: nothing is played that only a later one could take. None: without end."""
    num_envs: int = 32
    """Environment slots, each with an environment of its own."""
    worker: Literal["auto", "inline", "thread", "process", "ray"] = "auto"
    """Where environments run; auto: what the environment's class says (``BaseEnv.worker``); ray: on the nodes of a Ray
    cluster, there in what the class says."""
    ray_address: str = "auto"
    """Of the cluster: HOST:PORT of its head; auto: the one that this machine is a node of; local: one of this machine
    alone, for the time of the run."""
    ray_envs_per_actor: int = 32
    """Environments that share an actor."""
    ray_shards: int = 0
    """Actors that play whole episodes, each with its share of the slots and an event loop of its own, so that the
    controller is left with the turns' requests, the buffer and the weights. 0: slots live in the controller, and only
    environments in actors."""
    ray_resources: str = "CPU=1"
    """What each actor takes of its node, which decides where it can go: ``CPU=2,docker=1``."""
    asynchrony: float = 1.0
    """alpha, any real >= 0: a batch for step n holds only episodes started by version >= n - alpha. 0 is on-policy.
    At most (1 + alpha) * batch_size episodes are running or buffered. Versions are whole, so the fraction of alpha
    never admits an older version; nothing is started that no step could take."""
    mode: Literal["async", "sync", "batch"] = "async"
    """sync: as asynchrony 0, so that no episode runs while the trainer trains; a batch's episodes begin when it is
    asked for, so that a checkpoint before that holds none. batch: sync with barriers, the way of rollout that ROLL
    Flash compares with: no episode goes on before all have their turn's reply and their environment's answer, no reward
    is computed before all have ended, and nothing new starts before that."""
    redundant_groups: int = 0
    """Groups played beyond what a batch needs; when it is full, those that can serve no later one are cancelled and
    their tasks come again, up to ``max_retries`` times."""
    redundant_members: int = 0
    """Episodes per group beyond ``group_size``; the first ``group_size`` to end make the group, the others are
    cancelled."""
    partial_groups: bool = False
    """A batch is full with any ``batch_size`` finished episodes, instead of ``batch_size / group_size`` full groups."""
    filter_zero_variance: bool = False
    """Groups whose members all have the same reward teach a group baseline nothing: they are discarded and the next
    task takes their place (dynamic filtering)."""
    prompt_replication: bool = True
    """Episodes of a group go to the engines one by one; False: the whole group to one engine, as a request for
    several samples of a prompt does."""
    max_turns: int | None = None
    """Turns per episode; None: what the environment advises (``max_turns``), else 50."""
    max_tokens_per_turn: int = 512
    max_tokens_per_episode: int = 8192
    """Prompt and completion together: the context."""
    reset_timeout_s: float = 120.0
    """Making the environment included."""
    reset_retries: int = 2
    """How often a failed reset is tried again, each time in a new environment; a failed step never is."""
    reset_backoff_s: float = 0.25
    """Pause before the first retry of a reset; doubles with each."""
    step_timeout_s: float = 120.0
    generate_timeout_s: float = 600.0
    """One turn of the policy, pauses for weight updates included."""
    reward_timeout_s: float = 120.0
    """One call of the controller's ``reward_fn``."""
    num_reward_workers: int = 16
    """Rewards computed side by side, beside the episodes."""
    episode_timeout_s: float = 3600.0
    """Reset to last step; the reward not included."""
    batch_timeout_s: float = 7200.0
    """Longest wait of ``get_batch``."""
    sync_timeout_s: float = 300.0
    """Longest weight update."""
    shutdown_timeout_s: float = 30.0
    """Longest wait for environments to close at the end; what still hangs then is named in the log."""
    heartbeat_s: float = 0.5
    """How soon the death of an engine or of the event loop is noticed."""
    max_failure_rate: float = 0.5
    """The run stops when more than this share of the last ``failure_window`` episodes failed; 1.0: never."""
    failure_window: int = 64
    """Episodes over which the failure rate is taken, or ``num_envs`` if that is more; fewer than a quarter of it, or
    than one for each slot, never stop the run."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Ends a turn, besides the tokenizer's end-of-sequence token."""
    system_prompt: str | None = None
    """Put before the first observation."""
    history: Literal["append", "fork"] = "append"
    """Where a chat template rewrites earlier turns (drops their reasoning): append keeps the sequence as it was
    sampled; fork starts a new segment, as the template has it (``Trajectory.split``)."""
    on_stale: Literal["wait", "abort"] = "wait"
    """What a batch does about running episodes that would be too old for the next one. wait: it waits for them and
    takes the oldest first, so that slow tasks are not under-represented; abort: it takes what is finished, and what
    became too old is aborted and its task tried again."""
    max_retries: int = 2
    """How often a group tries its task again after failed or aborted episodes, all members together; then it ends
    short (an empty one is dropped and the next task takes its place)."""
    on_sync: Literal["continue", "restart"] = "continue"
    """What new weights do to a turn being sampled: it keeps its tokens, each with its own version, and goes on, or is
    sampled again from its start."""
    deterministic: bool = False
    """Mode sync only: the same seed gives the same batches to the last bit, after a resume too, as long as environments
    are deterministic and no episode fails. The engine (one, of this process) makes no step while an episode is between
    two turns, since rounding depends on what a step computes together; with slow environments that takes longer."""

    def __post_init__(self) -> None:
        self._check_types()
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"RolloutConfig.{name} is {value}, must be positive and finite")
        if not (self.asynchrony >= 0.0 and math.isfinite(self.asynchrony)):
            raise ValueError(f"RolloutConfig.asynchrony is {self.asynchrony}, must be a finite number >= 0")
        if not 0.0 < self.max_failure_rate <= 1.0:
            raise ValueError(f"RolloutConfig.max_failure_rate is {self.max_failure_rate}, must be in (0, 1]")
        if self.batch_size % self.group_size:
            raise ValueError(
                f"RolloutConfig.batch_size is {self.batch_size}, must be a multiple of group_size {self.group_size}"
            )
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"RolloutConfig.{name} is {getattr(self, name)}, must be >= 0")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"RolloutConfig.{name} is {getattr(self, name)!r}, must be one of {allowed}")
        if self.redundant_members and self.num_envs < self.launched_per_group:
            raise ValueError(
                f"RolloutConfig.redundant_members is {self.redundant_members}: a group of {self.group_size} launches "
                f"{self.launched_per_group} episodes, but num_envs is {self.num_envs}, so the redundant ones could "
                f"only start when the others have ended; must be at most {max(self.num_envs - self.group_size, 0)}"
            )
        if self.num_envs <= self.redundant_groups * self.launched_per_group:
            raise ValueError(
                f"RolloutConfig.redundant_groups is {self.redundant_groups}: as many hung groups of "
                f"{self.launched_per_group} would take all slots, num_envs is {self.num_envs}; must be at most "
                f"{(self.num_envs - 1) // self.launched_per_group}"
            )
        useless = self.redundant_members or (self.redundant_groups and not self.filter_zero_variance)
        if self.mode == "batch" and useless:
            name = "redundant_members" if self.redundant_members else "redundant_groups"
            raise ValueError(
                f"RolloutConfig.{name} is {getattr(self, name)} in mode 'batch', in which all wait for the slowest, "
                "surplus or not; must be 0 (redundant_groups may stand in for filtered ones)"
            )
        if self.filter_zero_variance and self.group_size < 2:
            raise ValueError(
                f"RolloutConfig.filter_zero_variance is true with group_size {self.group_size}: every group would be "
                "filtered; must be false, or group_size at least 2"
            )
        if self.filter_zero_variance and self.partial_groups:
            raise ValueError(
                "RolloutConfig.filter_zero_variance is true with partial_groups: only full groups can be filtered; "
                "one of the two must be false"
            )
        if self.mode == "batch" and self.on_sync == "restart":
            raise ValueError(
                "RolloutConfig.on_sync is 'restart' in mode 'batch', in which no turn is sampled during an update; "
                "must be 'continue'"
            )
        if self.deterministic:
            self._check_deterministic()
        self.sampling()
        self._check_ray()

    def _check_ray(self) -> None:
        self.placement()
        if self.ray_shards and self.worker != "ray":
            raise ValueError(
                f"RolloutConfig.ray_shards is {self.ray_shards} with worker {self.worker!r}; must be 0, or worker 'ray'"
            )
        if self.ray_shards > self.num_envs:
            raise ValueError(
                f"RolloutConfig.ray_shards is {self.ray_shards}, num_envs {self.num_envs}: a shard would have no slot; "
                f"must be at most {self.num_envs}"
            )

    def _check_deterministic(self) -> None:
        if self.mode != "sync":
            raise ValueError(
                f"RolloutConfig.deterministic is true in mode {self.mode!r}; must be false, or mode 'sync'"
            )
        for name in ("redundant_groups", "redundant_members", "partial_groups"):
            if getattr(self, name):
                raise ValueError(
                    f"RolloutConfig.deterministic is true with {name}: what a batch is made of then depends on which "
                    "episodes end first; one of the two must be off"
                )

    def _check_types(self) -> None:
        """Whole numbers and numbers are such: a YAML file or a caller may give anything."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            declared = str(setting.type)
            if value is None and "None" in declared:
                continue
            if declared.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"RolloutConfig.{setting.name} is {value!r}, must be a whole number")
            if declared == "float" and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"RolloutConfig.{setting.name} is {value!r}, must be a number")

    @property
    def alpha(self) -> float:
        """Asynchrony in force: 0 in the modes sync and batch."""
        return self.asynchrony if self.mode == "async" else 0.0

    @property
    def groups_per_batch(self) -> int:
        """Groups that a training step takes."""
        return self.batch_size // self.group_size

    @property
    def launched_per_group(self) -> int:
        """Episodes started for a group, the redundant ones included."""
        return self.group_size + self.redundant_members

    @property
    def max_groups(self) -> int:
        """Most groups running or buffered: (1 + alpha) * batch, and the redundant ones."""
        wanted = math.floor((1.0 + self.alpha) * self.batch_size / self.group_size + 1e-9)
        return wanted + self.redundant_groups

    @property
    def max_outstanding(self) -> int:
        """Most episodes waiting to start, running or buffered."""
        return self.max_groups * self.launched_per_group

    @property
    def is_redundant(self) -> bool:
        """More is played than batches need."""
        return self.redundant_groups > 0 or self.redundant_members > 0

    def sampling(self, *, greedy: bool = False) -> SamplingParams:
        """Sampling parameters of a turn; greedy sets temperature 0."""
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens_per_turn,
            stop_token_ids=self.stop_token_ids,
        )

    def placement(self) -> Placement:
        """Where ``worker`` "ray" puts environments."""
        from agentenv.cluster.placement import Placement, parse_resources

        resources = tuple(parse_resources(self.ray_resources).items())
        return Placement(self.ray_address, self.num_envs, self.ray_envs_per_actor, resources)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all settings, for trainers that carry them in their own config."""
        return tuple(item.name for item in fields(cls))
