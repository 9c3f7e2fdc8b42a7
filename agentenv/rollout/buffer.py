"""Episodes from start to consumption: admission, groups, freshness, redundancy and the account of all of them.

The class is plain data: it waits for nothing and knows no clock. A *group* is ``group_size`` episodes of one task; with
``group_size`` 1 it is the episode. Every call but :meth:`SampleBuffer.take`'s last step and :meth:`SampleBuffer.expire`
takes constant time in the number of groups.

Invariants:

* ``produced == consumed + buffered + sum(discarded)`` after every call; every episode ends exactly once.
* What :meth:`SampleBuffer.take` returns for step n was started by a version >= n - alpha, every sample of it.
* At most (1 + alpha) * batch_size episodes are open or buffered, plus the redundant ones, and no group is opened that
  would come too late for every step it could serve.
* A group is finished when nothing of it runs or waits: failed members are tried again ``max_retries`` times in all,
  then it ends short; no failure leaves it open.
* The task of a group that is given up for being surplus comes again before new ones, up to ``max_retries`` times; then
  it is given up and counted, or the slowest tasks would take the redundant places for good.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from agentenv.errors import RolloutError
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.group import EpisodeTicket, Group, has_variance
from agentenv.rollout.ledger import Ledger
from agentenv.trajectory import Trajectory

GroupFilter = Callable[[list[Trajectory]], bool]
Discard = Literal["failed", "cancelled", "discarded"]
"""How an episode came to nothing: without an end of its own, given up while it ran, or given up when it had ended."""


class SampleBuffer:
    """Running and finished episodes of the training ledger.

    Args:
        config: sizes, alpha, redundancy, retries and what to do about stale episodes.
        ledger: gives the tasks.
        keep_group: whether a finished group may be trained on; beside ``config.filter_zero_variance``.
    """

    def __init__(
        self, config: RolloutConfig, ledger: Ledger, *, keep_group: GroupFilter | None = None
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._filters: list[GroupFilter] = [has_variance] if config.filter_zero_variance else []
        if keep_group is not None:
            self._filters.append(keep_group)
        self._exhausted = False
        self._groups: dict[str, Group] = {}
        self._unstarted: dict[str, Group] = {}
        """Groups with members waiting to start, oldest first."""
        self._standing: Counter[tuple[float, bool]] = Counter()
        """Groups by oldest version and readiness."""
        self._again: deque[tuple[int, int]] = deque()
        """Tasks of surplus groups, and how often they were surplus."""
        self._doomed: dict[str, str] = {}
        """Episodes that run and will not be taken, with the reason."""
        self._to_cancel: list[EpisodeTicket] = []
        self._wave = 0
        """Groups that the present wave of mode "batch" may still open."""
        self._next_group = 0
        self._next_episode = 0
        self._running = 0
        self.buffered = 0
        """Finished episodes not yet consumed, those of unfinished groups included."""
        self.consumed = 0
        self.produced = 0
        self.tasks_given_up = 0
        """Tasks that were surplus too often."""
        self.discarded: Counter[str] = Counter()
        self.discarded_tokens: Counter[str] = Counter()
        """Tokens sampled in discarded episodes, by reason."""
        self.on_discard: Callable[[str, Discard, str], None] | None = None
        """Called with id, kind and reason of every episode that is discarded."""

    @property
    def running(self) -> int:
        """Episodes being played, those to be cancelled included."""
        return self._running

    @property
    def outstanding(self) -> int:
        """Episodes waiting to start, running or buffered; those to be cancelled not included."""
        return sum(group.size for group in self._groups.values())

    @property
    def is_exhausted(self) -> bool:
        """The ledger has no task left."""
        return self._exhausted and not self._again

    @property
    def wave_has_started(self) -> bool:
        """In mode "batch": no episode of the present wave is still to start."""
        return not self._unstarted and not self._wave

    def is_ready(self, group_id: str) -> bool:
        """The group is complete, or gone."""
        group = self._groups.get(group_id)
        return group is None or group.is_ready

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
        group = next(iter(self._unstarted.values()), None) or self._open_group(usable_steps)
        if group is None:
            return None
        ticket = EpisodeTicket(
            f"{group.group_id}-{group.attempts}", group.group_id, group.task_seed, version, self._next_episode
        )
        group.waiting -= 1
        group.attempts += 1
        group.running[ticket.episode_id] = ticket
        self._next_episode += 1
        self._running += 1
        self._update(group)
        return ticket

    def add(self, ticket: EpisodeTicket, trajectory: Trajectory) -> None:
        """The episode ended well."""
        reason = self._doomed.pop(ticket.episode_id, None)
        self.produced += 1
        self._running -= 1
        if reason is not None:
            self._count_discarded(ticket.episode_id, "cancelled", reason, trajectory.num_action_tokens)
            return
        group = self._groups[ticket.group_id]
        del group.running[ticket.episode_id]
        group.finished.append(trajectory)
        self.buffered += 1
        if not self._config.partial_groups and len(group.finished) == self._config.group_size:
            group.waiting = 0
            self._doom(group, list(group.running.values()), "surplus")
        self._settle(group)

    def discard(self, ticket: EpisodeTicket, reason: str, *, tokens: int = 0, retry: bool = True) -> None:
        """The episode ended without a sample; its task is tried again while the group has retries left.

        Args:
            ticket: of the episode.
            reason: what it is counted under; an episode that was to be cancelled has its reason already.
            tokens: sampled in vain.
            retry: false: the group loses the member.
        """
        doomed = self._doomed.pop(ticket.episode_id, None)
        self.produced += 1
        self._running -= 1
        is_failure = doomed is None and reason not in ("cancelled", "stopped")
        self._count_discarded(
            ticket.episode_id, "failed" if is_failure else "cancelled", doomed or reason, tokens
        )
        if doomed is None:
            group = self._groups[ticket.group_id]
            del group.running[ticket.episode_id]
            self._replace_member(group, retry)
            self._settle(group)

    def is_doomed(self, ticket: EpisodeTicket) -> bool:
        """The episode was named by :meth:`to_cancel`."""
        return ticket.episode_id in self._doomed

    def to_cancel(self) -> list[EpisodeTicket]:
        """Running episodes that will not be taken any more; each is named once."""
        tickets, self._to_cancel = self._to_cancel, []
        return tickets

    def expire(self, step: float, reason: str = "stale") -> None:
        """Give up what neither ``step`` nor a later one could take.

        With redundancy the whole group is surplus and its task may come again; without, the members are replaced.
        """
        oldest = step - self._config.alpha
        if not any(version < oldest for version, _ in self._standing):
            return
        for group in list(self._groups.values()):
            if group.oldest_version >= oldest:
                continue
            if self._config.is_redundant or self._config.partial_groups:
                self._drop(group, reason)
                if group.times_surplus < self._config.max_retries:
                    self._again.append((group.task_seed, group.times_surplus + 1))
                else:
                    self.tasks_given_up += 1
                continue
            tickets = [ticket for ticket in group.running.values() if ticket.start_version < oldest]
            stale = [trajectory for trajectory in group.finished if trajectory.start_version < oldest]
            group.finished = [
                trajectory for trajectory in group.finished if trajectory.start_version >= oldest
            ]
            self._discard_finished(stale, reason)
            self._doom(group, tickets, reason)
            for _ in range(len(stale) + len(tickets)):
                self._replace_member(group, retry=True)
            self._settle(group)

    def take(self, step: int) -> list[Trajectory] | None:
        """The batch of a step, oldest groups first; None while it is not complete.

        ``batch_size / group_size`` groups, or with ``partial_groups`` any ``batch_size`` episodes. Groups that ended
        short make a batch smaller. With ``on_stale`` "wait" it is not complete while a group runs that could serve no
        later step, unless as many others as there are redundant groups stand in for it. What could serve no later step
        and is not taken is given up here.
        """
        self.expire(step)
        next_oldest = step + 1 - self._config.alpha
        if not self._is_complete(next_oldest):
            return None
        partial = self._config.partial_groups
        ready = [group for group in self._groups.values() if group.finished and (partial or group.is_ready)]
        size = self._config.group_size
        ready.sort(key=lambda g: (g.oldest_version >= next_oldest, g.oldest_version, len(g.finished) < size))
        batch: list[Trajectory] = []
        for group in ready if partial else ready[: self._config.groups_per_batch]:
            if partial and len(batch) == self._config.batch_size:
                break
            room = self._config.batch_size - len(batch)
            taken, left = (group.finished[:room], group.finished[room:]) if partial else (group.members, [])
            batch += taken
            group.finished = left
            self._drop(group, "surplus")
            self.buffered -= len(taken)
        self.consumed += len(batch)
        self._wave = 0
        is_last = step + 1 == self._config.num_steps
        self.expire(
            math.inf if is_last else step + 1, "surplus" if self._config.is_redundant or partial else "stale"
        )
        return batch

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
                    "times_surplus": group.times_surplus,
                    "finished": [trajectory.to_dict() for trajectory in group.finished],
                }
                for group in self._groups.values()
            ],
            "again": [list(task) for task in self._again],
            "tasks_given_up": self.tasks_given_up,
            "next_group": self._next_group,
            "next_episode": self._next_episode,
            "consumed": self.consumed,
            "produced": self.produced,
            "discarded": dict(self.discarded),
            "discarded_tokens": dict(self.discarded_tokens),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore into a new buffer; what was in flight starts again, on the same tasks and before new ones."""
        for item in state["groups"]:
            group = Group(
                item["group_id"],
                item["task_seed"],
                item["missing"],
                item["retries_left"],
                item["attempts"],
                item.get("times_surplus", 0),
                finished=[Trajectory.from_dict(data) for data in item["finished"]],
            )
            self._groups[group.group_id] = group
            self.buffered += len(group.finished)
            self._update(group)
        self._again = deque((seed, times) for seed, times in state.get("again", ()))
        self.tasks_given_up = state.get("tasks_given_up", 0)
        self._next_group = state["next_group"]
        self._next_episode = state["next_episode"]
        self.consumed = state["consumed"]
        self.produced = state["produced"]
        self.discarded = Counter(state["discarded"])
        self.discarded_tokens = Counter(state.get("discarded_tokens", {}))

    def _is_complete(self, next_oldest: float) -> bool:
        """Whether a batch can be taken, from the counts of groups alone."""
        if self._config.partial_groups:
            return self.buffered >= self._config.batch_size
        needed = self._config.groups_per_batch
        last_chance, ready_last, ready = 0, 0, 0
        for (version, is_ready), number in self._standing.items():
            ready += number if is_ready else 0
            if version < next_oldest:
                last_chance += number
                ready_last += number if is_ready else 0
        if ready < needed or self._config.on_stale == "abort":
            return ready >= needed
        return ready_last >= needed or last_chance - ready_last <= self._config.redundant_groups

    def _open_group(self, usable_steps: int) -> Group | None:
        config = self._config
        limit = min(usable_steps * config.groups_per_batch + config.redundant_groups, config.max_groups)
        members = config.launched_per_group
        if len(self._groups) >= limit:
            # A group that ended short leaves its place only where batches are counted in episodes.
            members = min(members, limit * members - self.outstanding) if config.partial_groups else 0
            if members <= 0:
                return None
        if config.mode == "batch" and not self._wave:
            if self._running or self._unstarted:
                return None
            self._wave = max(limit - len(self._groups), 1)
        times_surplus = 0
        if self._again:
            seed, times_surplus = self._again.popleft()
        elif self._exhausted:
            self._wave = 0
            return None
        else:
            try:
                seed = self._ledger.next_seed()
            except StopIteration:
                self._exhausted = True
                self._wave = 0
                return None
        self._wave = max(self._wave - 1, 0)
        group = Group(f"g{self._next_group}", seed, members, config.max_retries, times_surplus=times_surplus)
        self._groups[group.group_id] = group
        self._next_group += 1
        return group

    def _replace_member(self, group: Group, retry: bool) -> None:
        """After a member was lost; redundant members stand in for it where there are any."""
        if retry and group.retries_left > 0 and group.size < self._config.group_size:
            group.retries_left -= 1
            group.waiting += 1

    def _settle(self, group: Group) -> None:
        """A member ended: the group may be complete, empty or filtered."""
        if group.is_ready:
            if not group.finished:
                self._drop(group, "surplus")
                return
            if not self._is_kept(group):
                self._drop(group, "filtered")
                return
        self._update(group)

    def _is_kept(self, group: Group) -> bool:
        try:
            return all(keep(group.finished) for keep in self._filters)
        except Exception as error:
            raise RolloutError(f"keep_group raised {error!r} on group {group.group_id}") from error

    def _drop(self, group: Group, reason: str) -> None:
        """The group is over: what is finished is discarded, what runs will be cancelled."""
        self._discard_finished(group.finished, reason)
        self._doom(group, list(group.running.values()), reason)
        group.waiting = 0
        group.finished = []
        self._groups.pop(group.group_id, None)
        self._unstarted.pop(group.group_id, None)
        self._count_standing(group, None)

    def _discard_finished(self, trajectories: list[Trajectory], reason: str) -> None:
        self.buffered -= len(trajectories)
        for trajectory in trajectories:
            self._count_discarded(trajectory.episode_id, "discarded", reason, trajectory.num_action_tokens)

    def _doom(self, group: Group, tickets: list[EpisodeTicket], reason: str) -> None:
        for ticket in tickets:
            del group.running[ticket.episode_id]
            self._doomed[ticket.episode_id] = reason
        self._to_cancel += tickets

    def _count_discarded(self, episode_id: str, kind: Discard, reason: str, tokens: int) -> None:
        self.discarded[reason] += 1
        self.discarded_tokens[reason] += tokens
        if self.on_discard is not None:
            self.on_discard(episode_id, kind, reason)

    def _update(self, group: Group) -> None:
        """Bring the indices up to date after a change of the group."""
        if group.waiting:
            self._unstarted[group.group_id] = group
        else:
            self._unstarted.pop(group.group_id, None)
        self._count_standing(group, (group.oldest_version, group.is_ready))

    def _count_standing(self, group: Group, standing: tuple[float, bool] | None) -> None:
        if group.standing == standing:
            return
        if group.standing is not None:
            self._standing[group.standing] -= 1
            if not self._standing[group.standing]:
                del self._standing[group.standing]
        if standing is not None:
            self._standing[standing] += 1
        group.standing = standing
