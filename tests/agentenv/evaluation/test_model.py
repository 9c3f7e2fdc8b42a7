"""`agentenv eval --model` and `agentenv play`: a model in this process, from the policy that ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv import cli

pytest.importorskip("torch")
POLICY = "envs/agentenv_envs/text/policy_all"


@pytest.fixture
def policy(repository: Path) -> str:
    return str(repository / POLICY)


def test_the_policy_that_ships_plays_as_its_notes_say_and_a_killed_run_repeats_it(
    policy: str, tmp_path: Path
) -> None:
    report_path, log = tmp_path / "eval.json", tmp_path / "eval.episodes.jsonl"
    command = ["eval", "KeyDoor-v0", "--model", policy, "--split", "heldout", "--episodes", "64"]
    command += ["--max-tokens", "12", "--max-context", "256", "--num-envs", "16", "--json", str(report_path)]
    assert cli.main(command) == 0
    report: dict[str, Any] = json.loads(report_path.read_text())
    made = 0.24  # 512 tasks, docs in the folder of the policy
    assert report["interval"][0] - 0.05 < made < report["interval"][1] + 0.05
    assert 20 < report["tokens"]["completion"] < 60
    assert report["tokens"]["prompt"] > report["tokens"]["completion"]
    assert report["invalid_action_share"] < 0.2
    # Half of it forgotten and played again.
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:33]))
    assert cli.main(command) == 0
    again = json.loads(report_path.read_text())
    assert {n: v for n, v in again.items() if n != "timing"} == {
        n: v for n, v in report.items() if n != "timing"
    }


def test_weights_that_changed_meanwhile_are_refused(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in Path(policy).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    command = ["eval", "Echo-v0", "--model", str(copy), "--episodes", "2", "--max-tokens", "4"]
    command += ["--json", str(tmp_path / "eval.json")]
    assert cli.main(command) == 0
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert cli.main(command) == 2
    assert "model_digest was" in capsys.readouterr().err


def test_weights_of_sixteen_bits_play_too(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "KeyDoor-v0", "--model", policy, "--dtype", "bfloat16", "--max-tokens", "8"]
    assert cli.main([*command, "--episodes", "8", "--json", str(tmp_path / "eval.json")]) == 0
    report = json.loads((tmp_path / "eval.json").read_text())
    assert (report["episodes"], report["failed"]) == (8, 0)
    assert report["invalid_action_share"] < 0.3


def test_a_model_that_is_not_there_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "Echo-v0", "--model", str(tmp_path / "absent")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_one_episode_of_the_model_is_watched(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["play", "KeyDoor-v0", "--seed", "3", "--policy", policy, "--temperature", "0"]
    assert cli.main([*command, "--max-tokens", "12", "--max-context", "256"]) == 0
    out = capsys.readouterr().out
    assert "[1] > south\nYou are at c4.\n" in out
    assert out.endswith("solved after 7 turns, reward 1 (terminated)\n")


def test_one_episode_of_a_server_is_watched(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda request: "east\x1b[2J"
    assert cli.main(["play", "KeyDoor-v0", "--seed", "3", "--url", server.url, "--max-turns", "2"]) == 0
    assert "[1] > east\\u{1b}[2J\n" in capsys.readouterr().out
    assert len(server.requests) == 2
