"""A trainer killed with SIGKILL at random moments and resumed trains what an undisturbed one trains.

The trainer is a process of its own: it gets a batch, appends its tasks to a log, syncs the weights, and writes a
checkpoint of step, rollout state and length of the log by a rename. Resumed, it cuts the log to the checkpoint's
length, as a trainer goes back to the checkpoint's weights.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_STEPS = 12
_BATCH = 8
_KILLS = 6

_TRAINER = """
import asyncio, json, os, random, sys, time
from pathlib import Path

from agentenv import AsyncEnv
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel

settings = json.loads(sys.argv[1])
folder, steps, failures = Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
chance = random.Random(os.getpid())


class Env(AsyncEnv):
    async def reset(self, *, seed=None, options=None):
        self.turn = 0
        return "task", {}

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(chance.uniform(0.0, 0.01))
        if chance.random() < failures:
            raise OSError("an accident")
        return "", 1.0, self.turn == 2, False, {}


controller = AsyncController(
    Env,
    LLMProxy([ScriptedModel(["a"], repeat=True)]),
    ByteTokenizer(),
    RolloutConfig(num_envs=12, worker="inline", num_steps=steps, max_retries=1000, max_failure_rate=1.0, **settings),
    seed=3,
    task_seeds=range(1000),
)
log, checkpoint = open(folder / "log", "a+"), folder / "checkpoint"
first = 0
if checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
    controller.load_state_dict(saved["rollout"])
    first = saved["step"]
    controller.sync_weights({}, first)
log.truncate(saved["log"] if first else 0)
for step in range(first, steps):
    batch = controller.get_batch(step)
    for trajectory in batch:
        row = [step, trajectory.seed, trajectory.group_id, trajectory.episode_id, trajectory.start_version]
        log.write(json.dumps(row) + "\\n")
    log.flush()
    controller.sync_weights({}, step + 1)
    saved = {"step": step + 1, "rollout": controller.state_dict(), "log": os.fstat(log.fileno()).st_size}
    (folder / "new").write_text(json.dumps(saved))
    os.replace(folder / "new", checkpoint)
    print(step, flush=True)
    time.sleep(chance.uniform(0.0, 0.004))
controller.stop()
print("done", flush=True)
"""


def _start(folder: Path, settings: dict[str, Any], failures: float) -> subprocess.Popen[str]:
    arguments = [json.dumps(settings), str(folder), str(_STEPS), str(failures)]
    return subprocess.Popen(
        [sys.executable, "-c", _TRAINER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _kill_at_random_moments(
    folder: Path, settings: dict[str, Any], failures: float, chance: random.Random
) -> int:
    """Run to the end; returns how often it was killed. Each life trains a step or two, so that all get their share."""
    kills = 0
    while True:
        process = _start(folder, settings, failures)
        assert process.stdout is not None and process.stderr is not None
        try:
            if kills < _KILLS:
                for _ in range(chance.randint(0, 2)):
                    process.stdout.readline()
                time.sleep(chance.uniform(0.0, 0.02))
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += process.returncode == -signal.SIGKILL
            out, err = process.communicate() if process.returncode is None else ("", "")
        finally:
            process.kill()
            process.communicate()
        if kills < _KILLS or process.returncode == -signal.SIGKILL:
            continue
        assert process.returncode == 0, err
        assert out.endswith("done\n")
        return kills


def _log(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.parametrize(
    ("alpha", "group_size", "failures"),
    [(0.0, 1, 0.0), (1.0, 4, 0.0), (2.0, 1, 0.1), (0.0, 4, 0.1), (2.0, 4, 0.0)],
)
def test_a_run_killed_at_random_moments_trains_every_task_exactly_once(
    tmp_path: Path, alpha: float, group_size: int, failures: float
) -> None:
    settings = {"batch_size": _BATCH, "group_size": group_size, "asynchrony": alpha}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        folder.mkdir()
    process = _start(undisturbed, settings, failures)
    chance = random.Random(f"{alpha}/{group_size}")
    assert _kill_at_random_moments(killed, settings, failures, chance) >= _KILLS
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err

    rows = _log(killed)
    trained = Counter(seed for _, seed, *_ in rows)
    assert trained == Counter(seed for _, seed, *_ in _log(undisturbed))
    assert len(trained) == _STEPS * _BATCH // group_size and set(trained.values()) == {group_size}
    assert Counter(step for step, *_ in rows) == dict.fromkeys(range(_STEPS), _BATCH)
    episodes = [episode for _, _, _, episode, _ in rows]
    assert len(set(episodes)) == len(episodes)
    assert len({(seed, group) for _, seed, group, *_ in rows}) == len(trained)
    assert all(0 <= step - version <= alpha for step, *_, version in rows)
