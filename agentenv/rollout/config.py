"""Settings of the rollout side, shared by all trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from agentenv.inference.protocol import SamplingParams

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
)


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
    """Environment slots, each with an environment and a thread of its own."""
    asynchrony: float = 1.0
    """alpha, any real >= 0: a batch for step n holds only episodes started by version >= n - alpha. 0 is on-policy.
    At most (1 + alpha) * batch_size episodes are running or buffered. Versions are whole, so the fraction of alpha
    never admits an older version; nothing is started that no step could take."""
    mode: Literal["async", "sync"] = "async"
    """sync: as asynchrony 0, so that no episode runs while the trainer trains."""
    max_turns: int | None = None
    """Turns per episode; None: what the environment advises (``max_turns``), else 50."""
    max_tokens_per_turn: int = 512
    max_tokens_per_episode: int = 8192
    """Prompt and completion together: the context."""
    reset_timeout_s: float = 120.0
    """Making the environment included."""
    step_timeout_s: float = 120.0
    generate_timeout_s: float = 600.0
    """One turn of the policy, pauses for weight updates included."""
    episode_timeout_s: float = 3600.0
    batch_timeout_s: float = 7200.0
    """Longest wait of ``get_batch``."""
    sync_timeout_s: float = 300.0
    """Longest weight update."""
    shutdown_timeout_s: float = 30.0
    """Longest wait for environments to close at the end; what still hangs then is named in the log."""
    max_failure_rate: float = 0.5
    """The run stops when more than this share of the last ``failure_window`` episodes failed; 1.0: never."""
    failure_window: int = 64
    """Episodes over which the failure rate is taken; fewer than a quarter of it never stop the run."""
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

    def __post_init__(self) -> None:
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
        if self.max_retries < 0:
            raise ValueError(f"RolloutConfig.max_retries is {self.max_retries}, must be >= 0")
        for name, allowed in (
            ("mode", ("async", "sync")),
            ("history", ("append", "fork")),
            ("on_stale", ("wait", "abort")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"RolloutConfig.{name} is {getattr(self, name)!r}, must be one of {allowed}")
        self.sampling()

    @property
    def alpha(self) -> float:
        """Asynchrony in force: 0 in sync mode."""
        return 0.0 if self.mode == "sync" else self.asynchrony

    @property
    def max_outstanding(self) -> int:
        """Most episodes running or buffered, a multiple of ``group_size``: (1 + alpha) * batch_size."""
        groups = math.floor((1.0 + self.alpha) * self.batch_size / self.group_size + 1e-9)
        return groups * self.group_size

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

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all settings, for trainers that carry them in their own config."""
        return tuple(item.name for item in fields(cls))
