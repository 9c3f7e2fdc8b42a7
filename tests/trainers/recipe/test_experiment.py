"""The frame of a run: what is written down however its block ends."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from agentenv.errors import SandboxError
from agentenv_trainers.recipe import Experiment, Parsed, RecipeArguments


@dataclass
class Config:
    output_dir: str
    seed: int = 0


class NoRollouts:
    def stop(self) -> None:
        pass

    def counts(self) -> dict[str, Any]:
        return {"produced": 0, "consumed": 0, "buffered": 0, "running": 0, "discarded": {}}


class DeadDocker:
    kind = "docker"

    def close(self) -> None:
        raise SandboxError("the engine is gone")

    def left(self) -> int:
        raise SandboxError("the engine is gone")


def test_a_dead_docker_engine_leaves_a_summary_that_names_the_runs_own_error(tmp_path):
    parsed = Parsed(RecipeArguments(), Config(str(tmp_path / "out")), {}, frozenset())
    controller: Any = NoRollouts()
    with (
        pytest.raises(RuntimeError, match="what went wrong"),
        Experiment("name", parsed, controller, eval_env=lambda: None, eval_tasks="", sandboxes=DeadDocker()),
    ):
        raise RuntimeError("what went wrong")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"] == "RuntimeError: what went wrong"
    assert summary["containers_left"] is None
    assert (tmp_path / "out" / "report.html").exists()
