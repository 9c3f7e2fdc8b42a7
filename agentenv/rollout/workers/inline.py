"""An environment that is called in the event loop itself: for environments that only compute for microseconds, and for
those whose ``reset`` and ``step`` are coroutines (:class:`agentenv.AsyncEnv`).

Invariants:

* A coroutine that misses its deadline is cancelled; the worker can be used no more. One that swallows its
  cancellation is waited for: it keeps its slot.
* A plain ``reset`` or ``step`` can't be interrupted and holds up everything else while it runs: an environment that
  waits or may hang belongs into a thread or a process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from agentenv.errors import EnvError, EpisodeTimeoutError
from agentenv.rollout.workers.contract import (
    ResetResult,
    StepResult,
    TextEnv,
    advised_turns,
    call_failed,
    checked_reset,
    checked_step,
    env_name,
    is_cancelled,
    making_failed,
)

logger = logging.getLogger(__name__)


class InlineWorker:
    """One environment, made at the first call, in the event loop's thread.

    Args:
        env_fn: makes the environment.
        name: for logs.
    """

    def __init__(self, env_fn: Callable[[], TextEnv], name: str) -> None:
        self.name = name
        self._env_fn = env_fn
        self._env: TextEnv | None = None
        self._ended = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """The environment is still being closed."""
        return self._closing is not None and not self._closing.done()

    @property
    def max_turns(self) -> int | None:
        """The environment's advice; None before the first call, and without advice."""
        return advised_turns(self._env) if self._env is not None else None

    async def reset(self, seed: int, deadline: float) -> ResetResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""
        env = self._env
        if env is None:
            self._check_usable()
            try:
                env = self._env = self._env_fn()
            except (Exception, SystemExit) as error:
                failure = making_failed(error)
                raise failure from failure.__cause__
        try:
            result: Any = env.reset(seed=seed)
            if inspect.isawaitable(result):
                result = await self._within("reset", result, deadline)
            return checked_reset(env, result)
        except EpisodeTimeoutError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            failure = call_failed(env, "reset", error)
            raise failure from failure.__cause__

    async def step(self, action: str, deadline: float) -> StepResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""
        env = self._env
        if env is None:
            raise EnvError("step before reset")
        try:
            result: Any = env.step(action)
            if type(result) is not tuple and inspect.isawaitable(result):
                result = await self._within("step", result, deadline)
            return checked_step(env, result)
        except EpisodeTimeoutError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            failure = call_failed(env, "step", error)
            raise failure from failure.__cause__

    async def settle(self) -> None:
        """Nothing to wait for: a cancelled call is over."""

    def end(self) -> None:
        """Close the environment; a coroutine ``close`` goes on in the background; idempotent."""
        if self._ended:
            return
        self._ended = True
        env, self._env = self._env, None
        if env is None:
            return
        try:
            closing = cast("Awaitable[None] | None", env.close())
        except Exception:
            logger.exception("%s: closing the environment failed", self.name)
            return
        if inspect.isawaitable(closing):
            self._closing = asyncio.ensure_future(self._close(closing))

    async def join(self, deadline: float) -> bool:
        """Wait until the environment is closed; False: the deadline passed first."""
        if self._closing is None:
            return True
        remaining = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({self._closing}, timeout=max(remaining, 0.0))
        if not done:
            self._closing.cancel()
        return bool(done)

    async def _within(self, stage: str, call: Awaitable[Any], deadline: float) -> Any:
        timeout = asyncio.timeout_at(deadline)
        try:
            async with timeout:
                return await call
        except TimeoutError as error:
            if not timeout.expired():
                raise
            name = env_name(self._env) if self._env is not None else "the environment"
            raise EpisodeTimeoutError(
                stage, f"{stage} of {name} in {self.name} did not return before its deadline"
            ) from error

    async def _close(self, closing: Awaitable[None]) -> None:
        try:
            await closing
        except Exception:
            logger.exception("%s: closing the environment failed", self.name)

    def _check_usable(self) -> None:
        if self._ended:
            raise EnvError(f"{self.name} has ended")
