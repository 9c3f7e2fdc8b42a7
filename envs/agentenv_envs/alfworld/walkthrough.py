"""A sequence of commands that does a task, from the layout alone: no planner, no search.

Invariants:
- every command of it is admissible when its turn comes, and the last one wins the game;
- it begins anywhere: with something in the hand, with things moved, opened, heated;
- it goes to each place that it needs once in a row and opens only what is closed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .household import STATIONS
from .problem import Layout, Task, names

__all__ = ["Situation", "situation_of", "walkthrough"]

_DONE = {"clean": "isclean", "heat": "ishot", "cool": "iscool"}


@dataclass(frozen=True)
class Situation:
    """What changes while a game is played; identifiers in lower case.

    Args:
        inside: object -> its receptacle; what is held is not in it.
        at: place of the player, as in `Layout.locations`.
        held: object in the hand; None: the hand is empty.
        opened: receptacles that stand open.
        done: objects that are clean, hot or cool, whichever the task wants.
    """

    inside: Mapping[str, str]
    at: str | None = None
    held: str | None = None
    opened: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()


def situation_of(facts: Iterable[tuple[str, tuple[str, ...]]], task: Task) -> Situation:
    """The situation that the engine's facts, each a name with its arguments, describe."""
    inside: dict[str, str] = {}
    at = held = None
    opened: set[str] = set()
    done: set[str] = set()
    wanted = _DONE.get(STATIONS.get(task.family, ("", ""))[0], "")
    for name, arguments in facts:
        if name == "inreceptacle":
            inside[arguments[0]] = arguments[1]
        elif name == "atlocation":
            at = arguments[1]
        elif name == "holds":
            held = arguments[1]
        elif name == "opened":
            opened.add(arguments[0])
        elif name == wanted:
            done.add(arguments[0])
    return Situation(inside, at, held, frozenset(opened), frozenset(done))


def walkthrough(task: Task, layout: Layout, situation: Situation | None = None) -> tuple[str, ...]:
    """The commands.

    Args:
        task: to be done.
        layout: at the start of the game.
        situation: to begin with; None: the start.

    Raises:
        ValueError: the household lacks something that the task needs.
    """
    return tuple(_Walk(task, layout, situation or Situation(layout.inside)).commands())


class _Walk:
    def __init__(self, task: Task, layout: Layout, situation: Situation) -> None:
        self._task = task
        self._layout = layout
        self._start = situation
        self._names = names([*layout.receptacles, *layout.things])
        self._at = situation.at
        self._held = situation.held
        self._opened = set(situation.opened)
        self._said: list[str] = []

    def commands(self) -> list[str]:
        task = self._task
        if task.family == "look_at_obj_in_light":
            lamp = self._things(task.place, 1)[0]
            self._take(self._things(task.thing, 1)[0])
            self._go(self._start.inside[lamp])
            self._said.append(f"use {self._names[lamp]}")
            return self._said
        count = 2 if task.family == "pick_two_obj_and_place" else 1
        place = self._goal()
        there = 0 if task.family in STATIONS else len(self._inside(place))
        for thing in self._things(task.thing, count - there, but=() if not there else self._inside(place)):
            self._take(thing)
            if task.family in STATIONS and thing not in self._start.done:
                verb, kind = STATIONS[task.family]
                station = self._least(kind)
                self._go(station)
                self._said.append(f"{verb} {self._names[thing]} with {self._names[station]}")
            self._put(thing, place)
        return self._said

    def _goal(self) -> str:
        """The receptacle that the task ends at: the one that has most of what belongs there."""
        return min(
            self._receptacles(self._task.place),
            key=lambda receptacle: (-len(self._inside(receptacle)), self._number(receptacle)),
        )

    def _inside(self, receptacle: str) -> list[str]:
        """The wanted things in a receptacle."""
        kinds = self._layout.things
        return [
            thing
            for thing, its in self._start.inside.items()
            if its == receptacle and kinds.get(thing) == self._task.thing
        ]

    def _take(self, thing: str) -> None:
        if self._held == thing:
            return
        if self._held is not None:
            self._put(self._held, self._spot(self._held))
        receptacle = self._start.inside[thing]
        self._go(receptacle)
        self._open(receptacle)
        self._said.append(f"take {self._names[thing]} from {self._names[receptacle]}")
        self._held = thing

    def _put(self, thing: str, receptacle: str) -> None:
        self._go(receptacle)
        self._open(receptacle)
        self._said.append(f"move {self._names[thing]} to {self._names[receptacle]}")
        self._held = None

    def _spot(self, thing: str) -> str:
        """Where to get rid of a thing that nobody wants: near, and open."""
        kind = self._layout.things[thing]
        spots = [
            receptacle
            for receptacle, its in self._layout.receptacles.items()
            if (its, kind) in self._layout.accepts and receptacle in self._layout.locations
        ]
        if not spots:
            raise ValueError(f"the household has no place for {self._names[thing]}")
        return min(
            spots,
            key=lambda spot: (
                self._layout.locations[spot] != self._at,
                self._is_closed(spot),
                self._names[spot],
            ),
        )

    def _go(self, receptacle: str) -> None:
        location = self._layout.locations[receptacle]
        if self._at != location:
            self._said.append(f"go to {self._names[receptacle]}")
            self._at = location

    def _open(self, receptacle: str) -> None:
        if self._is_closed(receptacle):
            self._said.append(f"open {self._names[receptacle]}")
            self._opened.add(receptacle)

    def _is_closed(self, receptacle: str) -> bool:
        return receptacle in self._layout.openable and receptacle not in self._opened

    def _things(self, kind: str, count: int, but: Iterable[str] = ()) -> list[str]:
        """That many of a kind: what is held, then what is ready, then what lies open."""
        left_out = set(but)
        found = [
            thing
            for thing, its in self._layout.things.items()
            if its == kind
            and thing not in left_out
            and (thing == self._held or self._is_reached(self._start.inside.get(thing)))
        ]
        if len(found) < count:
            raise ValueError(f"the household has {len(found)} {kind} in a receptacle, the task needs {count}")
        found.sort(
            key=lambda thing: (
                thing != self._held,
                thing not in self._start.done,
                self._start.inside.get(thing) in self._layout.openable,
                self._number(thing),
            )
        )
        return found[:count]

    def _receptacles(self, kind: str) -> list[str]:
        found = [
            receptacle
            for receptacle, its in self._layout.receptacles.items()
            if its == kind and self._is_reached(receptacle)
        ]
        if not found:
            raise ValueError(f"the household has no {kind}, which the task needs")
        return found

    def _is_reached(self, receptacle: str | None) -> bool:
        """Whether it has a name and a place."""
        return receptacle in self._layout.receptacles and receptacle in self._layout.locations

    def _least(self, kind: str) -> str:
        return min(self._receptacles(kind), key=self._number)

    def _number(self, identifier: str) -> int:
        return int(self._names[identifier].rsplit(" ", 1)[1])
