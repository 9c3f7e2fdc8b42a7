"""Traced runs to look at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentenv import AsyncEnv
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation import DecodeModel, LogNormal, Outcome, Run, Workload, rollout_config, simulate
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.timeline import RecordedTrace, read_trace
from agentenv.trace import TRAINER, ChromeTrace, timed


class Flaky(AsyncEnv):
    """Two turns; tasks whose seed is a multiple of 5 fail in their second, those of 7 in their reset."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed or 0, 0
        await asyncio.sleep(0.001)
        if self.seed % 7 == 0:
            raise OSError("no such task")
        return "Begin.", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0.001 * (self.seed % 4))
        self.turn += 1
        if self.turn == 2 and self.seed % 5 == 0:
            raise LookupError("broke")
        return "Go on.", 1.0, self.turn == 2, False, {}


def _real_run(folder: Path, **settings: Any) -> tuple[RecordedTrace, dict[str, Any]]:
    """A run of the production controller in real time, in which episodes fail; its trace and its counts at the end."""
    config = RolloutConfig(
        **{
            "batch_size": 8,
            "num_envs": 6,
            "num_steps": 3,
            "reset_retries": 0,
            "max_failure_rate": 1.0,
            "max_tokens_per_turn": 8,
            "shutdown_timeout_s": 5.0,
            **settings,
        }
    )
    path, trace = folder / "trace.json", ChromeTrace()
    trace.open(path)

    async def reward(trajectory: Any) -> float:
        await asyncio.sleep(0.002)
        return 1.0

    proxy = LLMProxy([ScriptedModel(["go"], repeat=True, token_s=0.001)], trace=trace)
    controller = AsyncController(
        Flaky, proxy, ByteTokenizer(), config, task_seeds=iter(range(1000)), reward_fn=reward
    )
    with controller:
        for step in range(3):
            with timed(trace, TRAINER, "wait for batch", step=step + 1):
                controller.get_batch(step)
            controller.sync_weights({}, step + 1)
        controller.evaluate(None, [1, 2, 5])
    trace.close()
    return read_trace(path), controller.counts()


WORKLOAD = Workload(turns=3, tokens=LogNormal(100.0, 0.6), step_s=LogNormal(10.0, 1.0))


def _simulated_run(folder: Path, *, train_s: float = 30.0, **settings: Any) -> tuple[RecordedTrace, Outcome]:
    """Four steps in virtual time; its trace and what it took."""
    config = rollout_config(**{"batch_size": 8, "num_envs": 16, "num_steps": 4, **settings})
    engines = (DecodeModel(base_s=0.05, knee=4),) * 2
    run = Run(config, WORKLOAD, engines=engines, steps=4, train_s=train_s)
    outcome = simulate(run, seed=3, keep_batches=True, trace_path=folder / "trace.json")
    return read_trace(folder / "trace.json"), outcome


@pytest.fixture
def real_run(tmp_path: Path) -> Callable[..., tuple[RecordedTrace, dict[str, Any]]]:
    """Plays :func:`_real_run`; takes settings."""
    return partial(_real_run, tmp_path)


@pytest.fixture
def simulated_run(tmp_path: Path) -> Callable[..., tuple[RecordedTrace, Outcome]]:
    """Plays :func:`_simulated_run`; takes settings."""
    return partial(_simulated_run, tmp_path)
