"""What environments by the ten thousand cost the controller: real CPU time of its loop, in virtual time.

Every run is one batch loop of a trainer that trains for no time, over the production classes. They differ in what is
played in the controller's loop:

* :func:`play`, everything: the production's slots over modelled environments and engines;
* ``TurnSlots`` (:mod:`agentenv.simulation.shard_slots`), the turns alone: episodes live in shards, which ask the
  controller for each turn;
* ``EpisodeSlots``, nothing of an episode: shards ask the engines by themselves and deliver trajectories;
* :func:`play_models`, the models alone, without the production's classes: what of all figures is the simulation's own.

Invariants:

* CPU time is that of the thread in which the loop runs, from the first episode to the last batch; making and ending the
  controller is not in it.
* Python's collector is off where it isn't measured itself: what it takes depends on all that a process holds. Nothing
  is left for it but what failed.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from agentenv.inference.protocol import GenerationRequest
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.rollout.slot import EpisodeSource
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.simulation.environment import SimulatedEnv, SimulatedTasks, SimulatedTokenizer
from agentenv.simulation.experiment import rollout_config
from agentenv.simulation.process_cost import collecting, peak_mb
from agentenv.simulation.shard_slots import ShardSlots
from agentenv.simulation.workload import Gaussian, LogNormal, Workload

TURNS = 20
STEPS, ALPHA = 5, 4.0
"""A run has as many batches as are in flight: every environment plays from the start."""
ENVS_PER_ENGINE = 100
MODEL = DecodeModel(base_s=0.03, knee=128)
WORKLOAD = Workload(
    turns=TURNS,
    step_s=Gaussian(20.0, 10.0),
    tokens=LogNormal(300.0, 0.6),
    most_tokens=4096,
    bad_reset_share=0.01,
    crash_share=0.01,
    hang_share=0.005,
)
_SOUND = replace(WORKLOAD, bad_reset_share=0.0, crash_share=0.0, hang_share=0.0)
STEP_TIMEOUT_S = 300.0
ENGINE_MTBF_S = 20.0 * 3600.0
"""Mean time between the crashes of one engine."""
ENGINE_AWAY_S = 300.0
"""How long it is away."""
_MOST_TOKENS = 131_072


@dataclass(frozen=True)
class Cost:
    """What a run took."""

    num_envs: int
    turns: int
    """Played by all environments, also those of episodes that failed."""
    episodes: int
    cpu_s: float
    """Of the controller's loop."""
    wall_s: float
    """Of all of it, making and ending the controller included."""
    grown_mb: float
    """Most resident memory of the process, beside what it had before the run."""
    turn_s: float
    """Virtual time from one turn to the next of an environment."""
    counts: dict[str, Any]
    """:meth:`AsyncController.counts` at the end."""
    collecting_s: float = 0.0
    """Of ``cpu_s``, in Python's collector."""
    longest_collection_s: float = 0.0
    resets: int = 0
    """Calls, those that failed included."""
    engine_crashes: int = 0
    moved_turns: int = 0
    """Turns that began again at another engine, since theirs crashed."""


def play(
    num_envs: int,
    *,
    seed: int = 0,
    slots: type[ShardSlots] | None = None,
    tokens_per_id: int = 1024,
    collects: bool = False,
) -> Cost:
    """One run.

    Args:
        num_envs: environments; a multiple of 5.
        seed: of workload and crashes.
        slots: of shards; None: the production's, over environments of the workload.
        tokens_per_id: see :class:`SimulatedEngine`; 1: every token of a reply is an id, as in production.
        collects: leave Python's collector on.
    """
    began, memory_mb = time.perf_counter(), peak_mb()
    runner = VirtualLoop()
    tasks = SimulatedTasks(replace(WORKLOAD if slots is None else _SOUND, seed=seed))
    source: EpisodeSource = (
        functools.partial(SimulatedEnv, tasks) if slots is None else slots(tasks, MODEL, tokens_per_id)
    )
    engines = [SimulatedEngine(MODEL, tokens_per_id=tokens_per_id) for _ in range(num_engines(num_envs))]
    crashes = _Crashes(engines, random.Random(seed))
    proxy = LLMProxy(engines)
    controller = AsyncController(
        source,
        proxy,
        SimulatedTokenizer(),
        config_for(num_envs),
        seed=seed,
        loop_factory=lambda: runner,
    )
    turns, seconds = 0, 0.0
    with controller, collecting(on=collects) as collector:
        runner.call(crashes.start())
        before = time.thread_time()
        for step in range(STEPS):
            for trajectory in controller.get_batch(step):
                turns += trajectory.turns
                seconds += trajectory.duration_s
            controller.sync_weights({}, step + 1)
        cpu_s = time.thread_time() - before
        counts = controller.counts()
    return Cost(
        num_envs,
        max(tasks.steps, turns),
        counts["produced"],
        cpu_s,
        time.perf_counter() - began,
        peak_mb() - memory_mb,
        seconds / turns,
        counts,
        collector.total_s,
        collector.longest_s,
        tasks.resets,
        crashes.number,
        proxy.moved_turns,
    )


def num_engines(num_envs: int) -> int:
    """Engines of so many environments."""
    return max(num_envs // ENVS_PER_ENGINE, 1)


def config_for(num_envs: int) -> RolloutConfig:
    """The run's configuration: deadlines and limits as in production, since they cost time."""
    return rollout_config(
        batch_size=num_envs // STEPS,
        num_envs=num_envs,
        asynchrony=ALPHA,
        num_steps=STEPS,
        step_timeout_s=STEP_TIMEOUT_S,
        max_tokens_per_turn=WORKLOAD.most_tokens,
        max_tokens_per_episode=_MOST_TOKENS,
        heartbeat_s=0.5,
        max_failure_rate=0.5,
    )


class _Crashes:
    """Engines that crash one after another, at random times."""

    def __init__(self, engines: list[SimulatedEngine], rng: random.Random) -> None:
        self.number = 0
        self._engines, self._rng = engines, rng
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._crash())

    async def _crash(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(len(self._engines) / ENGINE_MTBF_S))
            engine = self._rng.choice(self._engines)
            if not engine.is_away:
                engine.crash(ENGINE_AWAY_S)
                self.number += 1


def play_models(num_envs: int, *, seed: int = 0) -> Cost:
    """The workload's episodes by a task an environment, which calls the modelled engine and environment and no more."""
    began, memory_mb = time.perf_counter(), peak_mb()
    runner = VirtualLoop()
    tasks = SimulatedTasks(replace(_SOUND, seed=seed))
    engines = [SimulatedEngine(MODEL) for _ in range(num_engines(num_envs))]

    async def episode(number: int) -> None:
        env, engine, name = SimulatedEnv(tasks), engines[number % len(engines)], str(number)
        observation, _ = await env.reset(seed=number)
        for turn in range(TURNS):
            await engine.generate(GenerationRequest(f"{name}/{turn}", [int(observation)], episode_id=name))
            observation, *_ = await env.step("-")

    async def episodes() -> None:
        await asyncio.gather(*map(episode, range(num_envs)))

    with collecting(on=False) as collector:
        before = time.thread_time()
        runner.call(episodes())
        cpu_s = time.thread_time() - before
    seconds = runner.now
    runner.stop()
    return Cost(
        num_envs,
        tasks.steps,
        num_envs,
        cpu_s,
        time.perf_counter() - began,
        peak_mb() - memory_mb,
        seconds / TURNS,
        {},
        collector.total_s,
        collector.longest_s,
        tasks.resets,
    )
