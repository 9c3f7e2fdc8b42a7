"""ALFWorld's benchmark at a small size: what it compares, what it writes, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("textworld")
pytest.importorskip("alfworld")

from agentenv_envs.alfworld.engine import rules
from agentenv_envs.alfworld.games import write_game
from agentenv_envs.alfworld.generate import synthetic_game


@pytest.fixture(scope="module")
def alfworld(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/environments_alfworld.py")


def test_figures_and_bars_are_written_and_a_missed_bar_fails(
    alfworld: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alfworld, "RESET_MS", 1000.0)
    file = tmp_path / "out" / "alfworld.json"
    assert alfworld.main(["--smoke", "--check", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["figures"]["differing answers"] == 0
    assert results["figures"]["times"]["our step"]["number"] == 18
    assert results["figures"]["success"]["oracle"] == 1.0
    assert all(bar["holds"] for bar in results["bars"]) and "MISSED" not in capsys.readouterr().out
    monkeypatch.setattr(alfworld, "alfworld_figures", lambda **_: results["figures"])
    monkeypatch.setattr(alfworld, "RESET_MS", 0.001)
    assert alfworld.main(["--smoke", "--check"]) == 1
    assert alfworld.main(["--smoke"]) == 0


def test_a_difference_between_the_engines_is_counted(
    alfworld: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = alfworld.Engine
    plain_command = engine.command

    def command(self: object, said: str) -> object:
        state = plain_command(self, said)
        return state._replace(text=state.text + "!") if engine_is_fast(self) else state

    def engine_is_fast(self: object) -> bool:
        return bool(getattr(self, "is_fast", False))

    monkeypatch.setattr(engine, "command", command)
    games = [alfworld.synthetic_game(0, size="small")]
    assert alfworld.compare(games, 4, alfworld.Clock()) == 4


def test_games_of_a_folder_are_measured_and_a_folder_without_them_is_an_error(
    alfworld: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    domain, grammar = rules()
    for seed in range(2):
        folder = tmp_path / "json_2.1.1" / "valid_seen"
        write_game(synthetic_game(seed, size="small"), folder, seed, domain=domain, grammar=grammar)
    assert alfworld.main(["--smoke", "--check", "--data", str(tmp_path)]) == 0
    assert "games of a folder" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        alfworld.main(["--smoke", "--data", str(tmp_path), "--split", "train"])
    assert caught.value.code == 2
    assert "it has valid_seen" in capsys.readouterr().err


def test_sizes_out_of_range_are_refused(alfworld: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        alfworld.main(["--steps", "0"])
    assert caught.value.code == 2
    assert "--steps is 0, must be at least 1" in capsys.readouterr().err
