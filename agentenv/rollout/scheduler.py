"""The event loop's side of the controller: slots that play episodes, and the batch that the trainer waits for.

Who waits for what:

* A slot (one per environment) takes a ticket from the buffer, plays its episode and hands in the result. It waits for
  a ticket; it is woken by consumed batches, new weights and failed episodes.
* ``get_batch`` waits for a complete batch; it is woken by every end of an episode and by everything fatal.
* Nothing waits for the trainer: slots without a ticket hold no request and no environment call.

Invariants:

* Every ticket is booked exactly once: as a sample, or discarded under a reason.
* Every wait has a deadline from :class:`~agentenv.rollout.config.RolloutConfig`.
* What must stop the run (dead engine, failure rate, bug in a slot) raises from ``get_batch``, at once if it waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentenv.conversation import Tokenizer
from agentenv.errors import AgentEnvError, RolloutError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.buffer import EpisodeTicket, SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.evaluation_run import evaluate as play_evaluation
from agentenv.rollout.failures import EpisodeFailedError, FailurePolicy
from agentenv.rollout.ledger import Ledger
from agentenv.rollout.metrics import StepMetrics
from agentenv.rollout.workers import EnvFn
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
"""How often a waiting get_batch looks whether the engines live."""
_BACKOFF_S = 0.005
_LONGEST_BACKOFF_S = 5.0


class EpisodeScheduler:
    """Everything of a run that lives in the event loop. Coroutines are called in that loop, nothing else is.

    Args:
        env_fn: makes one environment; called in the slots' threads, when first needed.
        proxy: the engines.
        tokenizer: with a chat template.
        config: sizes, limits and deadlines.
        seed: of the sampling.
        ledger: gives the tasks.
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
    ) -> None:
        self._config = config
        self._env_fn = env_fn
        self._proxy = proxy
        self._tokenizer = tokenizer
        self._seed = seed
        self._ledger = ledger
        self._buffer = SampleBuffer(config, ledger)
        self._failures = FailurePolicy(config)
        self._managers = [
            EnvManager(f"slot-{number}", env_fn, proxy, tokenizer, config)
            for number in range(config.num_envs)
        ]
        self._version = proxy.version
        self._next_step = self._version
        self._fatal: Exception | None = None
        self._evaluations = itertools.count()
        self._metrics = StepMetrics(0.0)
        self._episodes: dict[str, asyncio.Task[Trajectory]] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._evaluating: set[asyncio.Task[list[Trajectory]]] = set()
        self._may_start = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def has_started(self) -> bool:
        """Training episodes are or were played."""
        return bool(self._slots)

    def counts(self) -> dict[str, Any]:
        """See :meth:`SampleBuffer.counts`."""
        return self._buffer.counts()

    def metrics(self) -> dict[str, float]:
        """See :mod:`agentenv.rollout.metrics`."""
        return self._metrics.report(
            self._buffer.counts(),
            failure_rate=self._failures.rate,
            wasted_tokens=sum(manager.wasted_tokens for manager in self._managers),
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
        if self._slots:
            return
        self._metrics = StepMetrics(asyncio.get_running_loop().time())
        for manager in self._managers:
            slot = asyncio.create_task(self._slot(manager), name=manager.name)
            slot.add_done_callback(self._slot_ended)
            self._slots.append(slot)

    async def _slot(self, manager: EnvManager) -> None:
        failures = 0
        while self._fatal is None:
            ticket = self._buffer.next_episode(self._version, self._next_step)
            if ticket is None:
                if self._buffer.is_exhausted:
                    _broadcast(self._ended)
                await self._may_start.wait()
                continue
            if await self._play(manager, ticket):
                failures = 0
                # An episode that cannot begin yet would only grow stale: no ticket before the slot is free.
                await manager.settle()
                continue
            # An environment that fails at once must not turn the slot into a busy loop.
            failures += 1
            await asyncio.sleep(min(_BACKOFF_S * 2**failures, _LONGEST_BACKOFF_S))

    async def _play(self, manager: EnvManager, ticket: EpisodeTicket) -> bool:
        """Play an episode and book it; false if it failed."""
        episode = asyncio.create_task(
            manager.run_episode(
                episode_id=ticket.episode_id,
                group_id=ticket.group_id,
                task_seed=ticket.task_seed,
                sampling_seed=self._seed * 1_000_003 + ticket.number,
                start_version=ticket.start_version,
            ),
            name=ticket.episode_id,
        )
        self._episodes[ticket.episode_id] = episode
        try:
            await asyncio.wait({episode})
        except asyncio.CancelledError:
            episode.cancel()
            await asyncio.wait({episode})
            raise
        finally:
            del self._episodes[ticket.episode_id]
            self._settle(ticket, episode)
            _broadcast(self._ended)
            _broadcast(self._may_start)
        return episode.cancelled() or episode.exception() is None

    def _settle(self, ticket: EpisodeTicket, episode: asyncio.Task[Trajectory]) -> None:
        """Book the end of an episode, whatever it was."""
        if not episode.done() or episode.cancelled():
            self._buffer.discard(ticket, "stopped" if self._fatal else "stale")
            return
        error = episode.exception()
        if error is None:
            trajectory = episode.result()
            self._failures.success()
            self._metrics.ended(trajectory)
            self._buffer.add(ticket, trajectory)
        elif isinstance(error, EpisodeFailedError):
            logger.warning("episode %s (task seed %d) failed: %s", ticket.episode_id, ticket.task_seed, error)
            self._buffer.discard(ticket, error.reason)
            stop = self._failures.failure(error.reason, str(error.cause))
            if self._proxy.error is not None:
                self._die(RolloutError(f"an inference engine died: {self._proxy.error!r}"), self._proxy.error)
            elif stop is not None:
                self._die(RolloutError(stop), error.cause)
        else:
            self._buffer.discard(ticket, f"error_{type(error).__name__}", retry=False)
            if isinstance(error, AgentEnvError):
                self._die(error, None)
            else:
                self._die(RolloutError(f"episode {ticket.episode_id} hit a bug: {error!r}"), error)

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            self._die(RolloutError(f"{slot.get_name()} died: {error!r}"), error)

    def _die(self, error: Exception, cause: BaseException | None) -> None:
        """The run is over: everybody who waits learns why, and every episode ends."""
        if self._fatal is not None:
            return
        error.__cause__ = cause if cause is not None else error.__cause__
        self._fatal = error
        logger.error("the rollout ends: %s", error)
        for episode in self._episodes.values():
            episode.cancel()
        _broadcast(self._ended)
        _broadcast(self._may_start)

    async def get_batch(self, step: int) -> list[Trajectory]:
        """See :meth:`AsyncController.get_batch`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._config.batch_timeout_s
        self._next_step = step
        _broadcast(self._may_start)
        for ticket in self._buffer.stale_running(step):
            self._episodes[ticket.episode_id].cancel()
        while True:
            if self._fatal is None and (error := self._proxy.error) is not None:
                self._die(RolloutError(f"an inference engine died: {error!r}"), error)
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
            # A discarded sample may have freed a place that nobody was woken for.
            _broadcast(self._may_start)
            await _wait(self._ended, min(_HEARTBEAT_S, deadline - loop.time()))
        self._next_step = step + 1
        _broadcast(self._may_start)
        self._metrics.close(batch, step=step, now=loop.time(), waited_s=loop.time() - started)
        return batch

    async def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See :meth:`AsyncController.sync_weights`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._config.sync_timeout_s):
                await self._proxy.update_weights(weights, version)
        except TimeoutError as error:
            failure = RolloutError(
                f"weights of version {version} were not in place within {self._config.sync_timeout_s:g} s"
            )
            self._die(failure, error)
            raise failure from error
        except UsageError:
            raise
        except AgentEnvError as error:
            failure = RolloutError(f"weights of version {version} did not reach the engines: {error}")
            self._die(failure, error)
            raise failure from error
        self._version = version
        self._next_step = max(self._next_step, version)
        self._metrics.sync_s += loop.time() - started
        _broadcast(self._may_start)

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
                name=name,
                sampling_seed=sampling_seed,
                shutdown_timeout_s=self._config.shutdown_timeout_s,
                on_result=on_result,
            )
        )
        self._evaluating.add(running)
        try:
            return await running
        finally:
            self._evaluating.discard(running)

    async def shut_down(self) -> None:
        """Close, cancel, gather: no waiter, episode, environment or engine is left that can be ended."""
        if self._fatal is None:
            self._fatal = RolloutError("the rollout was stopped")
        _broadcast(self._ended)
        deadline = asyncio.get_running_loop().time() + self._config.shutdown_timeout_s
        tasks: list[asyncio.Task[Any]] = [*self._slots, *self._evaluating]
        for task in tasks:
            # A second cancellation would cut short the wait of an interrupted evaluation for its environments.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for manager in self._managers:
            manager.end()
        hung = [name for manager in self._managers for name in await manager.join(deadline)]
        if hung:
            logger.warning("%s did not close within %g s", ", ".join(hung), self._config.shutdown_timeout_s)
        await self._proxy.close()

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
