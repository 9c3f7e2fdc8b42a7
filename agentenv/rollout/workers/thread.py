"""A synchronous environment in a thread of its own, called from asyncio with deadlines.

Invariants:

* The environment is made, used and closed in one thread; calls never overlap.
* Every call has a deadline. A call that misses it leaves the worker abandoned: the thread closes the environment when,
  if ever, the call returns, and nobody waits for it.
* A hung call can't be ended: the thread stays until the process ends. Where that matters, use a process.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
    making_failed,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


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
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: tuple[str, float, asyncio.Future[Any]] | None = None
        self._ended = False

    @property
    def is_running(self) -> bool:
        """The thread lives."""
        return self._thread is not None and self._thread.is_alive()

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
                    raise making_failed(error) from error.__cause__
            try:
                result = self._env.reset(seed=seed)
            except BaseException as error:
                raise call_failed(self._env, "reset", error) from error
            return checked_reset(self._env, result)

        return await self._call("reset", job, deadline)

    async def step(self, action: str, deadline: float) -> StepResult:
        """See :class:`~agentenv.rollout.workers.EnvWorker`."""

        def job() -> StepResult:
            if self._env is None:
                raise EnvError("step before reset")
            try:
                result = self._env.step(action)
            except BaseException as error:
                raise call_failed(self._env, "step", error) from error
            return checked_step(self._env, result)

        return await self._call("step", job, deadline)

    def end(self) -> None:
        """Have the thread close the environment after the call it is in and end; does not wait; idempotent."""
        if not self._ended:
            self._ended = True
            self._jobs.put(None)

    async def join(self, deadline: float) -> bool:
        """Wait for the thread's end after :meth:`end`; False: the deadline passed first."""
        loop = asyncio.get_running_loop()
        pause = 0.001
        while self.is_running:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    async def _call(self, stage: str, job: Callable[[], _Result], deadline: float) -> _Result:
        if self._ended:
            raise EnvError(f"{self.name} has ended")
        await self.settle()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        # A cancelled caller leaves its call behind; nobody may then miss the exception it ends with.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending = (stage, deadline, future)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put((job, loop, future))
        await self._until_done(stage, deadline, future)
        self._pending = None
        return future.result()

    async def settle(self) -> None:
        """Wait for a call whose caller was cancelled, under that call's own deadline.

        Raises:
            EpisodeTimeoutError: it missed that deadline.
        """
        if self._pending is not None:
            await self._until_done(*self._pending)
            self._pending = None

    async def _until_done(self, stage: str, deadline: float, future: asyncio.Future[Any]) -> None:
        remaining = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({future}, timeout=max(remaining, 0.0))
        if not done:
            self.end()
            raise EpisodeTimeoutError(
                stage, f"{stage} of {self._describe()} did not return before its deadline"
            )

    def _describe(self) -> str:
        return (
            f"{env_name(self._env)} in {self.name}"
            if self._env is not None
            else f"the environment of {self.name}"
        )

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, loop, future = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = job()
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(_settle_future, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                logger.debug("%s: a result came after the event loop was closed", self.name)
            del job, item, future, result, error
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                logger.exception("%s: closing the environment failed", self.name)


def _settle_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
