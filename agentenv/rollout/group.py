"""Groups of episodes of one task, as the sample buffer keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentenv.trajectory import Trajectory


@dataclass(frozen=True)
class EpisodeTicket:
    """The right to play one episode."""

    episode_id: str
    group_id: str
    task_seed: int
    start_version: int
    number: int
    """Counts all episodes of the run; seeds the sampling."""


@dataclass
class Group:
    """Episodes of one task: waiting to start, running, and finished."""

    group_id: str
    task_seed: int
    waiting: int
    """Members still to start."""
    retries_left: int
    attempts: int = 0
    times_surplus: int = 0
    """How often the task was given up for being surplus before it came again."""
    running: dict[str, EpisodeTicket] = field(default_factory=dict)
    finished: list[Trajectory] = field(default_factory=list)
    standing: tuple[float, bool] | None = None
    """Under which oldest version and readiness the buffer counts the group now."""

    @property
    def is_ready(self) -> bool:
        """Nothing of it runs or waits."""
        return not self.waiting and not self.running

    @property
    def members(self) -> list[Trajectory]:
        """Those that are finished, in the order in which they were started."""
        return sorted(self.finished, key=lambda item: int(item.episode_id.rpartition("-")[2]))

    @property
    def size(self) -> int:
        """Members, in whatever state."""
        return self.waiting + len(self.running) + len(self.finished)

    @property
    def oldest_version(self) -> float:
        """Least start version of running and finished members; infinite where there is none."""
        versions = [ticket.start_version for ticket in self.running.values()]
        versions += [trajectory.start_version for trajectory in self.finished]
        return min(versions, default=math.inf)


def has_variance(group: list[Trajectory]) -> bool:
    """The rewards of the group's members differ, so that a baseline over the group leaves something to learn."""
    return any(trajectory.reward != group[0].reward for trajectory in group)
