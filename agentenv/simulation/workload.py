"""What the simulated episodes are like: how long steps take, how much the policy writes, what it earns.

Invariants:

* An episode is a function of (workload, task seed, member): all arms of an experiment meet the same episodes, in
  whatever order they play them.
* What members of a group share (the task's pass rate, a host that fails slow) is a function of (workload, task seed).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol


class Distribution(Protocol):
    """Something to draw from."""

    def draw(self, rng: random.Random) -> float:
        """One value."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: float

    def draw(self, rng: random.Random) -> float:
        """``value``."""
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Gaussian:
    """N(mean, sd), values below 0 taken as 0."""

    mean: float
    sd: float

    def draw(self, rng: random.Random) -> float:
        """One value, 0 or more."""
        return max(0.0, rng.gauss(self.mean, self.sd))

    def __str__(self) -> str:
        return f"N({self.mean:g}, {self.sd:g})"


@dataclass(frozen=True)
class LogNormal:
    """exp(N(ln median, sigma))."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        """One value above 0."""
        return self.median * math.exp(rng.gauss(0.0, self.sigma))

    def __str__(self) -> str:
        return f"log-normal (median {self.median:g}, sigma {self.sigma:g})"


@dataclass(frozen=True)
class Beta:
    """Beta(a, b), for shares."""

    a: float
    b: float

    def draw(self, rng: random.Random) -> float:
        """One value in (0, 1)."""
        return rng.betavariate(self.a, self.b)

    def __str__(self) -> str:
        return f"Beta({self.a:g}, {self.b:g})"


@dataclass(frozen=True)
class Failure:
    """How an episode's environment fails."""

    turn: int
    """In which step; -1: in the reset."""
    hangs: bool
    """It never answers; False: it raises."""


@dataclass(frozen=True)
class EpisodePlan:
    """All that will happen in one episode."""

    step_s: tuple[float, ...]
    """Latency of each environment step, in seconds."""
    tokens: tuple[int, ...]
    """Length of each reply of the policy; at least 1."""
    reward: float
    """At the last step: 1 or 0."""
    failure: Failure | None = None

    @property
    def latency_s(self) -> float:
        """Seconds in the environment."""
        return math.fsum(self.step_s)


@dataclass(frozen=True)
class Workload:
    """A distribution of episodes."""

    turns: int = 1
    """Turns of every episode."""
    step_s: Distribution = Constant(0.0)
    """Latency of an environment step, drawn anew for each turn."""
    tokens: Distribution = Constant(1.0)
    """Length of a reply, drawn anew for each turn."""
    difficulty: Distribution = Constant(1.0)
    """Factor of the lengths, drawn once per task: members of a group have replies of like lengths."""
    most_tokens: float = math.inf
    """Limit of a reply."""
    pass_rate: Distribution = Constant(1.0)
    """Probability of the reward 1, drawn once per task."""
    slow_share: float = 0.0
    """Probability that an episode fails slow: one of its steps, any, takes ``slow_s`` longer."""
    slow_s: float = 0.0
    slow_correlation: float = 0.0
    """Correlation of failing slow between two members of a group, in [0, 1]."""
    bad_reset_share: float = 0.0
    """Probability that the reset of an episode raises."""
    crash_share: float = 0.0
    """Probability that one of an episode's steps, any, raises."""
    hang_share: float = 0.0
    """Probability that one of an episode's steps, any, never answers."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"Workload.turns is {self.turns}, must be at least 1")
        for name in ("slow_share", "slow_correlation", "bad_reset_share", "crash_share", "hang_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"Workload.{name} is {getattr(self, name)}, must be in [0, 1]")
        if (failing := self.bad_reset_share + self.crash_share + self.hang_share) > 1.0:
            raise ValueError(
                f"Workload.bad_reset_share, crash_share and hang_share are {failing:g} together, must be at most 1"
            )

    def episode(self, task_seed: int, member: int) -> EpisodePlan:
        """The ``member``-th episode of a task."""
        shared = random.Random(f"{self.seed}/{task_seed}")
        pass_rate = self.pass_rate.draw(shared)
        difficulty = self.difficulty.draw(shared)
        group_is_slow = shared.random() < self.slow_share

        rng = random.Random(f"{self.seed}/{task_seed}/{member}")
        step_s = [self.step_s.draw(rng) for _ in range(self.turns)]
        lengths = [min(difficulty * self.tokens.draw(rng), self.most_tokens) for _ in range(self.turns)]
        tokens = [max(1, round(length)) for length in lengths]
        reward = float(rng.random() < pass_rate)
        # Two members that both follow their group agree for sure; with this share of followers the correlation of
        # two members is slow_correlation.
        follows = rng.random() < math.sqrt(self.slow_correlation)
        own_is_slow = rng.random() < self.slow_share
        slow_turn = rng.randrange(self.turns)
        if group_is_slow if follows else own_is_slow:
            step_s[slow_turn] += self.slow_s
        return EpisodePlan(tuple(step_s), tuple(tokens), reward, self._failure(rng))

    def _failure(self, rng: random.Random) -> Failure | None:
        kind, turn = rng.random(), rng.randrange(self.turns)
        if kind < self.bad_reset_share:
            return Failure(-1, hangs=False)
        kind -= self.bad_reset_share
        if kind < self.crash_share + self.hang_share:
            return Failure(turn, hangs=kind >= self.crash_share)
        return None
