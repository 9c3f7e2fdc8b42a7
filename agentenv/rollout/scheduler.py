"""The event loop's side of the controller: the batch that the trainer waits for, weights, evaluations, the end.

Who waits for what:

* ``get_batch`` waits for a complete batch; it is woken by every end of an episode and by everything fatal.
* Nothing waits for the trainer: slots play on by themselves (:mod:`agentenv.rollout.episode_player`).

Invariants:

* Every wait has a deadline from :class:`~agentenv.rollout.config.RolloutConfig`.
* What must stop the run (dead engine, failure rate, bug) raises from ``get_batch`` and ``evaluate``, at once if they
  wait.
* :meth:`EpisodeScheduler.shut_down` ends everything that can be ended, from any state.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentenv.conversation import Tokenizer
from agentenv.errors import AgentEnvError, RolloutError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.barrier import TurnBarrier
from agentenv.rollout.buffer import GroupFilter, SampleBuffer
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.episode_player import EpisodePlayer
from agentenv.rollout.evaluation_run import evaluate as play_evaluation
from agentenv.rollout.failures import FailurePolicy
from agentenv.rollout.ledger import Ledger
from agentenv.rollout.metrics import StepMetrics
from agentenv.rollout.rewards import RewardFn, RewardPool
from agentenv.rollout.run_state import RunState
from agentenv.rollout.slot import EpisodeSource, make_slot
from agentenv.rollout.slot_context import SlotContext
from agentenv.trace import WEIGHTS
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class EpisodeScheduler:
    """Everything of a run that lives in the event loop. Coroutines are called in that loop, nothing else is.

    Args: see :class:`~agentenv.rollout.controller.AsyncController`; ``seed`` is that of the sampling.
    """

    def __init__(
        self,
        env_fn: EpisodeSource,
        proxy: LLMProxy,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        *,
        seed: int,
        ledger: Ledger,
        reward_fn: RewardFn | None,
        keep_group: GroupFilter | None,
    ) -> None:
        if config.deterministic and not proxy.can_expect:
            raise UsageError(
                "RolloutConfig.deterministic is true, but the engines cannot wait for requests: it takes one "
                "TransformersEngine"
            )
        self._config = config
        self._env_fn = env_fn
        self._proxy = proxy
        self._ledger = ledger
        self._run = RunState()
        self._run.on_death.append(self._end_evaluations)
        self._buffer = SampleBuffer(config, ledger, keep_group=keep_group)
        self._failures = FailurePolicy(config)
        self._rewards = RewardPool(reward_fn, config, trace=proxy.trace) if reward_fn is not None else None
        self._metrics = StepMetrics(config, num_engines=proxy.num_engines)
        barrier = TurnBarrier() if config.mode == "batch" else None
        self._context = SlotContext(proxy, tokenizer, config)
        context = replace(self._context, policy=self._failures, barrier=barrier)
        self._managers = [make_slot(env_fn, f"slot-{number}", context) for number in range(config.num_envs)]
        self._player = EpisodePlayer(
            config,
            self._run,
            self._managers,
            proxy,
            self._buffer,
            self._failures,
            self._rewards,
            self._metrics,
            seed=seed,
        )
        self._player.version = self._player.next_step = proxy.version
        self._evaluating: set[asyncio.Task[list[Trajectory]]] = set()
        self._evaluations = itertools.count()
        self._started = False
        self._watching: asyncio.Task[None] | None = None

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
            slots_settling=self._player.num_settling,
            proxy=self._proxy,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: ledger, buffer with the tasks in flight, next step."""
        return {
            "ledger": self._ledger.state_dict(),
            "buffer": self._buffer.state_dict(),
            "next_step": self._player.next_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; before :meth:`start`."""
        self._ledger.load_state_dict(state["ledger"])
        self._buffer.load_state_dict(state["buffer"])
        self._player.next_step = int(state["next_step"])

    async def start(self) -> None:
        """Begin to play training episodes; idempotent."""
        if self._started:
            return
        self._started = True
        self._metrics.begin(asyncio.get_running_loop().time(), self._proxy.busy_s())
        self._keep_watch()
        self._player.start()

    async def get_batch(self, step: int) -> list[Trajectory]:
        """See :meth:`AsyncController.get_batch`."""
        if self._config.num_steps is not None and step >= self._config.num_steps:
            raise UsageError(
                f"step {step} is none of the run: RolloutConfig.num_steps is {self._config.num_steps}"
            )
        loop, player = asyncio.get_running_loop(), self._player
        started = loop.time()
        deadline = started + self._config.batch_timeout_s
        if self._run.fatal is None and player.version < step - self._config.alpha:
            raise UsageError(
                f"step {step} needs episodes of version >= {step - self._config.alpha:g}, the engines have "
                f"{player.version}: call sync_weights after each step"
            )
        player.next_step = step
        self._buffer.expire(step)
        player.is_awaited = True
        try:
            batch = await self._complete_batch(step, deadline)
        finally:
            player.is_awaited = False
        player.next_step = step + 1
        player.after_change()
        ages = [step - trajectory.start_version for trajectory in batch]
        self._proxy.trace.counter("staleness", mean=sum(ages) / max(len(ages), 1), max=max(ages, default=0))
        self._metrics.close(
            batch,
            self._buffer,
            step=step,
            now=loop.time(),
            waited_s=loop.time() - started,
            engines_busy_s=self._proxy.busy_s(),
        )
        return batch

    async def _complete_batch(self, step: int, deadline: float) -> list[Trajectory]:
        loop, player = asyncio.get_running_loop(), self._player
        player.after_change()
        while True:
            if self._run.fatal is not None:
                raise self._run.fatal
            batch = self._buffer.take(step)
            if batch is not None:
                return batch
            if self._buffer.is_exhausted and self._buffer.outstanding == self._buffer.buffered:
                raise RolloutError(f"no task is left for step {step}: {self._describe()}")
            if loop.time() >= deadline:
                raise RolloutError(
                    f"no batch for step {step} within {self._config.batch_timeout_s:g} s: {self._describe()}"
                )
            await self._run.wait(deadline - loop.time())

    async def suspend(self) -> None:
        """See :meth:`AsyncController.suspend`."""
        self._player.is_suspended = True
        await self._with_deadline(self._proxy.suspend(), "the engines did not pause")

    async def resume(self) -> None:
        """See :meth:`AsyncController.resume`."""
        await self._with_deadline(self._proxy.resume(), "the engines did not go on")
        self._player.is_suspended = False
        self._player.fill()

    async def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See :meth:`AsyncController.sync_weights`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        update = self._proxy.update_weights(weights, version, restart_turns=self._config.on_sync == "restart")
        await self._with_deadline(update, f"weights of version {version} did not reach the engines")
        self._player.version = version
        self._player.next_step = max(self._player.next_step, version)
        self._metrics.sync_s += loop.time() - started
        self._proxy.trace.span(WEIGHTS, "weight sync", started, loop.time(), version=version)
        self._player.fill()

    async def evaluate(
        self,
        env_fn: EpisodeSource | None,
        seeds: list[int],
        greedy: bool,
        num_envs: int | None,
        on_result: Callable[[Trajectory], None] | None,
        sampling_seed: int,
    ) -> list[Trajectory]:
        """See :meth:`AsyncController.evaluate`."""
        if num_envs is not None and num_envs < 1:
            raise UsageError(f"evaluate: num_envs is {num_envs}, must be at least 1")
        if self._player.is_suspended:
            raise UsageError(
                "evaluate: the engines are suspended, and this call would wait for them: call resume first"
            )
        make = env_fn or self._env_fn
        name = f"eval{next(self._evaluations)}"
        slots = min(num_envs or self._config.num_envs, len(seeds))
        context = replace(self._context, sampling=self._config.sampling(greedy=greedy))
        managers = [make_slot(make, f"{name}-{number}", context) for number in range(slots)]
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
            if running.cancelled() and self._run.fatal is not None and not self._run.is_stopped:
                raise self._run.fatal from None
            raise
        finally:
            self._evaluating.discard(running)

    async def shut_down(self) -> None:
        """Close, cancel, gather: no waiter, episode, environment or engine is left that can be ended."""
        deadline = asyncio.get_running_loop().time() + self._config.shutdown_timeout_s
        tasks: list[asyncio.Task[Any]] = [*self._player.tasks, *self._evaluating]
        self._run.stop()
        tasks += self._run.background
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
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
        if self._config.worker == "ray":
            from agentenv.cluster.host_pool import end_all

            end_all()
        try:
            async with asyncio.timeout(self._config.shutdown_timeout_s):
                await self._proxy.close()
        except TimeoutError:
            logger.warning("the engines did not close within %g s", self._config.shutdown_timeout_s)
        except Exception:
            logger.exception("closing the engines failed")

    def _keep_watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """The heartbeat: the death of an engine reaches the trainer even while no request is made."""
        while self._run.fatal is None:
            if (error := self._proxy.error) is not None:
                self._run.die(RolloutError(f"an inference engine died: {error!r}"), error)
            await asyncio.sleep(self._config.heartbeat_s)

    async def _with_deadline(self, work: Coroutine[Any, Any, None], failed: str) -> None:
        """Await an operation on the engines; if it fails the run is over.

        It is a task of its own: an engine that hangs while the operation is being undone is not waited for.
        """
        task = self._run.in_background(work, handled=True)
        try:
            await asyncio.wait({task}, timeout=self._config.sync_timeout_s)
        finally:
            task.cancel()
        if self._run.is_stopped and task.cancelled():
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
        self._run.die(failure, error)
        raise failure from error

    def _end_evaluations(self) -> None:
        for task in self._evaluating:
            # A second cancellation would cut short the wait of an interrupted evaluation for its environments.
            if not task.cancelling():
                task.cancel()

    def _describe(self) -> str:
        return (
            f"version {self._player.version}, counts {self._buffer.counts()}, failure rate {self._failures.rate:.2f}, "
            f"{self._player.num_playing} episodes running, {self._player.num_settling} slots settling"
        )
