"""Whole runs with random settings, latencies, failures and hangs: none gets stuck, and every invariant holds."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.trajectory import Trajectory

_STEPS = 6
_HANG_S = 1e6


def _settings(chance: random.Random) -> dict[str, Any]:
    group_size = chance.choice([1, 1, 2, 4])
    settings = {
        "group_size": group_size,
        "batch_size": group_size * chance.choice([1, 2, 4]),
        "mode": chance.choice(["async", "async", "async", "sync", "batch"]),
        "asynchrony": chance.choice([0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 4.0]),
        "num_envs": chance.randint(6, 24),
        "filter_zero_variance": group_size > 1 and chance.random() < 0.3,
        "on_stale": chance.choice(["wait", "abort"]),
        "max_retries": chance.choice([0, 1, 3]),
        "prompt_replication": chance.random() < 0.7,
        "num_steps": chance.choice([None, _STEPS]),
        "num_reward_workers": chance.choice([1, 3, 16]),
        "generate_timeout_s": chance.choice([40.0, 1e5]),
        "episode_timeout_s": chance.choice([150.0, 1e5]),
        "reset_timeout_s": 30.0,
        "step_timeout_s": 60.0,
        "reward_timeout_s": 20.0,
        "batch_timeout_s": 20_000.0,
        "max_failure_rate": 1.0,
    }
    if settings["mode"] != "batch":
        settings["redundant_groups"] = chance.choice([0, 0, 1, 2])
        settings["redundant_members"] = chance.choice([0, 0, 1, 2])
        settings["on_sync"] = chance.choice(["continue", "restart"])
        redundant = settings["redundant_groups"] * (group_size + settings["redundant_members"])
        settings["num_envs"] += redundant
    return settings


def _tasks(tasks: Any, seed: int, failures: float, hangs: float, turns: int) -> Any:
    def draw(what: str, *of: int) -> random.Random:
        return random.Random(f"{seed}/{what}/{of}")

    def seconds(what: str, share: float, *of: int) -> float:
        chance = draw(what, *of)
        number = chance.random() / share
        if number < failures:
            raise OSError(f"{what} failed")
        return _HANG_S if number < failures + hangs else float(chance.randrange(20))

    return tasks(
        turns=turns,
        reset_s=lambda *of: seconds("reset", 0.5, *of),
        step_s=lambda *of: seconds("step", 1.0, *of),
        tokens=lambda *of: draw("tokens", *of).randrange(1, 20),
        reward=lambda *of: float(draw("reward", *of).randrange(2)),
    )


def _check(batch: list[Trajectory], step: int, run: Any) -> None:
    config = run.controller.config
    assert 0 < len(batch) <= config.batch_size
    assert len(batch) == config.batch_size or config.group_size > 1
    assert max(Counter(trajectory.group_id for trajectory in batch).values()) <= config.group_size
    for trajectory in batch:
        trajectory.validate()
        assert step - config.alpha <= trajectory.start_version <= step
        turns: list[list[int]] = [[]]
        for is_action, version in zip(trajectory.action_mask, trajectory.policy_versions, strict=True):
            turns[-1].append(version) if is_action else turns.append([])
        versions = [version for turn in turns for version in turn]
        assert (
            versions == sorted(versions) and trajectory.start_version <= versions[0] <= versions[-1] <= step
        )
        assert config.on_sync == "continue" or all(len(set(turn)) <= 1 for turn in turns)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_run_completes_and_keeps_every_invariant(virtual_run: Any, tasks: Any, seed: int) -> None:
    chance = random.Random(seed)
    settings = _settings(chance)
    played = _tasks(
        tasks, seed, chance.choice([0.0, 0.05, 0.2]), chance.choice([0.0, 0.03, 0.1]), chance.choice([1, 3])
    )

    async def reward(trajectory: Trajectory) -> float:
        number = random.Random(f"{seed}/{trajectory.episode_id}").random()
        if number < 0.05:
            raise ValueError("cannot grade this")
        await asyncio.sleep(_HANG_S if number < 0.08 else 10.0 * number)
        return trajectory.reward

    def make() -> Any:
        engines = [
            SimulatedEngine(DecodeModel(0.5, knee=8), tokens_per_id=1) for _ in range(chance.choice([1, 3]))
        ]
        return virtual_run(played, engines=engines, reward_fn=reward if seed % 2 else None, **settings)

    run = make()
    groups: list[str] = []
    for step in range(_STEPS):
        batch = run.controller.get_batch(step)
        _check(batch, step, run)
        groups += {trajectory.group_id for trajectory in batch}
        run.sleep(chance.choice([0.0, 5.0, 50.0]))
        run.counts()
        run.controller.sync_weights({}, step + 1)
        event = chance.random()
        if event < 0.1:
            assert len(run.controller.evaluate(None, [1, 2, 3])) == 3
        elif event < 0.2:
            run.controller.suspend()
            run.sleep(30.0)
            run.controller.resume()
        elif event < 0.4:
            state = json.loads(json.dumps(run.controller.state_dict(), allow_nan=False))
            run.controller.stop()
            run = make()
            run.controller.load_state_dict(state)
            run.controller.sync_weights({}, step + 1)
    assert len(set(groups)) == len(groups), "a group was trained twice"
    run.controller.stop()
    proxy = run.controller._proxy
    assert not proxy._serving and not proxy._to_restart and not proxy._router._home
