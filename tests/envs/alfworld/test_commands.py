"""The commands `agentenv alfworld ...`."""

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv import cli
from agentenv_envs.alfworld.sources import find_games

pytestmark = pytest.mark.usefixtures("engine_installed")


@pytest.fixture
def run() -> Callable[..., int]:
    return lambda *arguments: cli.main(["alfworld", *map(str, arguments)])


def test_generated_games_pass_the_check_and_are_won(run, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert run("generate", tmp_path, "--games", 8, "--split", "heldout", "--size", "small") == 0
    said = capsys.readouterr().out
    assert "wrote 8 synthetic games" in said and "no result on ALFWorld" in said
    assert len(find_games(tmp_path / "json_2.1.1" / "heldout")) == 8
    assert run("check", tmp_path, "--play", 3) == 0
    said = capsys.readouterr().out
    assert "heldout: 8 games" in said and "synthetic: 8" in said
    assert "won by their walkthroughs: 3 of 3 played" in said


def test_the_check_names_damaged_games_and_those_that_are_not_won(run, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    run("generate", tmp_path, "--games", 4, "--size", "small")
    torn, wrong, *_ = sorted(find_games(tmp_path))
    torn.write_text("{")
    content = json.loads(wrong.read_text())
    wrong.write_text(json.dumps({**content, "walkthrough": ["look", "dance"]}))
    capsys.readouterr()
    assert run("check", tmp_path) == 1
    assert f"damaged game file {torn}: line 1, column 2" in capsys.readouterr().out
    assert run("check", tmp_path, "--play", 4) == 1
    said = capsys.readouterr().out
    assert "command 'dance' of its walkthrough is not admissible" in said
    assert "won by their walkthroughs: 2 of 3 played" in said


def test_playing_finds_games_that_the_engine_refuses_and_goes_on(run, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    run("generate", tmp_path, "--games", 3, "--size", "small")
    bad = sorted(find_games(tmp_path))[0]
    content = json.loads(bad.read_text())
    problem = content["pddl_problem"]
    content |= {"pddl_problem": f"{problem[: problem.index('(:goal')]}(:goal (foo)))", "walkthrough": None}
    bad.write_text(json.dumps(content))
    for folder in (tmp_path, bad):
        capsys.readouterr()
        assert run("check", folder, "--play", 3) == 1
        assert f"game {bad} is damaged: the engine refuses its PDDL" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert run("generate", tmp_path / "file", "--games", 1) == 2
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


def test_a_folder_without_games_is_an_error(run, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert run("check", tmp_path) == 2
    assert "`agentenv alfworld download` gets the official ones" in capsys.readouterr().err
    assert run("generate", tmp_path, "--games", 0) == 2
    assert "--games must be at least 1, got 0" in capsys.readouterr().err


def downloader(folder: Path, body: str) -> None:
    """A program in place of the official one, which needs the network."""
    folder.mkdir()
    program = folder / "alfworld-download"
    program.write_text(f"#!{sys.executable}\nimport os, sys, pathlib\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_the_download_calls_the_official_program_and_tells_what_is_there(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    downloader(
        tmp_path / "bin",
        "name = 'pick_and_place_simple-Mug-None-Shelf-1'\n"
        "game = pathlib.Path(sys.argv[2], 'json_2.1.1', 'valid_seen', name, 'trial_1', 'game.tw-pddl')\n"
        "game.parent.mkdir(parents=True)\ngame.write_text('{}')\n"
        "assert sys.argv[3:] == ['--force', '--force-download'], sys.argv",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    data = tmp_path / "data"
    assert run("download", "--dir", data, "--force") == 0
    said = capfd.readouterr().out
    assert "calling " in said and "valid_seen: 1 games" in said and f"ALFWORLD_DATA={data}" in said


def test_a_download_that_fails_is_one_clear_error(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    downloader(tmp_path / "bin", "sys.exit('no network')")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    assert run("download", "--dir", tmp_path / "data") == 2
    said = capfd.readouterr().err
    assert "no network" in said and "alfworld-download ended with exit code 1" in said
