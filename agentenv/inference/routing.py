"""Which engine serves an episode, and how busy the engines are.

Invariants:

* An episode stays with the engine that holds its prefix until it is released; so do the episodes of one affinity.
* A new one goes to the engine with the fewest requests in flight, among equals to the one with the fewest episodes:
  engines of different speed fill up alike, so a faster one gets more.
* Every call takes constant time in the number of episodes.
"""

from __future__ import annotations

from collections import Counter


class Router:
    """Load, homes and busy time of several engines.

    Args:
        num_engines: numbered from 0.
    """

    def __init__(self, num_engines: int) -> None:
        self._load = [0] * num_engines
        self._homes = [0] * num_engines
        self._home: dict[str, tuple[int, str]] = {}
        """Engine and affinity of each episode."""
        self._shared: dict[str, int] = {}
        self._sharers: Counter[str] = Counter()
        self._busy_since = [0.0] * num_engines
        self._busy_s = [0.0] * num_engines

    def begin(self, episode_id: str, affinity: str, now: float) -> int:
        """A request of an episode is sent; returns its engine.

        Args:
            episode_id: empty: the request stands alone.
            affinity: empty: the episode is placed by itself.
            now: in seconds.
        """
        home = self._home.get(episode_id) if episode_id else None
        index = home[0] if home is not None else self._place(episode_id, affinity)
        if not self._load[index]:
            self._busy_since[index] = now
        self._load[index] += 1
        return index

    def end(self, index: int, now: float) -> None:
        """The request was answered or failed."""
        self._load[index] -= 1
        if not self._load[index]:
            self._busy_s[index] += now - self._busy_since[index]

    def is_busy(self, index: int) -> bool:
        """The engine has a request."""
        return self._load[index] > 0

    def busy_since(self, index: int) -> float:
        """Since when the engine has had requests without a pause, or had when it had one last."""
        return self._busy_since[index]

    def release(self, episode_id: str) -> int | None:
        """The episode is over; returns the engine that it lived with."""
        home = self._home.pop(episode_id, None)
        if home is None:
            return None
        index, affinity = home
        self._homes[index] -= 1
        if affinity:
            self._sharers[affinity] -= 1
            if not self._sharers[affinity]:
                del self._sharers[affinity], self._shared[affinity]
        return index

    def busy_s(self, now: float) -> float:
        """Seconds that the engines had at least one request, summed over them."""
        running = sum(now - since for since, load in zip(self._busy_since, self._load, strict=True) if load)
        return sum(self._busy_s) + running

    def _place(self, episode_id: str, affinity: str) -> int:
        index = self._shared.get(affinity) if affinity else None
        if index is None:
            engines = range(len(self._load))
            index = min(engines, key=lambda i: (self._load[i], self._homes[i])) if len(engines) > 1 else 0
        if episode_id:
            self._home[episode_id] = (index, affinity)
            self._homes[index] += 1
            if affinity:
                self._shared[affinity] = index
                self._sharers[affinity] += 1
        return index
