"""What every kind of worker does, and which kind an environment gets.

Invariants:

* The environment is made by the worker, at the first ``reset``; calls never overlap.
* Every call returns, or raises an AgentEnvError, by its deadline; after an EpisodeTimeoutError or EnvError the worker
  is ended by its owner and used no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, cast

import agentenv
from agentenv import registration
from agentenv.errors import UsageError
from agentenv.rollout.workers.contract import ResetResult, StepResult, TextEnv
from agentenv.rollout.workers.env_payload import EnvPayload
from agentenv.rollout.workers.inline import InlineWorker
from agentenv.rollout.workers.thread import ThreadWorker

if TYPE_CHECKING:
    from agentenv.cluster.placement import Placement

EnvFn = Callable[[], TextEnv]
WorkerKind = Literal["inline", "thread", "process", "ray"]
_OF_CLASSES = ("inline", "thread", "process")
"""What a class may ask for; where machines are is the configuration's."""


class EnvWorker(Protocol):
    """One environment, called from asyncio. All times are of the event loop's clock, in seconds."""

    name: str

    @property
    def is_running(self) -> bool:
        """A thread, process or closing environment of it is still there."""
        ...

    @property
    def max_turns(self) -> int | None:
        """The environment's advice; None before the first reset, and without advice."""
        ...

    async def reset(self, seed: int, deadline: float) -> ResetResult:
        """Make the environment if there is none, and reset it.

        Raises:
            UsageError: the environment could not be made because of bad input.
            EpisodeTimeoutError: the deadline passed.
            AgentEnvError: the environment raised, died or returned a wrong type.
        """
        ...

    async def step(self, action: str, deadline: float) -> StepResult:
        """One step; errors as for :meth:`reset`."""
        ...

    async def settle(self) -> None:
        """Wait for a call whose caller was cancelled, under that call's own deadline.

        Raises:
            EpisodeTimeoutError: it missed that deadline.
        """
        ...

    def end(self) -> None:
        """Close the environment as soon as it can be, kill it if it does not; does not wait; idempotent."""
        ...

    async def join(self, deadline: float) -> bool:
        """Wait for the end after :meth:`end`; False: the deadline passed first."""
        ...


def worker_kind(env_fn: EnvFn | EnvPayload, configured: Literal["auto"] | WorkerKind = "auto") -> WorkerKind:
    """Where the environments of ``env_fn`` run.

    Args:
        env_fn: a class, a ``functools.partial`` of one or of ``agentenv.make``, or a function with an attribute
            ``worker``.
        configured: anything but "auto" is taken as it is.

    Returns:
        what the environment's class says; "thread" where nothing says anything.

    Raises:
        UsageError: the attribute is none of the kinds.
    """
    if configured != "auto":
        return configured
    source: object = env_fn
    while isinstance(source, functools.partial):
        if source.func is agentenv.make and source.args:
            source = registration.load_entry_point(registration.spec(source.args[0]))
        else:
            source = source.func
    kind: WorkerKind = getattr(source, "worker", "thread")
    if kind not in _OF_CLASSES:
        raise UsageError(f"worker of {source!r} is {kind!r}, must be one of {', '.join(_OF_CLASSES)}")
    return kind


def make_worker(
    kind: WorkerKind, env_fn: EnvFn | EnvPayload, name: str, placement: Placement | None = None
) -> EnvWorker:
    """A worker of that kind; its environment is made at the first reset.

    Args:
        kind: from :func:`worker_kind`.
        env_fn: makes the environment; for "process" and "ray" it must be picklable. Packed by another process it serves
            all kinds but "ray"; its modules are then imported here only where it is not for a process.
        name: for logs, and of the thread or process.
        placement: for "ray".

    Raises:
        UsageError: ``env_fn`` can't be pickled, or there is no such cluster or node.
    """
    if isinstance(env_fn, EnvPayload):
        if kind == "process":
            from agentenv.rollout.workers.process import ProcessWorker

            return ProcessWorker(env_fn, name)
        env_fn = cast("EnvFn", env_fn.load())
    if kind == "inline":
        return InlineWorker(env_fn, name)
    if kind == "thread":
        return ThreadWorker(env_fn, name)
    if kind == "ray":
        from agentenv.rollout.workers.ray_worker import RayWorker

        assert placement is not None
        return RayWorker(env_fn, name, placement)
    from agentenv.rollout.workers.process import ProcessWorker

    return ProcessWorker(env_fn, name)
