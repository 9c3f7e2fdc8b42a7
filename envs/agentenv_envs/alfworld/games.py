"""A game: a household with a task, as drawn from a seed or read from a file in the official folder layout.

    DATA/json_2.1.1/SPLIT/FAMILY-Thing-None-Place-NUMBER/TRIAL/game.tw-pddl    and traj_data.json beside it

Invariants:
- a file that is damaged is a `UsageError` that names the file, what is wrong, and the command that gets or checks it;
- a synthetic game says so in both of its files, and in `Game.synthetic`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentenv.errors import UsageError

from .household import FAMILIES
from .problem import Task, read_layout
from .walkthrough import walkthrough

__all__ = ["GAME_FILE", "LAYOUT", "TASK_FILE", "Game", "UnsolvableGameError", "read_game", "write_game"]

GAME_FILE: Final = "game.tw-pddl"
TASK_FILE: Final = "traj_data.json"
LAYOUT: Final = "json_2.1.1"
"""Folder of the data that holds the splits."""

_TASK_LINE: Final = "UNKNOWN GOAL"


class UnsolvableGameError(UsageError):
    """The file says of itself that its game can't be won."""


@dataclass(frozen=True)
class Game:
    """A household with a task.

    Args:
        task_id: stable name.
        task: what is to be done.
        sentence: the task as the player reads it, without a final full stop; "" where `grammar` says it.
        problem: PDDL.
        walkthrough: commands that win; None where none is known.
        synthetic: generated here, not one of the official ones.
        domain: PDDL of the rules; None for those of the installed alfworld.
        grammar: of what the engine says; None for that of the installed alfworld, with `sentence`.
        file: that it was read from.
    """

    task_id: str
    task: Task
    sentence: str
    problem: str
    walkthrough: tuple[str, ...] | None
    synthetic: bool
    domain: str | None = None
    grammar: str | None = None
    file: Path | None = None

    def engine_data(self, domain: str, grammar: str) -> dict[str, Any]:
        """What the engine loads.

        Args:
            domain: used where the game has none of its own.
            grammar: likewise.
        """
        return {
            "pddl_domain": self.domain or domain,
            "grammar": self.grammar or grammar.replace(_TASK_LINE, self.sentence),
            "pddl_problem": self.problem,
            "solvable": True,
            "walkthrough": list(self.walkthrough) if self.walkthrough is not None else None,
        }


def read_game(file: Path) -> Game:
    """A game from its file; a walkthrough is worked out where the file has none.

    Args:
        file: a `game.tw-pddl` with its `traj_data.json` beside it.

    Raises:
        UsageError: one of the two is missing or damaged.
        UnsolvableGameError: the file says that the game can't be won.
    """
    game = _read_json(file, ("pddl_domain", "grammar", "pddl_problem"))
    if game.get("solvable") is False:
        raise UnsolvableGameError(f"game file {file} says that it can't be won (solvable: false)")
    task_file = file.with_name(TASK_FILE)
    described = _read_json(task_file, (), task_type=str, pddl_params=dict)
    task = _task(task_file, described)
    try:
        layout = read_layout(game["pddl_problem"])
    except ValueError as error:
        raise _damaged(file, str(error)) from None
    steps = game.get("walkthrough")
    if not (isinstance(steps, list) and steps and all(isinstance(step, str) for step in steps)):
        try:
            steps = walkthrough(task, layout)
        except ValueError:
            steps = None
    return Game(
        task_id="/".join(file.parts[-3:-1]),
        task=task,
        sentence="",
        problem=game["pddl_problem"],
        walkthrough=tuple(steps) if steps else None,
        synthetic=game.get("synthetic") is True,
        domain=game["pddl_domain"],
        grammar=game["grammar"],
        file=file,
    )


def _task(file: Path, described: dict[str, Any]) -> Task:
    family, parameters = described["task_type"], described["pddl_params"]
    if family not in FAMILIES:
        raise _damaged(file, f"task_type is {family!r}, must be one of {', '.join(FAMILIES)}")
    place = "toggle_target" if family == "look_at_obj_in_light" else "parent_target"
    for key in ("object_target", place):
        if not isinstance(parameters.get(key), str) or not parameters[key]:
            raise _damaged(file, f"pddl_params.{key} must be a name, got {parameters.get(key)!r}")
    return Task(family, parameters["object_target"], parameters[place])


def _read_json(file: Path, texts: tuple[str, ...], **kinds: type) -> dict[str, Any]:
    """An object with these keys."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no {file}; `agentenv alfworld download` gets the official games, `agentenv alfworld generate "
            "DIR` writes synthetic ones"
        ) from None
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise _damaged(file, f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise _damaged(file, f"line {line}, byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"JSON that can't be read: {error}") from None
    if not isinstance(content, dict):
        raise _damaged(file, f"it holds a JSON {type(content).__name__}, must be an object")
    for key, kind in {**dict.fromkeys(texts, str), **kinds}.items():
        if not isinstance(content.get(key), kind):
            found = f"has a {type(content[key]).__name__} there" if key in content else "has no such key"
            raise _damaged(file, f"{key} must be a {kind.__name__}; the file {found}")
    for key in texts:
        if not content[key].strip():
            raise _damaged(file, f"{key} is empty")
        try:
            content[key].encode()
        except UnicodeEncodeError as error:
            raise _damaged(file, f"{key} holds half a character, {content[key][error.start]!a}") from None
    return content


def _damaged(file: Path, what: str) -> UsageError:
    return UsageError(
        f"damaged game file {file}: {what}; `agentenv alfworld check DIR` lists all such files, `agentenv alfworld "
        "download --force` gets the official ones anew"
    )


def write_game(game: Game, folder: Path, number: int, *, domain: str, grammar: str) -> Path:
    """Write a synthetic game in the official layout.

    Args:
        game: with a sentence.
        folder: of the split.
        number: in the place where official games have the number of their scene.
        domain: PDDL of the rules.
        grammar: of what the engine says.

    Returns:
        the game's file
    """
    task = game.task
    trial = (
        folder
        / f"{task.family}-{task.thing}-None-{task.place}-{number}"
        / f"trial_{game.task_id.rsplit('-', 1)[1]}"
    )
    trial.mkdir(parents=True, exist_ok=True)
    is_look = task.family == "look_at_obj_in_light"
    described = {
        "synthetic": True,
        "task_id": trial.name,
        "task_type": task.family,
        "scene": {"floor_plan": "synthetic", "scene_num": number},
        "pddl_params": {
            "object_target": task.thing,
            "parent_target": "" if is_look else task.place,
            "toggle_target": task.place if is_look else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
        "turk_annotations": {"anns": [{"task_desc": game.sentence, "high_descs": []}]},
        "images": [],
        "plan": {"high_pddl": [], "low_actions": []},
    }
    (trial / TASK_FILE).write_text(json.dumps(described), encoding="utf-8")
    (trial / "initial_state.pddl").write_text(game.problem, encoding="utf-8")
    file = trial / GAME_FILE
    content = {**game.engine_data(domain, grammar), "synthetic": True}
    file.write_text(json.dumps(content), encoding="utf-8")
    return file
