"""The benchmark of dying services: what it reads from a run's files; its bars; bad options. No run of it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("service_faults")


def line(phase: str, seed: int, reward: float, end_reason: str = "terminated") -> dict[str, Any]:
    return {"phase": phase, "seed": seed, "reward": reward, "end_reason": end_reason}


def test_held_out_rewards_are_compared_one_by_one_and_failures_that_were_trained_on_are_counted(
    script: ModuleType, tmp_path: Path
) -> None:
    lines = [line("before", 1, 1.0), line("before", 2, 0.0), line("before", 3, 0.0)]
    lines += [line("after", 2, 1.0), line("after", 1, 0.0), line("after", 3, 0.0)]
    lines += [line("train", 7, 1.0), line("train", 8, 0.0, "step_SandboxLostError")]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    found = script.rewards(tmp_path)
    assert found["heldout"] == 3 and found["heldout_reward"] == pytest.approx(1 / 3)
    assert found["heldout_different"] == 2, "the same mean is not the same reward"
    assert found["trained_on_failed"] == 1


def figures(**changes: Any) -> dict[str, Any]:
    names = ("exit_code", "steps_wrong", "tasks_lost", "tasks_twice", "tasks_others", "episodes_unaccounted")
    names += ("trained_on_failed", "heldout_different", "services_not_drained")
    names += ("processes_left", "containers_left", "weights_left")
    return {
        **dict.fromkeys(names, 0),
        "heldout": 4,
        "engine_losses": 1,
        "moved_turns": 1,
        "service": {"leases": 2, "leases_again": 1},
        "engine": {"requests_at_it": 1.0, "is_back": True, "tokens_again": 9.0},
        "engines": 2,
        "engines_in_service": 2.0,
        "episodes": {"discarded": {"step_SandboxLostError": 1, "reset_SandboxLostError": 1}},
    } | changes


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"engine": None}, []),
        ({"exit_code": 1}, ["exit code of the run"]),
        ({"heldout_different": 1}, ["held-out episodes with another reward after the kills"]),
        ({"episodes": {"discarded": {"step_SandboxLostError": 3}}}, ["episodes lost with it"]),
        (
            {"episodes": {"discarded": {"generate_ModelError": 1}}},
            ["episodes failed for any other reason"],
        ),
        (
            {"service": {"leases": 0, "leases_again": 0}, "episodes": {"discarded": {}}},
            ["leases of the service when it was killed", "leases of the service after it came back"],
        ),
        ({"containers_left": 1}, ["containers left"]),
        ({"engine_losses": 0}, ["engines that the run counts as lost"]),
        ({"engines_in_service": 1.0}, ["engines in service at the end"]),
        (
            {"engine": {"requests_at_it": 1.0, "is_back": True, "tokens_again": 0.0}},
            ["tokens of the engine after it came back"],
        ),
        (
            {
                "engine": {"requests_at_it": 1.0, "is_back": False, "tokens_again": 0.0},
                "engines_in_service": 1.0,
            },
            [],
        ),
    ],
)
def test_each_bar_can_be_missed(script: ModuleType, changes: dict[str, Any], missed: list[str]) -> None:
    assert [bar.name for bar in script.bars_of(figures(**changes)) if not bar.holds] == missed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "4", "--kill_service_after", "4"], "--kill_service_after 4: a step before the last"),
        (["--engines", "1"], "--engines 0 or at least 2"),
        (["--services", "1"], "--services at least 2"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    script: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
