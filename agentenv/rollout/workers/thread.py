"""A synchronous environment in a thread of its own.

Invariants:

* The environment is made, used and closed in one thread; calls never overlap.
* A call that misses its deadline leaves the worker abandoned: the thread closes the environment when, if ever, the call
  returns, and nobody waits for it. Where hung calls must not pile up, use a process, which can be killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from agentenv.errors import EnvError
from agentenv.rollout.workers.call_thread import CallThread
from agentenv.rollout.workers.contract import (
    ResetResult,
    StepResult,
    TextEnv,
    advised_turns,
    call_failed,
    checked_reset,
    checked_step,
    env_name,
    making_failed,
)

logger = logging.getLogger(__name__)


class ThreadWorker:
    """One environment and its thread; both are made at the first call.

    Args:
        env_fn: makes the environment, in the worker's thread.
        name: of the thread, for logs.
    """

    def __init__(self, env_fn: Callable[[], TextEnv], name: str) -> None:
        self.name = name
        self._env_fn = env_fn
        self._env: TextEnv | None = None
        self._thread = CallThread(name, last=self._close)

    @property
    def is_running(self) -> bool:
        """The thread lives."""
        return self._thread.is_running

    @property
    def max_turns(self) -> int | None:
        """The environment's advice; None before the first call, and without advice."""
        return advised_turns(self._env) if self._env is not None else None

    async def reset(self, seed: int, deadline: float) -> ResetResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""

        def job() -> ResetResult:
            if self._env is None:
                try:
                    self._env = self._env_fn()
                except BaseException as error:
                    failure = making_failed(error)
                    raise failure from failure.__cause__
            try:
                return checked_reset(self._env, self._env.reset(seed=seed))
            except BaseException as error:
                failure = call_failed(self._env, "reset", error)
                raise failure from failure.__cause__

        self._check_usable()
        return await self._thread.call(job, deadline, stage="reset", what=self._describe("reset"))

    async def step(self, action: str, deadline: float) -> StepResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""

        def job() -> StepResult:
            if self._env is None:
                raise EnvError("step before reset")
            try:
                return checked_step(self._env, self._env.step(action))
            except BaseException as error:
                failure = call_failed(self._env, "step", error)
                raise failure from failure.__cause__

        self._check_usable()
        return await self._thread.call(job, deadline, stage="step", what=self._describe("step"))

    async def settle(self) -> None:
        """Wait for a call whose caller was cancelled; see :class:`~agentenv.rollout.workers.EnvWorker`."""
        await self._thread.settle()

    def end(self) -> None:
        """Have the thread close the environment after the call it is in and end; does not wait; idempotent."""
        self._thread.end()

    async def join(self, deadline: float) -> bool:
        """Wait for the thread's end after :meth:`end`; False: the deadline passed first."""
        return await self._thread.join(deadline)

    def _check_usable(self) -> None:
        if self._thread.has_ended:
            raise EnvError(f"{self.name} has ended")

    def _describe(self, stage: str) -> str:
        env = f"{env_name(self._env)} in" if self._env is not None else "the environment of"
        return f"{stage} of {env} {self.name}"

    def _close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                logger.exception("%s: closing the environment failed", self.name)
