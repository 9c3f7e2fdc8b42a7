"""Runs in virtual time: the production controller over environments and an engine of which only the time is known.

A token takes one second. Everything in a test's numbers follows from that and from the tasks it names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentenv import AsyncEnv
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.simulation.environment import SimulatedTokenizer
from agentenv.trajectory import Trajectory

HANG_S = 1e7


@dataclass
class Tasks:
    """What the episodes of a run are like, and what its environments did.

    ``seed`` is the task's, ``member`` counts the episodes of a task in order of their resets, ``turn`` counts from 0.
    """

    turns: int = 1
    step_s: Callable[[int, int, int], float] = lambda seed, member, turn: 0.0
    tokens: Callable[[int, int, int], int] = lambda seed, member, turn: 1
    reward: Callable[[int, int], float] = lambda seed, member: 1.0
    reset_s: Callable[[int, int], float] = lambda seed, member: 0.0
    members: Counter[int] = field(default_factory=Counter)
    log: list[tuple[float, str, int]] = field(default_factory=list)
    """(time, reset | step | stepped | cancelled, seed)"""

    def note(self, what: str, seed: int) -> None:
        self.log.append((asyncio.get_running_loop().time(), what, seed))

    def seeds(self, what: str) -> list[int]:
        return [seed for _, noted, seed in self.log if noted == what]

    def times(self, what: str, seed: int | None = None) -> list[float]:
        return [time for time, noted, of in self.log if noted == what and seed in (None, of)]


class TimedEnv(AsyncEnv):
    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed or 0, 0
        self.member = self.tasks.members[self.seed]
        self.tasks.members[self.seed] += 1
        self.tasks.note("reset", self.seed)
        await asyncio.sleep(self.tasks.reset_s(self.seed, self.member))
        return str(self.tasks.tokens(self.seed, self.member, 0)), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.tasks.note("step", self.seed)
        try:
            await asyncio.sleep(self.tasks.step_s(self.seed, self.member, self.turn))
        except asyncio.CancelledError:
            self.tasks.note("cancelled", self.seed)
            raise
        self.tasks.note("stepped", self.seed)
        self.turn += 1
        if self.turn == self.tasks.turns:
            return "", self.tasks.reward(self.seed, self.member), True, False, {}
        return str(self.tasks.tokens(self.seed, self.member, self.turn)), 0.0, False, False, {}


class VirtualRun:
    """A controller whose time moves only inside its calls and :meth:`sleep`."""

    def __init__(
        self,
        env: Callable[[], AsyncEnv],
        engines: list[Any] | None,
        arguments: dict[str, Any],
        **settings: Any,
    ) -> None:
        self.loop = VirtualLoop()
        self.engines = engines or [SimulatedEngine(DecodeModel(1.0), tokens_per_id=1)]
        config = RolloutConfig(
            **{
                **{
                    f"{name}_timeout_s": HANG_S / 10
                    for name in ("reset", "step", "generate", "reward", "episode")
                },
                "batch_size": 4,
                "num_envs": 16,
                "worker": "inline",
                "batch_timeout_s": 1000.0,
                "max_tokens_per_turn": 10**6,
                "max_tokens_per_episode": 10**7,
                **settings,
            }
        )
        arguments.setdefault("task_seeds", iter(range(10**6)))
        try:
            self.controller = AsyncController(
                env,
                LLMProxy(self.engines),
                SimulatedTokenizer(),
                config,
                loop_factory=lambda: self.loop,
                **arguments,
            )
        except BaseException:
            self.loop.stop()
            raise

    @property
    def now(self) -> float:
        return self.loop.now

    def sleep(self, seconds: float) -> None:
        self.loop.call(asyncio.sleep(seconds))

    def train(self, steps: int, *, start: int = 0, train_s: float = 0.0) -> list[list[Trajectory]]:
        """Play whole training steps; returns their batches."""
        batches = []
        for step in range(start, start + steps):
            batches.append(self.controller.get_batch(step))
            self.sleep(train_s)
            self.controller.sync_weights({}, step + 1)
        return batches

    def counts(self) -> dict[str, Any]:
        """The counts, after whatever is ready has run; they add up."""
        self.sleep(0.0)
        counts = self.controller.counts()
        assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(
            counts["discarded"].values()
        )
        return counts


class MakeRun:
    def __init__(self) -> None:
        self.made: list[VirtualRun] = []

    def __call__(
        self,
        tasks: Tasks | None = None,
        *,
        env: Callable[[], AsyncEnv] | None = None,
        engines: list[Any] | None = None,
        reward_fn: Any = None,
        keep_group: Any = None,
        **settings: Any,
    ) -> VirtualRun:
        tasks = tasks or Tasks()
        arguments = {"reward_fn": reward_fn, "keep_group": keep_group}
        if "task_seeds" in settings:
            arguments["task_seeds"] = settings.pop("task_seeds")
        self.made.append(VirtualRun(env or (lambda: TimedEnv(tasks)), engines, arguments, **settings))
        return self.made[-1]


@pytest.fixture
def virtual_run() -> Iterator[MakeRun]:
    """Makes runs; all are stopped at the end, and then nothing runs and the accounts add up."""
    make = MakeRun()
    yield make
    for run in make.made:
        run.controller.stop()
        counts = run.controller.counts()
        assert counts["running"] == 0
        assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(
            counts["discarded"].values()
        )


@pytest.fixture
def tasks() -> type[Tasks]:
    """The class :class:`Tasks` (test modules can't import from here)."""
    return Tasks
