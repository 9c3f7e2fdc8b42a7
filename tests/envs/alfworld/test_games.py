"""Games in files and folders, and what is said where something is missing or damaged; none of it needs the engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.alfworld.games import UnsolvableGameError, read_game, write_game
from agentenv_envs.alfworld.generate import synthetic_game
from agentenv_envs.alfworld.household import FAMILIES
from agentenv_envs.alfworld.sources import FolderGames, SyntheticGames, find_games, open_games

GRAMMAR = 'grammar :: "Your task is to: UNKNOWN GOAL."'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve games of a split "train"."""
    for seed in range(12):
        write_game(
            synthetic_game(seed), tmp_path / "json_2.1.1" / "train", seed, domain="(domain)", grammar=GRAMMAR
        )
    return tmp_path


def test_a_game_is_read_as_it_was_written(tmp_path: Path) -> None:
    for seed in range(20):
        game = synthetic_game(seed)
        file = write_game(game, tmp_path, seed, domain="(domain)", grammar=GRAMMAR)
        found = read_game(file)
        assert (found.task, found.problem, found.walkthrough) == (game.task, game.problem, game.walkthrough)
        assert found.synthetic
        assert found.grammar == f'grammar :: "Your task is to: {game.sentence}."'
        described = json.loads(file.with_name("traj_data.json").read_text())
        assert described["synthetic"] is True and described["task_type"] == game.task.family


def test_a_missing_walkthrough_is_worked_out(data: Path) -> None:
    file = find_games(data)[0]
    content = json.loads(file.read_text())
    wanted = content["walkthrough"]
    file.write_text(json.dumps({**content, "walkthrough": None}))
    assert list(read_game(file).walkthrough or ()) == wanted


def test_a_receptacle_without_a_type_leads_to_no_walkthrough(data: Path) -> None:
    file = find_games(data, ["pick_and_place_simple"])[0]
    content = json.loads(file.read_text())
    problem, thing = content["pddl_problem"], read_game(file).task.thing
    inside = re.search(rf"\(inReceptacle {thing}_\S+ (\S+)\)", problem)
    assert inside is not None
    untyped = re.sub(rf"\(receptacleType {inside[1]} \S+\)", "", problem)
    file.write_text(json.dumps({**content, "walkthrough": None, "pddl_problem": untyped}))
    walkthrough = read_game(file).walkthrough or ()
    assert not any(inside[1].lower() in command for command in walkthrough)


def damage(file: Path, change: Any) -> None:
    if isinstance(change, bytes):
        file.write_bytes(change)
    else:
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, **change}))


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("game.tw-pddl", b'{"pddl_domain": "x",\n "grammar"', "line 2, column 11"),
        ("game.tw-pddl", b"{\n\xff\xfe", "line 2, byte 2 is not UTF-8"),
        ("game.tw-pddl", b"[" * 200_000, "JSON that can't be read: maximum recursion depth"),
        ("traj_data.json", b'{"n": ' + b"9" * 5000 + b"}", "JSON that can't be read: Exceeds the limit"),
        ("game.tw-pddl", {"pddl_domain": ""}, "pddl_domain is empty"),
        ("game.tw-pddl", {"grammar": " "}, "grammar is empty"),
        ("game.tw-pddl", {"pddl_problem": "(:init \ud800"}, "pddl_problem holds half a character, '\\ud800'"),
        ("game.tw-pddl", b"", "line 1, column 1"),
        ("game.tw-pddl", b"[]", "a JSON list, must be an object"),
        ("game.tw-pddl", b"{}", "pddl_domain must be a str; the file has no such key"),
        ("game.tw-pddl", {"grammar": 3}, "grammar must be a str; the file has a int there"),
        ("game.tw-pddl", {"pddl_problem": "(define"}, "no (:init ...)"),
        (
            "traj_data.json",
            {"task_type": "juggle"},
            "task_type is 'juggle', must be one of pick_and_place_simple",
        ),
        ("traj_data.json", {"pddl_params": {}}, "pddl_params.object_target must be a name, got None"),
        ("traj_data.json", {"pddl_params": None}, "pddl_params must be a dict"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_what_helps(
    data: Path, name: str, change: Any, what: str
) -> None:
    file = sorted(find_games(data))[0]
    damage(file.with_name(name), change)
    with pytest.raises(UsageError) as caught:
        read_game(file)
    message = str(caught.value)
    assert str(file.with_name(name)) in message
    assert what in message
    assert "agentenv alfworld check DIR" in message and "agentenv alfworld download --force" in message


def test_a_missing_file_says_which_commands_get_it(data: Path) -> None:
    file = find_games(data)[0]
    file.with_name("traj_data.json").unlink()
    with pytest.raises(UsageError, match=r"there is no .*traj_data.json; `agentenv alfworld download`"):
        read_game(file)


def test_games_that_cannot_be_won_are_passed_over(data: Path) -> None:
    games = FolderGames(find_games(data), None)
    first = next(file for file in find_games(data) if read_game(file).task_id == games.game(0).task_id)
    damage(first, {"solvable": False})
    with pytest.raises(UnsolvableGameError, match="can't be won"):
        read_game(first)
    assert games.game(0).task_id == games.game(1).task_id
    for file in find_games(data):
        damage(file, {"solvable": False})
    with pytest.raises(UsageError, match="all 12 games say that they can't be won"):
        games.game(0)


def test_a_seed_chooses_a_game_of_the_folder_and_wraps_around(data: Path) -> None:
    games = open_games("train", str(data), None, "full", None)
    assert isinstance(games, FolderGames) and len(games) == 12
    ids = [games.game(seed).task_id for seed in range(12)]
    assert len(set(ids)) == 12
    assert games.game(12).task_id == ids[0]
    assert open_games("train", str(data), None, "full", 3).game(3).task_id == ids[0]
    assert open_games("train", str(data / "json_2.1.1"), None, "full", None).game(5).task_id == ids[5]


def test_one_file_or_its_folder_is_data_too(data: Path) -> None:
    file = find_games(data)[0]
    for path in (file, file.parent):
        games = open_games("train", str(path), None, "full", None)
        assert {games.game(seed).task_id for seed in range(3)} == {read_game(file).task_id}


def test_games_with_slices_and_of_other_families_are_left_out(data: Path) -> None:
    family = FAMILIES[0]
    some = find_games(data, [family])
    assert 0 < len(some) < 12
    assert all(file.parent.parent.name.startswith(family) for file in some)
    folder = some[0].parent.parent
    folder.rename(folder.with_name(folder.name.replace("-None-", "Sliced-None-")))
    assert len(find_games(data, [family])) == len(some) - 1


def test_the_official_data_is_where_alfworld_keeps_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "json_2.1.1" / "train").rename(data / "json_2.1.1" / "valid_seen")
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    for chosen in (None, "official"):
        games = open_games("valid_seen", chosen, None, "full", None)
        assert isinstance(games, FolderGames) and len(games) == 12
    assert isinstance(open_games("train", None, None, "full", None), SyntheticGames)
    with pytest.raises(
        UsageError, match=r"no folder .*train .*it has valid_seen; `agentenv alfworld download`"
    ):
        open_games("train", "official", None, "full", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "test"}, "split must be one of train, heldout .* got 'test'"),
        ({"split": "valid_seen"}, r"there is no folder .*valid_seen .*agentenv alfworld download"),
        (
            {"data": "nowhere"},
            r"there is no folder nowhere.json_2.1.1.train .*agentenv alfworld generate DIR",
        ),
        ({"families": ["juggle"]}, "families must be some of pick_and_place_simple, .* got"),
        ({"families": []}, "families must be some of"),
        ({"families": FAMILIES[0]}, "families must be some of"),
        ({"families": 5}, "families must be some of"),
        ({"families": [["look"]]}, "families must be some of"),
        *(
            ({"data": "nowhere", "split": split}, "split must be the name of a folder, such as train")
            for split in ("", ".", "..", "../train", "json_2.1.1/train", "/", 5, None, "a\0")
        ),
        ({"size": "huge"}, "size must be one of small, full, got 'huge'"),
        ({"num_games": 0}, "num_games must be a whole number of at least 1 or None, got 0"),
        ({"data": "nowhere", "size": "small"}, "size='small' is for synthetic games"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_what_is_allowed(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    arguments = {
        "split": "train",
        "data": None,
        "families": None,
        "size": "full",
        "num_games": None,
        **change,
    }
    with pytest.raises(UsageError, match=message):
        open_games(**arguments)


def test_a_folder_without_games_says_so(data: Path) -> None:
    for file in find_games(data):
        file.unlink()
    with pytest.raises(UsageError, match=r"has no game \(game.tw-pddl\); `agentenv"):
        open_games("train", str(data), None, "full", None)
