"""Runs to look at: episodes of the form that training writes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.report import RunDirectory
from agentenv.trajectory import Trajectory

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp.exe\x1b[31m"
"""What a model may write to be executed, or to hide."""


def episode(number: int, **changes: Any) -> Trajectory:
    """An episode of task ``number % 5`` with two turns; even ones are solved."""
    solved = number % 2 == 0
    values: dict[str, Any] = {
        "reward": float(solved),
        "terminated": True,
        "end_reason": "terminated",
        "episode_id": f"g{number}-0",
        "task_id": f"task-{number % 5}",
        "group_id": f"g{number}",
        "seed": number,
        "turns": 2,
        "messages": [
            {"role": "user", "content": "The lamp is off."},
            {"role": "assistant", "content": "press the button"},
            {"role": "user", "content": "Nothing happens."},
            {"role": "assistant", "content": f"turn the lamp on {number}"},
        ],
        "info": {"success": solved, "rewards": [0.0, float(solved)]},
    }
    return Trajectory([1, 2], [3, 4], [-0.1, -0.2], [True, True], [0, 0], **(values | changes))


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., RunDirectory]]:
    """Makes a run directory with episodes of training, 4 a step, each one version old, and closes it in the end."""
    made = []

    def make(episodes: int = 12, name: str = "lamps") -> RunDirectory:
        run = RunDirectory.create(tmp_path / f"run{len(made)}", {"name": name, "settings": {"max_steps": 10}})
        made.append(run)
        for step in range(1, 1 + episodes // 4):
            numbers = range(4 * (step - 1), 4 * step)
            run.log_trajectories("train", step, [episode(n, start_version=max(0, step - 2)) for n in numbers])
            run.log_metrics(step, {"reward": step / 10, "success": 0.5, "entropy": 0.3})
        return run

    yield make
    for run in made:
        run.close()
