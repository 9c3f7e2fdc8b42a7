"""Slots that play the training episodes: tickets to idle slots, an end for every episode, rewards beside them.

A slot without an episode waits for nothing: whatever changes what may start (a batch taken, new weights, the end of an
episode) hands tickets to idle slots. An episode that has ended frees its slot; its reward, where one is computed, comes
beside the slot's next episode.

Invariants:

* Every ticket is booked exactly once: as a sample, or discarded under a reason.
* An episode that was given up as surplus or stale is no failure, neither of its slot nor of the run.
* What happens in the end of an episode, whatever it is, reaches the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from agentenv.errors import AgentEnvError, RolloutError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.buffer import SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.failures import EpisodeFailedError, FailurePolicy
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.metrics import StepMetrics
from agentenv.rollout.rewards import RewardPool
from agentenv.rollout.run_state import RunState
from agentenv.rollout.slot import EpisodeSlot
from agentenv.trace import DISCARDED, slot_track
from agentenv.trajectory import Trajectory

logger = logging.getLogger(__name__)


class EpisodePlayer:
    """The slots of a run.

    Args:
        config: mode and heartbeat.
        run: is told of whatever ends the run, and woken at every end of an episode.
        managers: the slots.
        proxy: of the slots.
        buffer: gives tickets and takes trajectories.
        failures: decides about pauses and the end of the run.
        rewards: computes rewards; None: the environments' own count.
        metrics: hears of every end.
        seed: of the sampling.
    """

    def __init__(
        self,
        config: RolloutConfig,
        run: RunState,
        managers: Sequence[EpisodeSlot],
        proxy: LLMProxy,
        buffer: SampleBuffer,
        failures: FailurePolicy,
        rewards: RewardPool | None,
        metrics: StepMetrics,
        *,
        seed: int,
    ) -> None:
        self._config = config
        self._run = run
        self._managers = managers
        self._proxy = proxy
        self._buffer = buffer
        self._failures = failures
        self._rewards = rewards
        self._metrics = metrics
        self._seed = seed
        self._trace = proxy.trace
        self._counted = (0, 0)
        """Running and buffered episodes as the trace has them."""
        buffer.on_discard = lambda episode_id, kind, reason: self._trace.instant(
            DISCARDED, kind, episode=episode_id, reason=reason
        )
        self._idle: deque[EpisodeSlot] = deque()
        self._failed_in_a_row: dict[EpisodeSlot, int] = {}
        self._playing: dict[str, tuple[asyncio.Task[Trajectory], EpisodeSlot]] = {}
        self._rewarding: dict[str, asyncio.Task[Trajectory]] = {}
        self._unrewarded: list[tuple[EpisodeTicket, Trajectory, str]] = []
        """Ended episodes whose rewards wait for all others, in mode "batch"."""
        self.version = 0
        """Of the weights that episodes start with."""
        self.next_step = 0
        """The next training step that takes a batch."""
        self.is_suspended = False
        self.is_awaited = False
        """The trainer waits for a batch; only then episodes begin in the modes sync and batch."""
        self._plays_ahead = config.mode == "async"
        self._expected = 0
        self.num_settling = 0
        """Slots that wait for the environment call of a cancelled episode."""
        run.on_death.append(self._give_up)

    @property
    def num_playing(self) -> int:
        """Episodes in slots."""
        return len(self._playing)

    @property
    def tasks(self) -> list[asyncio.Task[Trajectory]]:
        """Of the episodes in slots."""
        return [task for task, _ in self._playing.values()]

    def start(self) -> None:
        """Have all slots play."""
        self._idle.extend(self._managers)
        self.fill()

    def fill(self) -> None:
        """Give idle slots the episodes that may start now."""
        self._hand_out()
        self._count()
        if self._config.deterministic and len(self._playing) != self._expected:
            # The engine hears of it before it gets a request of an episode that was begun here.
            self._expected = len(self._playing)
            self._proxy.expect_requests(self._expected)

    def _hand_out(self) -> None:
        while self._idle and self._run.fatal is None and not self.is_suspended:
            if not (self._plays_ahead or self.is_awaited):
                return
            try:
                ticket = self._buffer.next_episode(self.version, self.next_step)
            except Exception as error:
                self._run.die(RolloutError(f"the ledger gave no task: {error!r}"), error)
                return
            if ticket is None:
                if self._buffer.is_exhausted:
                    self._run.wake()
                return
            self._begin(ticket, self._idle.popleft())

    def after_change(self) -> None:
        """Something ended: cancel what is surplus, start what may start, compute rewards, wake who waits."""
        for ticket in self._buffer.to_cancel():
            if (playing := self._playing.get(ticket.episode_id)) is not None:
                self._run.in_background(self._cancel(*playing))
            elif (reward := self._rewarding.get(ticket.episode_id)) is not None:
                reward.cancel()
        self.fill()
        self._compute_rewards()
        now = asyncio.get_running_loop().time()
        self._metrics.observe(now, playing=len(self._playing), buffered=self._buffer.buffered)
        self._run.wake()

    def _count(self) -> None:
        counted = (len(self._playing), self._buffer.buffered)
        if counted != self._counted:
            self._counted = counted
            self._trace.counter("environments", running=counted[0], buffered=counted[1])

    def _begin(self, ticket: EpisodeTicket, manager: EpisodeSlot) -> None:
        now = asyncio.get_running_loop().time()
        self._metrics.group_started(ticket.group_id, now)
        task = asyncio.create_task(
            manager.run_episode(ticket, self._seed * 1_000_003 + ticket.number),
            name=ticket.episode_id,
        )
        self._playing[ticket.episode_id] = (task, manager)
        task.add_done_callback(partial(self._ended, ticket, now))

    def _ended(self, ticket: EpisodeTicket, started: float, task: asyncio.Task[Trajectory]) -> None:
        """An episode's task is done: book it and find the next one for its slot."""
        _, manager = self._playing.pop(ticket.episode_id)
        now = asyncio.get_running_loop().time()
        self._trace.span(
            slot_track(manager.name),
            "episode",
            started,
            now,
            episode=ticket.episode_id,
            task_seed=ticket.task_seed,
            version=ticket.start_version,
        )
        was_doomed = self._buffer.is_doomed(ticket)
        if not task.cancelled() and task.exception() is None and self._rewards is not None and not was_doomed:
            self._unrewarded.append((ticket, task.result(), manager.name))
        else:
            self._book(ticket, task, tokens=manager.action_tokens, started=started, slot=manager.name)
        if task.cancelled():
            if self._run.fatal is None:
                # An episode that cannot begin yet would only grow stale: no ticket before the slot is free.
                self._run.in_background(self._settle(manager))
        else:
            self._free(manager, failed=task.exception() is not None and not was_doomed)
        self.after_change()

    def _rewarded(
        self, ticket: EpisodeTicket, ended: Trajectory, slot: str, task: asyncio.Task[Trajectory]
    ) -> None:
        """A reward's task is done: book its episode."""
        del self._rewarding[ticket.episode_id]
        started = asyncio.get_running_loop().time() - ended.duration_s
        self._book(ticket, task, tokens=ended.num_action_tokens, started=started, slot=slot)
        self.after_change()

    def _book(
        self,
        ticket: EpisodeTicket,
        task: asyncio.Task[Trajectory],
        *,
        tokens: int,
        started: float,
        slot: str,
    ) -> None:
        """Account for an episode by the end of its task, whatever that was.

        Args:
            ticket: of the episode.
            task: done; the episode's or its reward's.
            tokens: sampled in the episode.
            started: of the episode, by the loop's clock.
            slot: that a failure is counted for.
        """
        try:
            error = None if task.cancelled() else task.exception()
            if not task.cancelled() and error is None:
                self._deliver(ticket, task.result(), slot)
                return
            was_doomed = self._buffer.is_doomed(ticket)
            if was_doomed:
                self._metrics.cut_short(asyncio.get_running_loop().time() - started)
            if error is None:
                reason = "cancelled" if self._run.fatal is None else "stopped"
            elif isinstance(error, EpisodeFailedError):
                reason = error.reason
            else:
                reason = f"error_{type(error).__name__}"
            is_bug = error is not None and not isinstance(error, EpisodeFailedError)
            self._buffer.discard(ticket, reason, tokens=tokens, retry=not is_bug)
            self._note_group(ticket)
            if isinstance(error, EpisodeFailedError):
                if not was_doomed:
                    self._count_failure(ticket, error, slot)
            elif isinstance(error, AgentEnvError):
                self._run.die(error)
            elif error is not None:
                self._run.die(RolloutError(f"episode {ticket.episode_id} hit a bug: {error!r}"), error)
        except RolloutError as error:
            self._run.die(error)
        except Exception as error:
            self._run.die(RolloutError(f"booking episode {ticket.episode_id} failed: {error!r}"), error)

    def _deliver(self, ticket: EpisodeTicket, trajectory: Trajectory, slot: str) -> None:
        self._failures.success(trajectory.duration_s, slot=slot)
        self._metrics.ended(trajectory)
        self._buffer.add(ticket, trajectory)
        self._note_group(ticket)

    def _note_group(self, ticket: EpisodeTicket) -> None:
        if self._buffer.is_ready(ticket.group_id):
            self._metrics.group_ended(ticket.group_id, asyncio.get_running_loop().time())

    def _count_failure(self, ticket: EpisodeTicket, error: EpisodeFailedError, slot: str) -> None:
        logger.warning("episode %s (task seed %d) failed: %s", ticket.episode_id, ticket.task_seed, error)
        stop = self._failures.failure(error.reason, str(error.cause), slot=slot)
        if self._proxy.error is not None:
            # It explains the failures better than their rate does.
            died = RolloutError(f"an inference engine died: {self._proxy.error!r}")
            self._run.die(died, self._proxy.error)
        elif stop is not None:
            self._run.die(RolloutError(stop), error.cause)

    def _free(self, manager: EpisodeSlot, *, failed: bool) -> None:
        """The slot may take the next episode, after a pause where its last ones failed."""
        before = self._failed_in_a_row.pop(manager, 0)
        if not failed:
            self._idle.append(manager)
        elif self._run.fatal is None:
            self._failed_in_a_row[manager] = before + 1
            self._run.in_background(self._rest(manager, self._failures.slot_pause_s(before + 1)))

    async def _rest(self, manager: EpisodeSlot, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._idle.append(manager)
        self.fill()

    async def _settle(self, manager: EpisodeSlot) -> None:
        time = asyncio.get_running_loop().time
        before = time()
        self.num_settling += 1
        try:
            await manager.settle()
        finally:
            self.num_settling -= 1
            self._trace.span(slot_track(manager.name), "settle", before, time())
        self._idle.append(manager)
        self.fill()

    async def _cancel(self, task: asyncio.Task[Trajectory], manager: EpisodeSlot) -> None:
        """End an episode; a turn that is being sampled gives back its partial tokens first, to be counted."""
        try:
            async with asyncio.timeout(self._config.heartbeat_s):
                if await manager.abort_turn():
                    await asyncio.wait({task})
        except (TimeoutError, AgentEnvError) as error:
            logger.debug("%s: its turn could not be aborted: %s", manager.name, error)
        finally:
            task.cancel()

    def _compute_rewards(self) -> None:
        if self._rewards is None or not self._unrewarded:
            return
        if self._run.fatal is not None:
            self._discard_unrewarded()
            return
        if self._config.mode == "batch" and (self._playing or not self._buffer.wave_has_started):
            return
        ended, self._unrewarded = self._unrewarded, []
        for ticket, trajectory, slot in ended:
            task = self._run.in_background(self._rewards.reward(trajectory), handled=True)
            self._rewarding[ticket.episode_id] = task
            task.add_done_callback(partial(self._rewarded, ticket, trajectory, slot))

    def _give_up(self) -> None:
        """The run is over: end every episode."""
        for task in self.tasks:
            task.cancel()
        self._discard_unrewarded()

    def _discard_unrewarded(self) -> None:
        ended, self._unrewarded = self._unrewarded, []
        for ticket, trajectory, _ in ended:
            self._buffer.discard(ticket, "stopped", tokens=trajectory.num_action_tokens)
