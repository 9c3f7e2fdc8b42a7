"""Households from seeds; none of it needs the engine."""

import re
from collections import Counter

import pytest

from agentenv_envs.alfworld.generate import synthetic_game
from agentenv_envs.alfworld.household import FAMILIES, FITS, OBJECTS, PROPERTIES, ROOMS, STATIONS, fits
from agentenv_envs.alfworld.problem import Layout, Task, identifier, names, read_layout, write_problem
from agentenv_envs.alfworld.walkthrough import situation_of, walkthrough


def test_a_seed_gives_the_same_game_and_another_seed_another() -> None:
    games = {synthetic_game(seed).task_id for seed in range(200)}
    assert len(games) == 200
    assert synthetic_game(7) == synthetic_game(7)
    assert synthetic_game(7).task_id == "synthetic-pick_heat_then_place_in_recep-61ef522fcc9e"


@pytest.mark.parametrize("size", ["small", "full"])
def test_no_game_is_in_two_splits(size: str) -> None:
    games = {
        split: {synthetic_game(seed, split=split, size=size).problem for seed in range(150)}
        for split in ("train", "heldout")
    }
    assert not games["train"] & games["heldout"]


@pytest.mark.parametrize("size", ["small", "full"])
def test_all_families_come_and_none_is_won_at_its_start(size: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(150):
        game = synthetic_game(seed, size=size)
        counts[game.task.family] += 1
        layout = read_layout(game.problem)
        assert len(layout.receptacles) in (range(4, 8) if size == "small" else range(6, 32))
        for thing, place in layout.inside.items():
            its = layout.things[thing]
            assert fits(layout.receptacles[place], its)
            if its == game.task.thing and game.task.family != "look_at_obj_in_light":
                assert layout.receptacles[place] != game.task.place
    assert set(counts) == set(FAMILIES)
    assert min(counts.values()) > 8


def test_some_receptacles_share_a_place() -> None:
    shared = 0
    for seed in range(50):
        places = Counter(read_layout(synthetic_game(seed).problem).locations.values())
        shared += max(places.values()) > 1
    assert shared > 10


def test_families_can_be_chosen() -> None:
    wanted = FAMILIES[2:4]
    assert {synthetic_game(seed, families=wanted).task.family for seed in range(30)} == set(wanted)


def test_the_tables_agree_with_each_other() -> None:
    known = {thing for things in OBJECTS.values() for thing in things}
    assert {kind for kinds in ROOMS.values() for kind in kinds} == set(FITS)
    assert {thing for things in FITS.values() for thing in things} <= known
    assert {thing for things in PROPERTIES.values() for thing in things} <= known
    assert {station for _, station in STATIONS.values()} <= set(FITS)
    for room, things in OBJECTS.items():
        for thing in things:
            assert sum(fits(kind, thing) for kind in ROOMS[room]) >= 1, (room, thing)


def test_the_layout_is_read_back_as_it_was_written() -> None:
    shelf, basin, mug = identifier("Shelf", 0), identifier("SinkBasin", 0), identifier("Mug", 1)
    layout = Layout(
        {shelf: "Shelf", basin: "SinkBasin"},
        {shelf: "loc_a", basin: "loc_b"},
        {mug: "Mug"},
        {mug: shelf},
        frozenset(),
    )
    problem = write_problem("test", Task(FAMILIES[0], "Mug", "SinkBasin"), layout)
    assert basin == "Sink_bar_00_bar_SinkBasin"
    assert read_layout(problem) == Layout(
        {shelf.lower(): "Shelf", basin.lower(): "SinkBasin"},
        {shelf.lower(): "loc_a", basin.lower(): "loc_b"},
        {mug.lower(): "Mug"},
        {mug.lower(): shelf.lower()},
        frozenset(),
        frozenset({("Shelf", "Mug"), ("SinkBasin", "Mug")}),
    )


def test_the_last_identifier_of_a_type_is_number_one() -> None:
    assert names(["Drawer_bar_00", "Drawer_bar_01", "Sink_bar_00", "Sink_bar_00_bar_SinkBasin"]) == {
        "drawer_bar_00": "drawer 2",
        "drawer_bar_01": "drawer 1",
        "sink_bar_00": "sink 1",
        "sink_bar_00_bar_sinkbasin": "sinkbasin 1",
    }


def test_a_walkthrough_opens_what_is_closed_and_heats_on_the_way() -> None:
    layout = Layout(
        {"cabinet_bar_0": "Cabinet", "microwave_bar_0": "Microwave", "countertop_bar_0": "CounterTop"},
        {"cabinet_bar_0": "a", "microwave_bar_0": "b", "countertop_bar_0": "c"},
        {"mug_bar_0": "Mug"},
        {"mug_bar_0": "cabinet_bar_0"},
        frozenset({"cabinet_bar_0", "microwave_bar_0"}),
    )
    assert walkthrough(Task("pick_heat_then_place_in_recep", "Mug", "CounterTop"), layout) == (
        "go to cabinet 1",
        "open cabinet 1",
        "take mug 1 from cabinet 1",
        "go to microwave 1",
        "heat mug 1 with microwave 1",
        "go to countertop 1",
        "move mug 1 to countertop 1",
    )
    with pytest.raises(ValueError, match="has 1 Mug in a receptacle, the task needs 2"):
        walkthrough(Task("pick_two_obj_and_place", "Mug", "CounterTop"), layout)
    with pytest.raises(ValueError, match="no Fridge"):
        walkthrough(Task("pick_cool_then_place_in_recep", "Mug", "CounterTop"), layout)


def test_a_walkthrough_goes_on_from_where_things_stand() -> None:
    task = Task("pick_cool_then_place_in_recep", "Mug", "CounterTop")
    layout = Layout(
        {"fridge_bar_0": "Fridge", "drawer_bar_0": "Drawer", "countertop_bar_0": "CounterTop"},
        {"fridge_bar_0": "a", "drawer_bar_0": "b", "countertop_bar_0": "c"},
        {"mug_bar_0": "Mug", "pen_bar_0": "Pen"},
        {"mug_bar_0": "fridge_bar_0", "pen_bar_0": "drawer_bar_0"},
        frozenset({"fridge_bar_0", "drawer_bar_0"}),
        frozenset({("Drawer", "Pen"), ("CounterTop", "Pen"), ("CounterTop", "Mug")}),
    )
    holding_a_pen = situation_of(
        [
            ("atlocation", ("agent1", "a")),
            ("holds", ("agent1", "pen_bar_0")),
            ("inreceptacle", ("mug_bar_0", "fridge_bar_0")),
            ("opened", ("fridge_bar_0",)),
            ("ishot", ("mug_bar_0",)),
        ],
        task,
    )
    assert walkthrough(task, layout, holding_a_pen) == (
        "go to countertop 1",
        "move pen 1 to countertop 1",
        "go to fridge 1",
        "take mug 1 from fridge 1",
        "cool mug 1 with fridge 1",
        "go to countertop 1",
        "move mug 1 to countertop 1",
    )
    cooled = situation_of(
        [
            ("atlocation", ("agent1", "c")),
            ("holds", ("agent1", "mug_bar_0")),
            ("iscool", ("mug_bar_0",)),
        ],
        task,
    )
    assert walkthrough(task, layout, cooled) == ("move mug 1 to countertop 1",)


def test_a_problem_without_an_init_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("no (:init ...)")):
        read_layout("(define (problem x) (:goal (and)))")
    with pytest.raises(ValueError, match="names no receptacle"):
        read_layout("(define (problem x) (:init ) (:goal (and)))")


def test_every_sentence_names_thing_and_place() -> None:
    for seed in range(60):
        game = synthetic_game(seed)
        assert game.task.thing.lower() in game.sentence
        assert game.task.place.lower() in game.sentence
        assert game.walkthrough is not None
        assert 2 <= len(game.walkthrough) <= 16
