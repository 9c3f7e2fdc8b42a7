"""What benchmarks/learning.py compares: methods, ablations and the control, each as settings of a trainer's config.

Invariants:
- what is compared has the same policy at the start, tasks of the same distribution, and as many episodes;
- a method's learning rate is the only setting that was tuned, with the same effort for each (see LEARNING_RATES);
- a run is named by its method, staleness, seed and learning rate.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ENVIRONMENT = "KeyDoor-v0"
STALENESS = (0, 2, 8)
"""Batches between the weights that sample and those that are trained."""
ABLATION_STALENESS = 2
"""Of ablations and control."""
SEEDS = 5
POOL = 128
"""Training tasks where tasks must come again: the baseline per task needs a history of each."""
TUNING_RATES = (1e-4, 2e-4, 3e-4, 1e-3)
TUNING_STALENESS = (0, 8)
TUNING_SEEDS = (100, 101)
"""Of the runs that a learning rate is chosen by; no reported run has such a seed."""

LEARNING_RATES = {
    "sao": 3e-4,
    "sao_math": 3e-4,
    "ppo": 3e-4,
    "running_mean": 2e-4,
    "grpo": 3e-4,
    "grpo_dis": 2e-4,
}
"""Chosen by `python benchmarks/learning.py --tune`: the one of TUNING_RATES with the best mean held-out success over
TUNING_STALENESS and TUNING_SEEDS. Ablations have the learning rate of SAO, from which they differ in the one setting
that they are named by; the running mean per task has that of the running mean."""

CRITIC_RATE = 5.0
"""Learning rate of the critic over that of the policy: the paper's ratio, not tuned."""


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Args:
        label: as it is printed.
        trainer: whose config the settings belong to.
        settings: beside those that all runs share.
        tuned_as: whose learning rate it has.
        pool: number of training tasks; None: as many as there are.
        shuffled: the rewards of each batch are dealt out among its episodes anew.
    """

    label: str
    trainer: Literal["sao", "grpo"]
    settings: Mapping[str, Any]
    tuned_as: str
    pool: int | None = None
    shuffled: bool = False

    @property
    def has_critic(self) -> bool:
        """Whether its advantages come from one."""
        return self.trainer == "sao" and self.settings.get("advantage", "gae") == "gae"


def _sao(label: str, *, pool: int | None = None, shuffled: bool = False, **settings: Any) -> Method:
    return Method(label, "sao", settings, "sao", pool, shuffled)


METHODS = {
    "sao": _sao("SAO"),
    "sao_math": Method(
        "SAO with the mask for mathematics", "sao", {"clip_low": 0.3, "clip_high": 5.0}, "sao_math"
    ),
    "grpo": Method("GRPO", "grpo", {"group_size": 8}, "grpo"),
    "grpo_dis": Method("GRPO + DIS", "grpo", {"group_size": 8, "objective": "dis"}, "grpo_dis"),
    "ppo": Method("PPO (SAO without DIS)", "sao", {"objective": "ppo_clip"}, "ppo"),
    "running_mean": Method(
        "running mean of 128 rewards", "sao", {"advantage": "running_mean"}, "running_mean"
    ),
}
"""Compared at every staleness."""

ABLATIONS = {
    "k1": _sao("one critic update per batch (K = 1)", critic_updates=1),
    "full_critic": _sao("all of the critic's parameters train", freeze_critic_attention=False),
    "step_mean": _sao("value of a step: mean of its tokens", value_granularity="step_mean"),
    "step_last": _sao("value of a step: its last token's", value_granularity="step_last"),
    "unmasked_gae": _sao("observation tokens in GAE", skip_observations=False),
    "pool": _sao(f"SAO on {POOL} tasks that come again", pool=POOL),
    "running_mean_per_task": Method(
        f"running mean of 8 rewards per task, on the same {POOL}",
        "sao",
        {"advantage": "running_mean_per_task"},
        "running_mean",
        POOL,
    ),
}
"""SAO with one setting changed, at ABLATION_STALENESS; `ppo` and `running_mean` of the methods belong here, too."""

CONTROL = {"shuffled": _sao("SAO with shuffled rewards", shuffled=True)}
"""Nothing can be learned from rewards that are dealt out by chance: what still moves is drift."""

ALL = {**METHODS, **ABLATIONS, **CONTROL}


@dataclass(frozen=True)
class Sizes:
    """What every run has in common; another size is another experiment."""

    steps: int = 120
    batch_size: int = 32
    """Episodes of a training step."""
    critic_only_steps: int = 10
    """First steps in which only a critic trains, where there is one: the paper's warm-up. They are steps like all
    others and take their share of the episodes."""
    evaluation_episodes: int = 512
    """Held-out episodes after each run, sampled at temperature 1."""
    start_episodes: int = 2048
    """The same of the policy that all runs start from."""


SMOKE = Sizes(steps=3, batch_size=8, critic_only_steps=1, evaluation_episodes=8, start_episodes=16)


@dataclass(frozen=True)
class Run:
    """One run: everything that its result depends on, but for code and machine."""

    method: str
    """A name in ALL; "start": only the evaluation of the policy that all runs start from."""
    staleness: int
    seed: int
    learning_rate: float
    sizes: Sizes
    policy: str
    """What its weights are; see `fingerprint`."""
    environment: str = ENVIRONMENT
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of the method, so that a finished run is known to have been of these."""

    @property
    def name(self) -> str:
        """Of its file."""
        if self.method == "start":
            return "start"
        return f"{self.method}-staleness{self.staleness}-seed{self.seed}-rate{self.learning_rate:g}"

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def make_run(
    method: str, staleness: int, seed: int, sizes: Sizes, policy: str, learning_rate: float | None = None
) -> Run:
    """A method's run, with the learning rate that was chosen for it."""
    chosen = ALL[method]
    rate = LEARNING_RATES[chosen.tuned_as] if learning_rate is None else learning_rate
    return Run(method, staleness, seed, rate, sizes, policy, settings=dict(chosen.settings))


def start_run(sizes: Sizes, policy: str) -> Run:
    """The evaluation of the policy that all runs start from."""
    return Run("start", 0, 0, 0.0, sizes, policy)


def grid(sizes: Sizes, policy: str, *, seeds: int, staleness: Sequence[int]) -> list[Run]:
    """All runs of the benchmark, seed by seed: whatever is finished when it is stopped is balanced."""
    runs = [start_run(sizes, policy)]
    for seed in range(seeds):
        runs += [make_run(method, lag, seed, sizes, policy) for lag in staleness for method in METHODS]
        lag = ablation_staleness(staleness)
        runs += [make_run(method, lag, seed, sizes, policy) for method in (*ABLATIONS, *CONTROL)]
    return runs


def ablation_staleness(staleness: Sequence[int]) -> int:
    """ABLATION_STALENESS, or the greatest there is where that is not among them."""
    return ABLATION_STALENESS if ABLATION_STALENESS in staleness else max(staleness)


def tuning(sizes: Sizes, policy: str) -> list[Run]:
    """The runs that learning rates are chosen by."""
    return [
        make_run(method, lag, seed, sizes, policy, rate)
        for method in METHODS
        for rate in TUNING_RATES
        for lag in TUNING_STALENESS
        for seed in TUNING_SEEDS
    ]


def fingerprint(policy: Path) -> str:
    """A few digits that say which weights a folder holds."""
    return hashlib.blake2b((policy / "model.safetensors").read_bytes(), digest_size=6).hexdigest()
