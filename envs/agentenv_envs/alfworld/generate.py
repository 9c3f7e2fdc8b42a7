"""Households and tasks drawn from a seed: synthetic games on the real engine, without any data.

Invariants:
- the same seed, split, families and size give the same game on every machine;
- a hash of the problem says which split a game belongs to, so no seed brings a held-out game into training;
- no game is won at its start, and its walkthrough wins it.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Final

from .games import Game
from .household import (
    FAMILIES,
    FAMILY_ROOMS,
    LAMP_PLACES,
    LAMPS,
    OBJECTS,
    OPENABLE,
    PROPERTIES,
    ROOMS,
    SHARING,
    STATIONS,
    fits,
)
from .problem import Layout, Task, identifier, read_layout, write_problem
from .walkthrough import walkthrough

__all__ = ["SIZES", "SPLITS", "synthetic_game"]

SPLITS: Final = ("train", "heldout")
SIZES: Final = ("small", "full")
_HELD_OUT_SHARE: Final = 5  # one game in five is held out
_SENTENCES: Final = {
    "pick_and_place_simple": ("put a {thing} in {place}", "put some {thing} on {place}"),
    "look_at_obj_in_light": ("look at {thing} under the {place}", "examine the {thing} with the {place}"),
    "pick_clean_then_place_in_recep": (
        "put a clean {thing} in {place}",
        "clean some {thing} and put it in {place}",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {thing} in {place}",
        "heat some {thing} and put it in {place}",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {thing} in {place}",
        "cool some {thing} and put it in {place}",
    ),
    "pick_two_obj_and_place": ("put two {thing} in {place}", "find two {thing} and put them in {place}"),
}


def synthetic_game(
    seed: int, *, split: str = "train", families: Sequence[str] = FAMILIES, size: str = "full"
) -> Game:
    """The game of a seed.

    Args:
        seed: any whole number; chooses the family, too.
        split: one of `SPLITS`.
        families: what the family is drawn from.
        size: "full" households have 6 to 31 receptacles, "small" ones 4 to 7.
    """
    rng = random.Random(f"alfworld:{seed}")
    wanted = split == "heldout"
    while True:
        family = rng.choice(list(families))
        drawn = _draw(rng, family, small=size == "small")
        sentence = rng.choice(_SENTENCES[family])
        if drawn is None:
            continue
        task, layout = drawn
        problem = write_problem("synthetic", task, layout)
        digest = hashlib.blake2b(problem.encode(), digest_size=6).digest()
        if (int.from_bytes(digest) % _HELD_OUT_SHARE == 0) == wanted:
            break
    return Game(
        task_id=f"synthetic-{family}-{digest.hex()}",
        task=task,
        sentence=sentence.format(thing=task.thing.lower(), place=task.place.lower()),
        problem=problem,
        walkthrough=walkthrough(task, read_layout(problem)),
        synthetic=True,
    )


def _draw(rng: random.Random, family: str, *, small: bool) -> tuple[Task, Layout] | None:
    """A task in a household; None where the draw allows none."""
    room = rng.choice(FAMILY_ROOMS[family])
    receptacles = _receptacles(rng, room, _needed(family), small=small)
    kinds = sorted(set(receptacles.values()))
    verb, station = STATIONS.get(family, ("", ""))
    candidates = [thing for thing in OBJECTS[room] if not verb or thing in PROPERTIES[verb]]
    thing = rng.choice(candidates)
    homes = [kind for kind in kinds if fits(kind, thing)]
    if family == "look_at_obj_in_light":
        lamp_places = [kind for kind in kinds if kind in LAMP_PLACES]
        if not homes or not lamp_places:
            return None
        place, starts = rng.choice(LAMPS), homes
    else:
        goals = [kind for kind in homes if kind != station]
        if not goals or len(homes) < 2:
            return None
        place = rng.choice(goals)
        starts = [kind for kind in homes if kind != place]

    things: dict[str, str] = {}
    inside: dict[str, str] = {}

    def put(kind: str, allowed: Sequence[str]) -> None:
        spots = [receptacle for receptacle, its in receptacles.items() if its in allowed]
        if spots:
            name = identifier(kind, sum(its == kind for its in things.values()))
            things[name], inside[name] = kind, rng.choice(spots)

    count = 2 if family == "pick_two_obj_and_place" else 1
    for _ in range(count + (not small and rng.random() < 0.3)):
        put(thing, starts)
    if family == "look_at_obj_in_light":
        put(place, lamp_places)
    others = [other for other in OBJECTS[room] if other != thing]
    num_others = rng.randint(2, 3) if small else rng.randint(5, 9)
    for other in rng.sample(others, min(num_others, len(others))):
        for _ in range(1 if small else rng.choice((1, 1, 2))):
            put(other, [kind for kind in kinds if fits(kind, other)])
    openable = frozenset(receptacle for receptacle, kind in receptacles.items() if kind in OPENABLE)
    layout = Layout(receptacles, _locations(rng, receptacles), things, inside, openable)
    return Task(family, thing, place), layout


def _needed(family: str) -> tuple[str, ...]:
    return (STATIONS[family][1],) if family in STATIONS else ()


def _receptacles(rng: random.Random, room: str, needed: Sequence[str], *, small: bool) -> dict[str, str]:
    """Identifier -> type."""
    counts = {kind: rng.randint(fewest, most) for kind, (fewest, most) in ROOMS[room].items()}
    if small:
        others = [kind for kind in counts if kind not in needed]
        kept = {*needed, *rng.sample(others, 4 - len(needed))}
        counts = {kind: rng.choice((1, 1, 2)) if kind in SHARING else 1 for kind in counts if kind in kept}
    return {identifier(kind, number): kind for kind, count in counts.items() for number in range(count)}


def _locations(rng: random.Random, receptacles: dict[str, str]) -> dict[str, str]:
    """Where each is reached from; neighbours of a kind may share a place."""
    places: dict[str, str] = {}
    before = ("", "")
    for number, (receptacle, kind) in enumerate(receptacles.items()):
        shared = kind in SHARING and kind == before[0] and rng.random() < 0.25
        places[receptacle] = before[1] if shared else f"loc_bar_{number:02d}"
        before = (kind, places[receptacle])
    return places
