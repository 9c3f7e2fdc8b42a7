"""The event loop's side of the controller: slots that play episodes, and the batch that the trainer waits for.

Who waits for what:

* A slot (one per environment) without an episode waits for nothing: whatever changes what may start (a batch taken, new
  weights, the end of an episode) hands tickets to idle slots.
* An episode that has ended frees its slot; its reward, where one is computed, comes beside the next episode.
* ``get_batch`` waits for a complete batch; it is woken by every end of an episode and by everything fatal.
* Nothing waits for the trainer.

Invariants:

* Every ticket is booked exactly once: as a sample, or discarded under a reason.
* Every wait has a deadline from :class:`~agentenv.rollout.config.RolloutConfig`.
* What must stop the run (dead engine, failure rate, bug) raises from ``get_batch``, at once if it waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.conversation import Tokenizer
from agentenv.errors import AgentEnvError, RolloutError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.barrier import TurnBarrier
from agentenv.rollout.buffer import GroupFilter, SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.evaluation_run import evaluate as play_evaluation
from agentenv.rollout.failures import EpisodeFailedError, FailurePolicy
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.ledger import Ledger
from agentenv.rollout.metrics import StepMetrics
from agentenv.rollout.rewards import RewardFn, RewardPool
from agentenv.rollout.workers import EnvFn
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class EpisodeScheduler:
    """Everything of a run that lives in the event loop. Coroutines are called in that loop, nothing else is.

    Args: see :class:`~agentenv.rollout.controller.AsyncController`; ``seed`` is that of the sampling.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        proxy: LLMProxy,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        *,
        seed: int,
        ledger: Ledger,
        reward_fn: RewardFn | None,
        keep_group: GroupFilter | None,
    ) -> None:
        self._config = config
        self._env_fn = env_fn
        self._proxy = proxy
        self._tokenizer = tokenizer
        self._seed = seed
        self._ledger = ledger
        self._buffer = SampleBuffer(config, ledger, keep_group=keep_group)
        self._failures = FailurePolicy(config)
        self._rewards = RewardPool(reward_fn, config) if reward_fn is not None else None
        barrier = TurnBarrier() if config.mode == "batch" else None
        self._managers = [
            EnvManager(
                f"slot-{number}", env_fn, proxy, tokenizer, config, policy=self._failures, barrier=barrier
            )
            for number in range(config.num_envs)
        ]
        self._idle: deque[EnvManager] = deque()
        self._failed_in_a_row: dict[EnvManager, int] = {}
        self._episodes: dict[str, tuple[asyncio.Task[Trajectory], EnvManager]] = {}
        self._unrewarded: list[tuple[EpisodeTicket, Trajectory]] = []
        """Ended episodes whose rewards wait for all others, in mode "batch"."""
        self._background: set[asyncio.Task[Any]] = set()
        """Rewards, slots that settle, aborts: whatever has to end before the run has."""
        self._evaluating: set[asyncio.Task[list[Trajectory]]] = set()
        self._evaluations = itertools.count()
        self._version = proxy.version
        self._next_step = self._version
        self._fatal: Exception | None = None
        self._started = False
        self._suspended = False
        self._stopped = False
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._metrics = StepMetrics(config, num_engines=proxy.num_engines)

    @property
    def has_started(self) -> bool:
        """Training episodes are or were played."""
        return self._started

    def counts(self) -> dict[str, Any]:
        """See :meth:`SampleBuffer.counts`."""
        return self._buffer.counts()

    def metrics(self) -> dict[str, float]:
        """See :mod:`agentenv.rollout.metrics`."""
        return self._metrics.report(
            self._buffer,
            failure_rate=self._failures.rate,
            workers_replaced=sum(manager.workers_made - 1 for manager in self._managers),
            restarted_tokens=self._proxy.restarted_tokens,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: ledger, buffer with the tasks in flight, next step."""
        return {
            "ledger": self._ledger.state_dict(),
            "buffer": self._buffer.state_dict(),
            "next_step": self._next_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; before :meth:`start`."""
        self._ledger.load_state_dict(state["ledger"])
        self._buffer.load_state_dict(state["buffer"])
        self._next_step = int(state["next_step"])

    async def start(self) -> None:
        """Begin to play training episodes; idempotent."""
        if self._started:
            return
        self._started = True
        self._metrics.begin(asyncio.get_running_loop().time(), self._proxy.busy_s())
        self._keep_watch()
        self._idle.extend(self._managers)
        self._fill()

    async def get_batch(self, step: int) -> list[Trajectory]:
        """See :meth:`AsyncController.get_batch`."""
        if self._config.num_steps is not None and step >= self._config.num_steps:
            raise UsageError(
                f"step {step} is none of the run: RolloutConfig.num_steps is {self._config.num_steps}"
            )
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._config.batch_timeout_s
        self._next_step = step
        self._buffer.expire(step)
        self._after_change()
        while True:
            if self._fatal is not None:
                raise self._fatal
            batch = self._buffer.take(step)
            if batch is not None:
                break
            if self._version < step - self._config.alpha:
                raise UsageError(
                    f"step {step} needs episodes of version >= {step - self._config.alpha:g}, the engines have "
                    f"{self._version}: call sync_weights after each step"
                )
            if self._buffer.is_exhausted and self._buffer.outstanding == self._buffer.buffered:
                raise RolloutError(f"no task is left for step {step}: {self._describe()}")
            if loop.time() >= deadline:
                raise RolloutError(
                    f"no batch for step {step} within {self._config.batch_timeout_s:g} s: {self._describe()}"
                )
            await _wait(self._changed, deadline - loop.time())
        self._next_step = step + 1
        self._after_change()
        self._metrics.close(
            batch,
            self._buffer,
            step=step,
            now=loop.time(),
            waited_s=loop.time() - started,
            engines_busy_s=self._proxy.busy_s(),
        )
        return batch

    async def suspend(self) -> None:
        """See :meth:`AsyncController.suspend`."""
        self._suspended = True
        await self._with_deadline(self._proxy.suspend(), "the engines did not pause")

    async def resume(self) -> None:
        """See :meth:`AsyncController.resume`."""
        await self._with_deadline(self._proxy.resume(), "the engines did not go on")
        self._suspended = False
        self._fill()

    async def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See :meth:`AsyncController.sync_weights`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        update = self._proxy.update_weights(weights, version, restart_turns=self._config.on_sync == "restart")
        await self._with_deadline(update, f"weights of version {version} did not reach the engines")
        self._version = version
        self._next_step = max(self._next_step, version)
        self._metrics.sync_s += loop.time() - started
        self._fill()

    async def evaluate(
        self,
        env_fn: EnvFn | None,
        seeds: list[int],
        greedy: bool,
        num_envs: int | None,
        on_result: Callable[[Trajectory], None] | None,
        sampling_seed: int,
    ) -> list[Trajectory]:
        """See :meth:`AsyncController.evaluate`."""
        make = env_fn or self._env_fn
        name = f"eval{next(self._evaluations)}"
        slots = min(num_envs or self._config.num_envs, len(seeds))
        sampling = self._config.sampling(greedy=greedy)
        managers = [
            EnvManager(
                f"{name}-{number}", make, self._proxy, self._tokenizer, self._config, sampling=sampling
            )
            for number in range(slots)
        ]
        running = asyncio.create_task(
            play_evaluation(
                managers,
                self._proxy,
                seeds,
                rewards=self._rewards,
                name=name,
                sampling_seed=sampling_seed,
                shutdown_timeout_s=self._config.shutdown_timeout_s,
                on_result=on_result,
            )
        )
        self._keep_watch()
        self._evaluating.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            if running.cancelled() and self._fatal is not None and not self._stopped:
                raise self._fatal from None
            raise
        finally:
            self._evaluating.discard(running)

    async def shut_down(self) -> None:
        """Close, cancel, gather: no waiter, episode, environment or engine is left that can be ended."""
        self._stopped = True
        if self._fatal is None:
            self._fatal = RolloutError("the rollout was stopped")
        self._compute_rewards()
        _broadcast(self._changed)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.shutdown_timeout_s
        episodes = [task for task, _ in self._episodes.values()]
        tasks: list[asyncio.Task[Any]] = [*episodes, *self._evaluating, *self._background]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            # A second cancellation would cut short the wait of an interrupted evaluation for its environments.
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.shutdown_timeout_s)
        for manager in self._managers:
            manager.end()
        if self._rewards is not None:
            self._rewards.end()
        hung = [name for manager in self._managers for name in await manager.join(deadline)]
        if hung:
            logger.warning("%s did not close within %g s", ", ".join(hung), self._config.shutdown_timeout_s)
        try:
            async with asyncio.timeout(self._config.shutdown_timeout_s):
                await self._proxy.close()
        except TimeoutError:
            logger.warning("the engines did not close within %g s", self._config.shutdown_timeout_s)
        except Exception:
            logger.exception("closing the engines failed")

    def _fill(self) -> None:
        """Give idle slots the episodes that may start now."""
        while self._idle and self._fatal is None and not self._suspended:
            try:
                ticket = self._buffer.next_episode(self._version, self._next_step)
            except Exception as error:
                self._die(RolloutError(f"the ledger gave no task: {error!r}"), error)
                return
            if ticket is None:
                if self._buffer.is_exhausted:
                    _broadcast(self._changed)
                return
            manager = self._idle.popleft()
            now = asyncio.get_running_loop().time()
            self._metrics.group_started(ticket.group_id, now)
            task = asyncio.create_task(
                manager.run_episode(
                    episode_id=ticket.episode_id,
                    group_id=ticket.group_id,
                    task_seed=ticket.task_seed,
                    sampling_seed=self._seed * 1_000_003 + ticket.number,
                    start_version=ticket.start_version,
                ),
                name=ticket.episode_id,
            )
            self._episodes[ticket.episode_id] = (task, manager)
            task.add_done_callback(partial(self._ended, ticket, now))

    def _ended(self, ticket: EpisodeTicket, started: float, task: asyncio.Task[Trajectory]) -> None:
        """An episode's task is done: book it and find the next one for its slot."""
        _, manager = self._episodes.pop(ticket.episode_id)
        was_doomed = self._buffer.is_doomed(ticket)
        try:
            if task.cancelled():
                self._book_loss(
                    ticket, "stopped" if self._fatal else "cancelled", manager.action_tokens, started
                )
                if self._fatal is None:
                    # An episode that cannot begin yet would only grow stale: no ticket before the slot is free.
                    self._in_background(self._settle(manager))
                return
            error = task.exception()
            if error is None:
                trajectory = task.result()
                if self._rewards is None or was_doomed:
                    self._deliver(ticket, trajectory)
                else:
                    self._unrewarded.append((ticket, trajectory))
            elif isinstance(error, EpisodeFailedError):
                self._failed(ticket, error, manager.action_tokens, started, slot=manager.name)
            else:
                self._book_loss(
                    ticket, f"error_{type(error).__name__}", manager.action_tokens, started, retry=False
                )
                if isinstance(error, AgentEnvError):
                    self._die(error, None)
                else:
                    self._die(RolloutError(f"episode {ticket.episode_id} hit a bug: {error!r}"), error)
            self._free(manager, failed=error is not None and not was_doomed)
        except RolloutError as error:
            self._die(error, error.__cause__)
        except Exception as error:
            self._die(RolloutError(f"booking episode {ticket.episode_id} failed: {error!r}"), error)
        finally:
            self._after_change()

    def _deliver(self, ticket: EpisodeTicket, trajectory: Trajectory) -> None:
        self._failures.success()
        self._metrics.ended(trajectory)
        self._buffer.add(ticket, trajectory)
        if self._buffer.is_ready(ticket.group_id):
            self._metrics.group_ended(ticket.group_id, asyncio.get_running_loop().time())

    def _failed(
        self, ticket: EpisodeTicket, error: EpisodeFailedError, tokens: int, started: float, *, slot: str
    ) -> None:
        """An episode ended without a sample; one that was to be cancelled is no failure."""
        was_doomed = self._buffer.is_doomed(ticket)
        self._book_loss(ticket, error.reason, tokens, started)
        if was_doomed:
            return
        logger.warning("episode %s (task seed %d) failed: %s", ticket.episode_id, ticket.task_seed, error)
        stop = self._failures.failure(error.reason, str(error.cause), slot=slot)
        if self._proxy.error is not None:
            self._die(RolloutError(f"an inference engine died: {self._proxy.error!r}"), self._proxy.error)
        elif stop is not None:
            self._die(RolloutError(stop), error.cause)

    def _book_loss(
        self, ticket: EpisodeTicket, reason: str, tokens: int, started: float, *, retry: bool = True
    ) -> None:
        if self._buffer.is_doomed(ticket):
            self._metrics.cut_short(asyncio.get_running_loop().time() - started)
        self._buffer.discard(ticket, reason, tokens=tokens, retry=retry)

    def _free(self, manager: EnvManager, *, failed: bool) -> None:
        """The slot may take the next episode, after a pause where its last ones failed."""
        before = self._failed_in_a_row.pop(manager, 0)
        failures = before + 1 if failed else 0
        if not failures:
            self._idle.append(manager)
        elif self._fatal is None:
            self._failed_in_a_row[manager] = failures
            self._in_background(self._rest(manager, self._failures.slot_pause_s(failures)))

    async def _rest(self, manager: EnvManager, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._idle.append(manager)
        self._fill()

    async def _settle(self, manager: EnvManager) -> None:
        await manager.settle()
        self._idle.append(manager)
        self._fill()

    def _rewarded(self, ticket: EpisodeTicket, ended: Trajectory, task: asyncio.Task[Trajectory]) -> None:
        """A reward's task is done: book its episode."""
        tokens = ended.num_action_tokens
        started = asyncio.get_running_loop().time() - ended.duration_s
        try:
            if task.cancelled():
                self._book_loss(ticket, "stopped", tokens, started)
            elif (error := task.exception()) is None:
                self._deliver(ticket, task.result())
            elif isinstance(error, EpisodeFailedError):
                # A reward has no slot: each failure is one of its own.
                self._failed(ticket, error, tokens, started, slot=ticket.episode_id)
            else:
                self._book_loss(ticket, f"error_{type(error).__name__}", tokens, started, retry=False)
        except RolloutError as error:
            self._die(error, error.__cause__)
        except Exception as error:
            self._die(RolloutError(f"booking episode {ticket.episode_id} failed: {error!r}"), error)
        finally:
            self._after_change()

    async def _cancel(self, task: asyncio.Task[Trajectory], manager: EnvManager) -> None:
        """End an episode; a turn that is being sampled gives back its partial tokens first, to be counted."""
        try:
            async with asyncio.timeout(self._config.heartbeat_s):
                if await manager.abort_turn():
                    await asyncio.wait({task})
        except (TimeoutError, AgentEnvError) as error:
            logger.debug("%s: its turn could not be aborted: %s", manager.name, error)
        finally:
            task.cancel()

    def _after_change(self) -> None:
        """Something ended: cancel what is surplus, start what may start, compute rewards, wake who waits."""
        for ticket in self._buffer.to_cancel():
            if (playing := self._episodes.get(ticket.episode_id)) is not None:
                self._in_background(self._cancel(*playing))
        self._fill()
        self._compute_rewards()
        now = asyncio.get_running_loop().time()
        self._metrics.observe(now, playing=len(self._episodes), buffered=self._buffer.buffered)
        _broadcast(self._changed)

    def _compute_rewards(self) -> None:
        if not self._unrewarded:
            return
        ended = self._unrewarded
        if self._fatal is not None:
            self._unrewarded = []
            for ticket, trajectory in ended:
                self._buffer.discard(ticket, "stopped", tokens=trajectory.num_action_tokens)
        elif self._rewards is not None and (self._config.mode != "batch" or self._wave_has_ended()):
            self._unrewarded = []
            for ticket, trajectory in ended:
                reward = self._in_background(self._rewards.reward(trajectory), handled=True)
                reward.add_done_callback(partial(self._rewarded, ticket, trajectory))

    def _wave_has_ended(self) -> bool:
        return not self._episodes and self._buffer.wave_has_started

    def _in_background(
        self, coroutine: Coroutine[Any, Any, _Result], *, handled: bool = False
    ) -> asyncio.Task[_Result]:
        """A task that :meth:`shut_down` ends.

        Args:
            coroutine: what it runs.
            handled: whoever starts it sees to its exceptions; else one is a bug, which ends the run.
        """
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard if handled else self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._die(RolloutError(f"the rollout hit a bug: {error!r}"), error)

    def _keep_watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """The heartbeat: the death of an engine reaches the trainer even while no request is made."""
        while self._fatal is None:
            if (error := self._proxy.error) is not None:
                self._die(RolloutError(f"an inference engine died: {error!r}"), error)
            await asyncio.sleep(self._config.heartbeat_s)

    async def _with_deadline(self, work: Coroutine[Any, Any, None], failed: str) -> None:
        """Await an operation on the engines; if it fails the run is over.

        It is a task of its own: an engine that hangs while the operation is being undone is not waited for.
        """
        task = self._in_background(work, handled=True)
        try:
            await asyncio.wait({task}, timeout=self._config.sync_timeout_s)
        finally:
            task.cancel()
        if self._stopped and task.cancelled():
            raise RolloutError("the rollout was stopped")
        error: BaseException | None = TimeoutError(f"not within {self._config.sync_timeout_s:g} s")
        if task.done() and not task.cancelled():
            error = task.exception()
        if error is None:
            return
        if isinstance(error, UsageError):
            raise error
        known = isinstance(error, (AgentEnvError, TimeoutError))
        failure = RolloutError(f"{failed}: {error if known else repr(error)}")
        self._die(failure, error)
        raise failure from error

    def _die(self, error: Exception, cause: BaseException | None) -> None:
        """The run is over: everybody who waits learns why, and every episode ends."""
        if self._fatal is not None:
            return
        error.__cause__ = cause if cause is not None else error.__cause__
        self._fatal = error
        logger.error("the rollout ends: %s", error)
        for task in [*(task for task, _ in self._episodes.values()), *self._evaluating]:
            task.cancel()
        self._compute_rewards()
        _broadcast(self._changed)

    def _describe(self) -> str:
        return (
            f"version {self._version}, counts {self._buffer.counts()}, failure rate {self._failures.rate:.2f}, "
            f"{len(self._episodes)} episodes running"
        )


def _broadcast(event: asyncio.Event) -> None:
    """Wake everybody who waits now."""
    event.set()
    event.clear()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
