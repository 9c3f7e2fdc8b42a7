"""A sequence of commands that does a task, from the layout alone: no planner, no search.

Invariants:
- every command of it is admissible when its turn comes, and the last one wins the game;
- it goes to each receptacle that it needs once in a row and opens only what is closed.
"""

from .household import STATIONS
from .problem import Layout, Task, names

__all__ = ["walkthrough"]


def walkthrough(task: Task, layout: Layout) -> tuple[str, ...]:
    """The commands.

    Raises:
        ValueError: the layout lacks something that the task needs.
    """
    return tuple(_Walk(task, layout).commands())


class _Walk:
    def __init__(self, task: Task, layout: Layout) -> None:
        self._task = task
        self._layout = layout
        self._names = names([*layout.receptacles, *layout.things])
        self._at: str | None = None
        self._opened: set[str] = set()
        self._said: list[str] = []

    def commands(self) -> list[str]:
        task = self._task
        if task.family == "look_at_obj_in_light":
            lamp = self._things(task.place, 1)[0]
            self._take(self._things(task.thing, 1)[0])
            self._go(self._layout.inside[lamp])
            self._said.append(f"use {self._names[lamp]}")
            return self._said
        place = self._receptacle(task.place)
        for thing in self._things(task.thing, 2 if task.family == "pick_two_obj_and_place" else 1):
            if self._layout.inside[thing] == place and task.family not in STATIONS:
                continue  # one of two that lies there already
            self._take(thing)
            if task.family in STATIONS:
                verb, station_kind = STATIONS[task.family]
                station = self._receptacle(station_kind)
                self._go(station)
                self._said.append(f"{verb} {self._names[thing]} with {self._names[station]}")
            self._go(place)
            self._open(place)
            self._said.append(f"move {self._names[thing]} to {self._names[place]}")
        return self._said

    def _take(self, thing: str) -> None:
        receptacle = self._layout.inside[thing]
        self._go(receptacle)
        self._open(receptacle)
        self._said.append(f"take {self._names[thing]} from {self._names[receptacle]}")

    def _go(self, receptacle: str) -> None:
        if self._at != receptacle:
            self._said.append(f"go to {self._names[receptacle]}")
            self._at = receptacle

    def _open(self, receptacle: str) -> None:
        if receptacle in self._layout.openable and receptacle not in self._opened:
            self._said.append(f"open {self._names[receptacle]}")
            self._opened.add(receptacle)

    def _things(self, kind: str, count: int) -> list[str]:
        reachable = [
            thing
            for thing, its in self._layout.things.items()
            if its == kind and thing in self._layout.inside
        ]
        # What lies open and far from its goal comes first.
        reachable.sort(
            key=lambda thing: (self._layout.inside[thing] in self._layout.openable, self._number(thing))
        )
        if len(reachable) < count:
            raise ValueError(
                f"the household has {len(reachable)} {kind} in a receptacle, the task needs {count}"
            )
        return reachable[:count]

    def _receptacle(self, kind: str) -> str:
        found = [receptacle for receptacle, its in self._layout.receptacles.items() if its == kind]
        usable = [receptacle for receptacle in found if receptacle in self._layout.locations]
        if not usable:
            raise ValueError(f"the household has no {kind}, which the task needs")
        return min(usable, key=self._number)

    def _number(self, identifier: str) -> int:
        return int(self._names[identifier].rsplit(" ", 1)[1])
