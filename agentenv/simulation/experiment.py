"""A training run in virtual time: the production controller over simulated engines and environments.

Nothing is scheduled here. The trainer's side of a run is a loop over ``get_batch``, a pause for training and
``sync_weights``; all else is :class:`~agentenv.rollout.AsyncController` and what it drives.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.inference.proxy import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.simulation.environment import SimulatedEnv, SimulatedTasks, SimulatedTokenizer
from agentenv.simulation.workload import Workload
from agentenv.trace import TRAINER, ChromeTrace, NoTrace, timed
from agentenv.trajectory import Trajectory

_NEVER_S = 1e9
_NO_LIMIT = 10**9


@dataclass(frozen=True)
class Run:
    """What is simulated."""

    config: RolloutConfig
    """From :func:`rollout_config`."""
    workload: Workload
    engines: Sequence[DecodeModel] = (DecodeModel(),)
    steps: int = 1
    """Training steps."""
    train_s: float = 0.0
    """Time of a training step."""
    counts_at_consumption: bool = False
    """The version goes up when a batch is taken, before training, so that new episodes may start at once and
    (1 + alpha) batches are in flight during training, too, as in the paper's propositions. False: after training, as
    trainers do."""
    reward_s: float | None = None
    """Time that the reward of an episode takes; None: the reward is the environment's and takes none."""


@dataclass
class Outcome:
    """What a simulated run took."""

    wait_s: list[float] = field(default_factory=list)
    """Of each step, the time inside ``get_batch``."""
    step_s: list[float] = field(default_factory=list)
    """Of each step, all of it: waiting, training, weight update."""
    batches: list[list[Trajectory]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    """:meth:`AsyncController.counts` at the end."""
    metrics: dict[str, float] = field(default_factory=dict)
    """:meth:`AsyncController.metrics` after the last step."""

    @property
    def total_s(self) -> float:
        """Of all steps."""
        return sum(self.step_s)


def rollout_config(**settings: Any) -> RolloutConfig:
    """A configuration without limits and deadlines, which would be a second model of time beside the workload's.

    Args:
        settings: fields of :class:`RolloutConfig`.
    """
    timeouts = ("reset", "step", "generate", "reward", "episode", "batch", "sync", "shutdown")
    return RolloutConfig(
        **{
            **{f"{name}_timeout_s": _NEVER_S for name in timeouts},
            "max_tokens_per_turn": _NO_LIMIT,
            "max_tokens_per_episode": _NO_LIMIT,
            # Nothing dies here, and a look every second would cost more than all else.
            "heartbeat_s": _NEVER_S,
            "max_failure_rate": 1.0,
            **settings,
        }
    )


def simulate(
    run: Run, *, seed: int = 0, keep_batches: bool = False, trace_path: Path | None = None
) -> Outcome:
    """Play all steps of a run.

    Args:
        run: what is simulated.
        seed: of tasks and workload; two runs with one seed meet the same tasks in the same order.
        keep_batches: return the trajectories, too.
        trace_path: where to write a trace, in virtual time; None: nowhere.

    Raises:
        OSError: the trace can't be written.
        RolloutError: the run is deadlocked, or what the controller raises.
    """
    runner = VirtualLoop()
    trace = NoTrace() if trace_path is None else ChromeTrace(clock=lambda: runner.now)
    if trace_path is not None:
        trace.open(trace_path)
    options: dict[str, Any] = {} if run.reward_s is None else {"reward_fn": _reward_after(run.reward_s)}
    controller = AsyncController(
        functools.partial(SimulatedEnv, SimulatedTasks(replace(run.workload, seed=seed))),
        LLMProxy([SimulatedEngine(model) for model in run.engines], trace=trace),
        SimulatedTokenizer(),
        run.config,
        seed=seed,
        loop_factory=lambda: runner,
        **options,
    )
    outcome = Outcome()
    with controller:
        for step in range(run.steps):
            began = runner.now
            with timed(trace, TRAINER, "wait for batch", step=step + 1):
                batch = controller.get_batch(step)
            outcome.wait_s.append(runner.now - began)
            if run.counts_at_consumption:
                controller.sync_weights({}, step + 1)
            if run.train_s:
                with timed(trace, TRAINER, "policy update", step=step + 1):
                    runner.call(asyncio.sleep(run.train_s))
            if not run.counts_at_consumption:
                controller.sync_weights({}, step + 1)
            outcome.step_s.append(runner.now - began)
            if keep_batches:
                outcome.batches.append(batch)
        outcome.counts, outcome.metrics = controller.counts(), controller.metrics()
    trace.close()
    return outcome


def _reward_after(seconds: float) -> Callable[[Trajectory], Coroutine[Any, Any, float]]:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(seconds)
        return trajectory.reward

    return reward
