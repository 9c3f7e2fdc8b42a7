"""A synchronous environment in a thread of its own, called from asyncio with deadlines.

Invariants:

* The environment is made, used and closed in one thread; calls never overlap.
* Every call has a deadline. A call that misses it leaves the worker abandoned: the thread closes the environment when,
  if ever, the call returns, and nobody waits for it.
* What comes back is checked: a result of the wrong type is an EnvError naming the environment and the value.
* Whatever the environment raises arrives as an AgentEnvError with the original as its cause.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

import gymnasium

from agentenv.errors import AgentEnvError, EnvError, EpisodeTimeoutError, UsageError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Env = gymnasium.Env[str, str]
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class EnvWorker:
    """One environment and its thread; both are made at the first call.

    Args:
        env_fn: makes the environment, in the worker's thread.
        name: of the thread, for logs.
    """

    def __init__(self, env_fn: Callable[[], _Env], name: str) -> None:
        self.name = name
        self._env_fn = env_fn
        self._env: _Env | None = None
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
        value = getattr(self._env.unwrapped, "max_turns", None) if self._env is not None else None
        return int(value) if value is not None else None

    async def reset(self, seed: int, deadline: float) -> tuple[str, dict[str, Any]]:
        """Make the environment if there is none, and reset it.

        Args:
            seed: names the task.
            deadline: of the event loop's clock.

        Returns:
            observation and info.

        Raises:
            UsageError: the environment could not be made because of bad input.
            EpisodeTimeoutError: the deadline passed.
            AgentEnvError: the environment raised or returned a wrong type.
        """

        def job() -> tuple[str, dict[str, Any]]:
            if self._env is None:
                self._env = self._env_fn()
            return _checked_reset(
                _name(self._env), _guarded(self._env, "reset", lambda env: env.reset(seed=seed))
            )

        return await self._call("reset", job, deadline)

    async def step(self, action: str, deadline: float) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One step; arguments, result and errors as for :meth:`reset`."""

        def job() -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self._env is None:
                raise EnvError("step before reset")
            return _checked_step(_name(self._env), _guarded(self._env, "step", lambda env: env.step(action)))

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
            f"{_name(self._env)} in {self.name}"
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
            except AgentEnvError as caught:
                error = caught
            except (
                BaseException
            ) as caught:  # an environment may raise anything, SystemExit too; the thread lives on
                error = EnvError(f"making the environment raised {type(caught).__name__}: {caught}")
                error.__cause__ = caught
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


def _guarded(env: _Env, stage: str, call: Callable[[_Env], Any]) -> Any:
    try:
        return call(env)
    except UsageError as error:
        # Bad input shows when the environment is made; from here on it is one task's trouble, not the run's.
        raise EnvError(f"{_name(env)}.{stage} raised {type(error).__name__}: {error}") from error
    except AgentEnvError:
        raise
    except BaseException as error:
        raise EnvError(f"{_name(env)}.{stage} raised {type(error).__name__}: {error}") from error


def _name(env: _Env) -> str:
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(env.unwrapped).__name__


def _checked_reset(name: str, result: Any) -> tuple[str, dict[str, Any]]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvError(f"{name}.reset returned {_short(result)}, must be (observation, info)")
    observation, info = result
    return _observation(name, "reset", observation), _info(name, "reset", info)


def _checked_step(name: str, result: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(
            f"{name}.step returned {_short(result)}, must be (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = result
    # NumPy's scalars are Reals; item() of its 0-d arrays is one too.
    number = reward.item() if hasattr(reward, "item") and getattr(reward, "ndim", 0) == 0 else reward
    if not isinstance(number, Real) or not math.isfinite(number):
        raise EnvError(f"{name}.step returned the reward {_short(reward)}, must be a finite number")
    flags = []
    for flag, value in (("terminated", terminated), ("truncated", truncated)):
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, bool):
            raise EnvError(f"{name}.step returned {flag} = {_short(value)}, must be a bool")
        flags.append(plain)
    return (
        _observation(name, "step", observation),
        float(number),
        flags[0],
        flags[1],
        _info(name, "step", info),
    )


def _observation(name: str, stage: str, value: Any) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{name}.{stage} returned the observation {_short(value)}, must be a str")
    return value


def _info(name: str, stage: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvError(f"{name}.{stage} returned the info {_short(value)}, must be a dict")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 100 else text[:100] + '...'} ({type(value).__name__})"
