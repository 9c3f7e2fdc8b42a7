"""The benchmark of dying engines: what it reads from a run's files, and whom it kills; without vLLM."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def faults(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/engine_faults.py")


def _write(folder: Path, steps: Sequence[int], tasks: Sequence[str], **episodes: Any) -> None:
    counts = {"produced": 4, "consumed": 4, "buffered": 0, "running": 0, "discarded": {}} | episodes
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "episodes": counts}))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    lines = [{"phase": "train", "group_id": task, "end_reason": "terminated"} for task in tasks]
    lines.append({"phase": "after", "group_id": "eval0-0", "end_reason": "terminated"})
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("steps", "tasks", "episodes", "wrong"),
    [
        ([1, 2], ["g0", "g2", "g1", "g3"], {}, {}),
        ([1, 2, 2], ["g0", "g1", "g2", "g3"], {}, {"steps_wrong": 1}),
        ([1, 3], ["g0", "g1", "g2", "g3"], {}, {"steps_wrong": 2}),
        ([1, 2], ["g0", "g1", "g3"], {}, {"tasks_lost": 1}),
        ([1, 2], ["g0", "g1", "g1", "g4"], {}, {"tasks_lost": 2, "tasks_twice": 1, "tasks_others": 1}),
        (
            [1, 2],
            ["g0", "g1", "g2", "g3"],
            {"produced": 6, "discarded": {"model_error": 1}},
            {"episodes_unaccounted": 1, "episodes_failed": 1},
        ),
    ],
    ids=["as it must be", "a step twice", "a step missing", "lost", "twice", "failed"],
)
def test_what_is_wrong_with_a_run_is_counted(
    faults: ModuleType, tmp_path: Path, steps: list[int], tasks: list[str], episodes: Any, wrong: Any
) -> None:
    _write(tmp_path, steps, tasks, **episodes)
    figures = faults.read_run(tmp_path, 2, 2)
    counted = {name: value for name, value in figures.items() if isinstance(value, int)}
    assert {name: value for name, value in counted.items() if value} == wrong


def test_all_processes_of_a_run_are_found_and_ended_and_no_others(
    faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "recipes"
    program.mkdir()
    (program / "swe_sao.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(faults, "REPOSITORY", tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    run = faults.Run(tmp_path / "run", [], patience_s=60.0)
    try:
        run.start()
        run.wait("both run", lambda: len(run.processes()) == 2)
        assert run.server() is None
        run.kill_all()
        run.trainer.wait()
        ends = time.monotonic() + 60
        while run.processes() and time.monotonic() < ends:
            time.sleep(0.02)
        assert not run.processes() and other.poll() is None
    finally:
        run.kill_all()
        other.kill()
        other.wait()
