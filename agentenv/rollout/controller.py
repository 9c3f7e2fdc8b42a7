"""The rollout side as the trainer sees it: batches out, weights in.

The controller runs an asyncio loop in a thread of its own; its methods are synchronous calls into that loop
(:mod:`agentenv.rollout.scheduler`). Per training step n the trainer calls ``get_batch(n)``, trains, and calls
``sync_weights(weights, n + 1)``.

Invariants:

* produced = consumed + buffered + discarded, at any moment (see :class:`~agentenv.rollout.buffer.SampleBuffer`).
* ``counts``, ``metrics`` and ``state_dict`` are of one moment: they are read in the loop's thread.
* No call waits without a deadline, nor for a loop that is gone.
* :meth:`AsyncController.stop` closes, cancels and gathers, in any state, and may be called again.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.conversation import Tokenizer
from agentenv.errors import RolloutError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.buffer import GroupFilter
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.ledger import Ledger, TaskLedger
from agentenv.rollout.loop_thread import LoopRunner, LoopThread
from agentenv.rollout.rewards import RewardFn
from agentenv.rollout.scheduler import EpisodeScheduler
from agentenv.rollout.slot import EpisodeSource
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class AsyncController:
    """Rollouts for a trainer.

    Args:
        env_fn: makes one environment; called in the slots' threads, when first needed. Or what makes slots that play
            something else, such as :class:`agentenv.agents.AgentRunner`.
        proxy: the engines; the controller owns them from now on and closes them in :meth:`stop`.
        tokenizer: with a chat template.
        config: sizes, limits and deadlines.
        seed: of the task order and of the sampling.
        task_seeds: a ledger, or what :class:`~agentenv.rollout.ledger.TaskLedger` takes.
        reward_fn: computes the reward of an ended episode in place of the environment's, beside the episodes still
            running; None: the environment's own rewards count.
        keep_group: whether a finished group may be trained on (dynamic filtering); one that may not is discarded and
            the next task takes its place.
        loop_factory: makes what runs the event loop; None: a thread of its own. Simulations give a virtual clock.

    Raises:
        UsageError: no chat template, or an episode may grow longer than an engine allows.
    """

    def __init__(
        self,
        env_fn: EpisodeSource,
        proxy: LLMProxy,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        *,
        seed: int = 0,
        task_seeds: Iterable[int] | Ledger | None = None,
        reward_fn: RewardFn | None = None,
        keep_group: GroupFilter | None = None,
        loop_factory: Callable[[], LoopRunner] | None = None,
    ) -> None:
        if proxy.max_length is not None and config.max_tokens_per_episode > proxy.max_length:
            raise UsageError(
                f"RolloutConfig.max_tokens_per_episode is {config.max_tokens_per_episode}, the engine takes at most "
                f"{proxy.max_length}"
            )
        self.config = config
        self._proxy = proxy
        ledger = task_seeds if isinstance(task_seeds, Ledger) else TaskLedger(task_seeds, seed=seed)
        if inspect.iscoroutinefunction(keep_group):
            raise UsageError("keep_group is a coroutine function, must be a plain one that returns a bool")
        if keep_group is not None and config.partial_groups:
            raise UsageError(
                "keep_group needs full groups: RolloutConfig.partial_groups is true, must be false"
            )
        self._scheduler = EpisodeScheduler(
            env_fn,
            proxy,
            tokenizer,
            config,
            seed=seed,
            ledger=ledger,
            reward_fn=reward_fn,
            keep_group=keep_group,
        )
        self._lock = threading.Lock()
        # A plain inline environment blocks the loop while it computes, for at most what its stages may take.
        patience_s = max(config.reset_timeout_s, config.step_timeout_s)
        self._loop_factory = loop_factory or partial(
            LoopThread, "agentenv-rollout", unresponsive_s=patience_s
        )
        self._thread: LoopRunner | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to play training episodes; idempotent.

        Raises:
            RolloutError: stopped already.
        """
        self._loop().call(self._scheduler.start())

    def get_batch(self, step: int) -> list[Trajectory]:
        """The trajectories of a training step, each started by version >= step - alpha.

        ``batch_size`` of them; fewer only where groups (``group_size`` > 1) ended short.

        Raises:
            RolloutError: failure rate, dead engine, deadline, no task left, or stopped.
            UsageError: the environment cannot be made.
        """
        self.start()
        return self._loop().call(self._scheduler.get_batch(step))

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the engines new weights; episodes started from now on are of this version.

        Raises:
            RolloutError: the deadline passed or an engine died.
            UsageError: the weights do not fit.
        """
        self._loop().call(self._scheduler.sync_weights(weights, version))

    def suspend(self) -> None:
        """Start no episode and sample no token until :meth:`resume`; :meth:`sync_weights` needs no such call.

        Raises:
            RolloutError: the engines did not pause within ``sync_timeout_s``.
        """
        self._loop().call(self._scheduler.suspend())

    def resume(self) -> None:
        """Go on after :meth:`suspend`.

        Raises:
            RolloutError: the engines did not go on within ``sync_timeout_s``.
        """
        self._loop().call(self._scheduler.resume())

    def evaluate(
        self,
        env_fn: EpisodeSource | None,
        seeds: Sequence[int],
        *,
        greedy: bool = False,
        num_envs: int | None = None,
        on_result: Callable[[Trajectory], None] | None = None,
        sampling_seed: int = 0,
    ) -> list[Trajectory]:
        """Play one episode per seed with the present weights, apart from training.

        Args:
            env_fn: makes the environments; None: the training ones' function.
            seeds: of the tasks.
            greedy: take the likeliest token instead of sampling.
            num_envs: environments side by side; None: the config's.
            on_result: called as episodes end, in the loop's thread; must be quick.
            sampling_seed: repeats the sampling.

        Returns:
            one trajectory per seed, in order; ``failed`` ones say why in ``end_reason`` and ``info["error"]``.

        Raises:
            RolloutError: an engine died, or stopped.
            UsageError: the environment cannot be made.
        """
        return self._loop().call(
            self._scheduler.evaluate(env_fn, list(seeds), greedy, num_envs, on_result, sampling_seed)
        )

    def counts(self) -> dict[str, Any]:
        """``produced``, ``consumed``, ``buffered``, ``running`` and ``discarded`` by reason, of one moment."""
        return self._snapshot(self._scheduler.counts)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step; see :mod:`agentenv.rollout.metrics`."""
        return self._snapshot(self._scheduler.metrics)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state of one moment: ledger, buffered trajectories, and tasks in flight, to be played again."""
        return self._snapshot(self._scheduler.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; before :meth:`start`.

        Raises:
            UsageError: started already, or the state is that of another ledger.
        """
        if self._scheduler.has_started:
            raise UsageError("AsyncController.load_state_dict must come before start")
        self._scheduler.load_state_dict(state)

    def stop(self) -> None:
        """End all episodes, environments, engines and threads; idempotent.

        Environments that do not close within ``shutdown_timeout_s`` are named in the log; their threads are daemons.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            thread = self._thread or self._loop_factory()
        try:
            thread.call(self._scheduler.shut_down())
        except RolloutError as error:
            logger.warning("environments and engines could not be closed: %s", error)
        finally:
            thread.stop()

    def __enter__(self) -> AsyncController:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _loop(self) -> LoopRunner:
        with self._lock:
            if self._stopped:
                raise RolloutError("the rollout was stopped")
            if self._thread is None:
                self._thread = self._loop_factory()
            return self._thread

    def _snapshot(self, read: Callable[[], _Result]) -> _Result:
        """Read in the loop's thread, where nothing changes meanwhile."""

        async def reading() -> _Result:
            return read()

        if self._stopped or self._thread is None or not self._thread.is_running:
            return read()
        return self._thread.call(reading())
