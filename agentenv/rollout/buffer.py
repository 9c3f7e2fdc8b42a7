"""Episodes from start to consumption: admission, groups, freshness and the account of all of them.

The class is plain data: it waits for nothing and knows no clock. A *group* is ``group_size`` episodes of one task; with
``group_size`` 1 it is the episode.

Invariants:

* ``produced == consumed + buffered + sum(discarded)`` after every call; every episode ends exactly once.
* What :meth:`SampleBuffer.take` returns for step n was started by a version >= n - alpha, every sample of it.
* At most (1 + alpha) * batch_size episodes are open or buffered, and no group is opened that would come too late for
  every step it could serve.
* A group is finished when nothing of it runs or waits: failed members are tried again ``max_retries`` times in all,
  then it ends short; no failure leaves it open.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.ledger import Ledger
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
class _Group:
    group_id: str
    task_seed: int
    waiting: int
    """Members still to start."""
    retries_left: int
    attempts: int = 0
    running: dict[str, EpisodeTicket] = field(default_factory=dict)
    finished: list[Trajectory] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return not self.waiting and not self.running

    @property
    def size(self) -> int:
        return self.waiting + len(self.running) + len(self.finished)

    @property
    def oldest_version(self) -> float:
        versions = [ticket.start_version for ticket in self.running.values()]
        versions += [trajectory.start_version for trajectory in self.finished]
        return min(versions, default=math.inf)


class SampleBuffer:
    """Running and finished episodes of the training ledger.

    Args:
        config: sizes, alpha, retries and what to do about stale episodes.
        ledger: gives the tasks.
    """

    def __init__(self, config: RolloutConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger
        self._exhausted = False
        self._groups: dict[str, _Group] = {}
        self._next_group = 0
        self._next_episode = 0
        self.consumed = 0
        self.produced = 0
        self.discarded: Counter[str] = Counter()

    @property
    def buffered(self) -> int:
        """Finished episodes not yet consumed, those of unfinished groups included."""
        return sum(len(group.finished) for group in self._groups.values())

    @property
    def running(self) -> int:
        """Episodes being played."""
        return sum(len(group.running) for group in self._groups.values())

    @property
    def outstanding(self) -> int:
        """Episodes waiting to start, running or buffered."""
        return sum(group.size for group in self._groups.values())

    def counts(self) -> dict[str, Any]:
        """``produced``, ``consumed``, ``buffered``, ``running`` and ``discarded`` by reason."""
        return {
            "produced": self.produced,
            "consumed": self.consumed,
            "buffered": self.buffered,
            "running": self.running,
            "discarded": dict(self.discarded),
        }

    def next_episode(self, version: int, next_step: int) -> EpisodeTicket | None:
        """Start an episode if one may be started.

        Args:
            version: of the weights now.
            next_step: the next training step that takes a batch.

        Returns:
            the ticket; None while nothing may start: the buffer is full, or what starts now could serve no step.
        """
        last_step = version + math.floor(self._config.alpha)
        if self._config.num_steps is not None:
            last_step = min(last_step, self._config.num_steps - 1)
        usable_steps = last_step - next_step + 1
        if usable_steps <= 0:
            return None
        group = next((group for group in self._groups.values() if group.waiting), None)
        if group is None:
            limit = min(usable_steps * self._config.batch_size, self._config.max_outstanding)
            if self.outstanding + self._config.group_size > limit or self._exhausted:
                return None
            try:
                seed = self._ledger.next_seed()
            except StopIteration:
                self._exhausted = True
                return None
            group = _Group(f"g{self._next_group}", seed, self._config.group_size, self._config.max_retries)
            self._groups[group.group_id] = group
            self._next_group += 1
        ticket = EpisodeTicket(
            f"{group.group_id}-{group.attempts}", group.group_id, group.task_seed, version, self._next_episode
        )
        group.waiting -= 1
        group.attempts += 1
        group.running[ticket.episode_id] = ticket
        self._next_episode += 1
        return ticket

    def add(self, ticket: EpisodeTicket, trajectory: Trajectory) -> None:
        """The episode ended well."""
        group = self._groups[ticket.group_id]
        del group.running[ticket.episode_id]
        group.finished.append(trajectory)
        self.produced += 1

    def discard(self, ticket: EpisodeTicket, reason: str, *, retry: bool = True) -> None:
        """The episode ended without a sample; its task is tried again while the group has retries left."""
        group = self._groups[ticket.group_id]
        del group.running[ticket.episode_id]
        self.produced += 1
        self.discarded[reason] += 1
        self._replace_member(group, retry)

    def stale_running(self, step: int) -> list[EpisodeTicket]:
        """Running episodes that step ``step`` or any later one could not take."""
        oldest = step - self._config.alpha
        return [
            ticket
            for group in self._groups.values()
            for ticket in group.running.values()
            if ticket.start_version < oldest
        ]

    def take(self, step: int) -> list[Trajectory] | None:
        """The batch of a step: ``batch_size / group_size`` groups, oldest first; None while it is not complete.

        Samples too old for the step are discarded here. Groups that ended short make a batch smaller.
        """
        self._drop_stale(step)
        next_oldest = step + 1 - self._config.alpha
        waits = self._config.on_stale == "wait"
        candidates = []
        for order, group in enumerate(self._groups.values()):
            last_chance = group.oldest_version < next_oldest
            if group.is_ready or (waits and last_chance):
                candidates.append((not last_chance, not group.is_ready, group.oldest_version, order, group))
        candidates.sort(key=lambda candidate: candidate[:4])
        chosen = [
            candidate[-1] for candidate in candidates[: self._config.batch_size // self._config.group_size]
        ]
        if len(chosen) * self._config.group_size < self._config.batch_size:
            return None
        if not all(group.is_ready for group in chosen):
            return None
        batch: list[Trajectory] = []
        for group in chosen:
            batch += group.finished
            del self._groups[group.group_id]
        self.consumed += len(batch)
        return batch

    @property
    def is_exhausted(self) -> bool:
        """The ledger has no task left."""
        return self._exhausted

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what is buffered in full, and what runs as tasks to play again."""
        return {
            "groups": [
                {
                    "group_id": group.group_id,
                    "task_seed": group.task_seed,
                    "missing": group.waiting + len(group.running),
                    "in_flight": sorted(group.running),
                    "retries_left": group.retries_left,
                    "attempts": group.attempts,
                    "finished": [trajectory.to_dict() for trajectory in group.finished],
                }
                for group in self._groups.values()
            ],
            "next_group": self._next_group,
            "next_episode": self._next_episode,
            "consumed": self.consumed,
            "produced": self.produced,
            "discarded": dict(self.discarded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; episodes that were in flight start again, on the same tasks and before new ones."""
        self._groups = {
            item["group_id"]: _Group(
                item["group_id"],
                item["task_seed"],
                item["missing"],
                item["retries_left"],
                item["attempts"],
                finished=[Trajectory.from_dict(data) for data in item["finished"]],
            )
            for item in state["groups"]
        }
        self._next_group = state["next_group"]
        self._next_episode = state["next_episode"]
        self.consumed = state["consumed"]
        self.produced = state["produced"]
        self.discarded = Counter(state["discarded"])

    def _drop_stale(self, step: int) -> None:
        oldest = step - self._config.alpha
        for group in list(self._groups.values()):
            fresh = [trajectory for trajectory in group.finished if trajectory.start_version >= oldest]
            num_stale, group.finished = len(group.finished) - len(fresh), fresh
            for _ in range(num_stale):
                self.discarded["stale"] += 1
                self._replace_member(group, retry=True)

    def _replace_member(self, group: _Group, retry: bool) -> None:
        if retry and group.retries_left > 0:
            group.retries_left -= 1
            group.waiting += 1
        elif not group.size:
            self._groups.pop(group.group_id, None)
