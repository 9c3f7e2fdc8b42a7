"""A household and its task as PDDL, in the form of ALFRED problems: written for new games, read for any game.

Invariants:
- what `write_problem` wrote, `read_layout` reads back as the same layout;
- identifiers have the form that alfworld derives names from: `Type_bar_rest`, basins `Sink_bar_rest_bar_SinkBasin`;
- `names` numbers things as the engine does: by type, the last identifier of the alphabet is number 1.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .household import CONTAINERS, FITS, LAMPS, OBJECTS, OPENABLE, PROPERTIES, fits

__all__ = ["Layout", "Task", "names", "read_layout", "write_problem"]

_FACT: Final = re.compile(r"\(\s*([a-zA-Z]+)((?:\s+[\w.-]+)*)\s*\)")
_COMMENT: Final = re.compile(r";[^\n]*")
_AGENT: Final = "agent1"
_PROPERTY: Final = {"clean": "cleanable", "heat": "heatable", "cool": "coolable", "slice": "sliceable"}


@dataclass(frozen=True)
class Task:
    """What is to be done.

    Args:
        family: one of `household.FAMILIES`.
        thing: type of the object.
        place: type of the receptacle; of the lamp for look_at_obj_in_light.
    """

    family: str
    thing: str
    place: str


@dataclass(frozen=True)
class Layout:
    """Where everything is at first; identifiers in lower case.

    Args:
        receptacles: identifier -> type.
        locations: identifier of a receptacle -> place from which it is reached.
        things: identifier of an object -> type.
        inside: identifier of an object -> that of its receptacle.
        openable: receptacles that are closed at first.
        accepts: types of receptacle and object that may be put into it.
    """

    receptacles: Mapping[str, str]
    locations: Mapping[str, str]
    things: Mapping[str, str]
    inside: Mapping[str, str]
    openable: frozenset[str]
    accepts: frozenset[tuple[str, str]] = frozenset()


def identifier(kind: str, number: int) -> str:
    """Of the thing or receptacle of a type with this number, from 0."""
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin')}_bar_{number:02d}_bar_{kind}"
    return f"{kind}_bar_{number:02d}"


def names(identifiers: Iterable[str]) -> dict[str, str]:
    """Identifier in lower case -> what the game calls it, such as "drawer 2"."""
    ordered = sorted(identifier.lower() for identifier in identifiers)
    left = Counter(_kind_name(identifier) for identifier in ordered)
    named: dict[str, str] = {}
    for identifier in ordered:
        kind = _kind_name(identifier)
        named[identifier] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return named


def _kind_name(identifier: str) -> str:
    return identifier.split("_bar_", 1)[0] + ("basin" if "basin" in identifier else "")


def write_problem(name: str, task: Task, layout: Layout) -> str:
    """The text of a PDDL problem.

    Args:
        name: of the problem.
        task: becomes the goal.
        layout: its identifiers in any case.
    """
    places = sorted(set(layout.locations.values()))
    objects = [f"{_AGENT} - agent", "loc_bar_start - location", *(f"{place} - location" for place in places)]
    objects += [f"{kind}Type - rtype" for kind in sorted(FITS)]
    everything = sorted({thing for room in OBJECTS.values() for thing in room} | set(LAMPS))
    objects += [f"{kind}Type - otype" for kind in everything]
    objects += [f"{receptacle} - receptacle" for receptacle in layout.receptacles]
    objects += [f"{thing} - object" for thing in layout.things]

    facts = ["= (total-cost) 0", f"atLocation {_AGENT} loc_bar_start"]
    for receptacle, kind in layout.receptacles.items():
        facts += [
            f"receptacleType {receptacle} {kind}Type",
            f"receptacleAtLocation {receptacle} {layout.locations[receptacle]}",
        ]
        if kind in OPENABLE:
            facts.append(f"openable {receptacle}")
    for thing, kind in layout.things.items():
        inside = layout.inside[thing]
        facts += [
            f"objectType {thing} {kind}Type",
            f"inReceptacle {thing} {inside}",
            f"objectAtLocation {thing} {layout.locations[inside]}",
            f"toggleable {thing}" if kind in LAMPS else f"pickupable {thing}",
        ]
        facts += [f"{_PROPERTY[what]} {thing}" for what, kinds in PROPERTIES.items() if kind in kinds]
        if kind in CONTAINERS:
            facts.append(f"isReceptacleObject {thing}")
    present = sorted(set(layout.things.values()))
    for receptacle_kind in sorted(set(layout.receptacles.values())):
        facts += [
            f"canContain {receptacle_kind}Type {kind}Type" for kind in present if fits(receptacle_kind, kind)
        ]
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", *(f"  {text}" for text in objects)]
    lines += [")", "(:init", *(f"  ({fact})" for fact in facts), ")", f"(:goal (and {_goal(task)}))", ")", ""]
    return "\n".join(lines)


def _goal(task: Task) -> str:
    thing, place = task.thing, task.place
    if task.family == "look_at_obj_in_light":
        return (
            "(exists (?l - object ?r - receptacle ?a - agent ?p - location) "
            f"(and (objectType ?l {place}Type) (toggleable ?l) (isToggled ?l) (inReceptacle ?l ?r) "
            "(receptacleAtLocation ?r ?p) (atLocation ?a ?p))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {thing}Type) (holds ?a ?o)))"
        )
    here = f"(objectType {{0}} {thing}Type) (receptacleType ?r {place}Type) (inReceptacle {{0}} ?r)"
    if task.family == "pick_two_obj_and_place":
        one, other = here.format("?o1"), here.format("?o2")
        return (
            f"(exists (?r - receptacle) (exists (?o1 - object) (and {one} "
            f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) {other})))))"
        )
    done = {
        "pick_clean_then_place_in_recep": "(cleanable ?o) (isClean ?o) ",
        "pick_heat_then_place_in_recep": "(heatable ?o) (isHot ?o) ",
        "pick_cool_then_place_in_recep": "(coolable ?o) (isCool ?o) ",
    }.get(task.family, "")
    return f"(exists (?r - receptacle) (exists (?o - object) (and {done}{here.format('?o')})))"


def read_layout(problem: str) -> Layout:
    """The layout of any ALFRED problem.

    Raises:
        ValueError: there is no `(:init ...)` followed by a `(:goal ...)`, or it says nothing of receptacles.
    """
    text = _COMMENT.sub("", problem)
    begin, end = text.find("(:init"), text.find("(:goal")
    if begin < 0 or end < begin:
        raise ValueError("the PDDL problem has no (:init ...) followed by (:goal ...)")
    receptacles: dict[str, str] = {}
    locations: dict[str, str] = {}
    things: dict[str, str] = {}
    inside: dict[str, str] = {}
    openable: set[str] = set()
    accepts: set[tuple[str, str]] = set()
    pairs = {
        "receptacletype": receptacles,
        "receptacleatlocation": locations,
        "objecttype": things,
        "inreceptacle": inside,
    }
    for predicate, rest in _FACT.findall(text, begin + len("(:init"), end):
        predicate, arguments = predicate.lower(), rest.split()
        if predicate in pairs and len(arguments) == 2:
            first, second = arguments
            is_type = predicate.endswith("type")
            pairs[predicate][first.lower()] = second.removesuffix("Type") if is_type else second.lower()
        elif predicate == "openable" and len(arguments) == 1:
            openable.add(arguments[0].lower())
        elif predicate == "cancontain" and len(arguments) == 2:
            accepts.add((arguments[0].removesuffix("Type"), arguments[1].removesuffix("Type")))
    if not receptacles:
        raise ValueError("the PDDL problem names no receptacle")
    return Layout(receptacles, locations, things, inside, frozenset(openable), frozenset(accepts))
