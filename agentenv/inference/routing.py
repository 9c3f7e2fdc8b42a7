"""Which engine serves an episode, and how busy the engines are.

Invariants:

* An episode stays with the engine that holds its prefix until it is released; so do the episodes of one affinity.
* A new one goes to the engine with the fewest requests in flight, among equals to the one with the fewest episodes:
  engines of different speed fill up alike, so a faster one gets more.
* An engine that is out gets no request while another is in; its episodes find new homes as they ask.
* Every call takes constant time in the number of episodes, and logarithmic in that of engines.
"""

from __future__ import annotations

import heapq
from collections import Counter


class Router:
    """Load, homes and busy time of several engines.

    Args:
        num_engines: numbered from 0.
    """

    def __init__(self, num_engines: int) -> None:
        self._load = [0] * num_engines
        self._homes = [0] * num_engines
        self._out: set[int] = set()
        self._ranking = [(0, 0, index) for index in range(num_engines)]
        """A heap of (requests, episodes, engine); entries that are no longer true are passed over."""
        self._home: dict[str, tuple[int, str]] = {}
        """Engine and affinity of each episode."""
        self._shared: dict[str, int] = {}
        self._sharers: Counter[str] = Counter()
        self._busy_since = [0.0] * num_engines
        self._busy_s = [0.0] * num_engines

    @property
    def num_in(self) -> int:
        """Engines that get requests."""
        return len(self._load) - len(self._out)

    def is_out(self, index: int) -> bool:
        """The engine gets no requests while another one can."""
        return index in self._out

    def take_out(self, index: int) -> None:
        """The engine gets no more requests."""
        self._out.add(index)

    def take_in(self, index: int) -> None:
        """The engine gets requests again."""
        self._out.discard(index)
        self._rank(index)

    def begin(self, episode_id: str, affinity: str, now: float) -> int:
        """A request of an episode is sent; returns its engine.

        Args:
            episode_id: empty: the request stands alone.
            affinity: empty: the episode is placed by itself.
            now: in seconds.
        """
        home = self._home.get(episode_id) if episode_id else None
        if home is not None and home[0] in self._out and self.num_in:
            self.release(episode_id)
            home = None
        index = home[0] if home is not None else self._place(episode_id, affinity)
        if not self._load[index]:
            self._busy_since[index] = now
        self._load[index] += 1
        self._rank(index)
        return index

    def end(self, index: int, now: float) -> None:
        """The request was answered or failed."""
        self._load[index] -= 1
        self._rank(index)
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
        self._rank(index)
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
        if index is None or (index in self._out and self.num_in):
            index = self._least_loaded()
        if episode_id:
            self._home[episode_id] = (index, affinity)
            self._homes[index] += 1
            if affinity:
                self._shared[affinity] = index
                self._sharers[affinity] += 1
        return index

    def _least_loaded(self) -> int:
        if len(self._load) == 1:
            return 0
        if not self.num_in:  # one of them may come back
            return min(range(len(self._load)), key=lambda i: (self._load[i], self._homes[i]))
        while True:
            load, homes, index = self._ranking[0]
            if index not in self._out and (load, homes) == (self._load[index], self._homes[index]):
                return index
            heapq.heappop(self._ranking)

    def _rank(self, index: int) -> None:
        """Enter the engine's present standing."""
        if len(self._load) == 1 or index in self._out:
            return
        heapq.heappush(self._ranking, (self._load[index], self._homes[index], index))
        if len(self._ranking) > 8 * len(self._load) + 64:
            self._ranking = [
                (self._load[i], self._homes[i], i) for i in range(len(self._load)) if i not in self._out
            ]
            heapq.heapify(self._ranking)
