"""Leases: who holds which sandbox, and until when.

Invariants:
- A lease belongs to one client. To every other client it does not exist.
- A lease that is not renewed in time ends, and its container is removed, whatever runs in it. Any request about a lease
  renews it.
- What is done with one sandbox is done one after the other, in a thread of the lease's own: a client that sends much
  delays itself alone.
- A command has a number that the client counts up. A number that is there already joins the command that has it: no
  command runs twice, however often a request is repeated.
- A lease counts until its container is gone; leases and warm sandboxes together are never more than `max_sandboxes`.
- While draining there are no new leases; after `close` there are no containers.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox.base import CommandResult, Sandbox, SandboxBackend, SandboxSpec

from .limits import ServiceLimits
from .metrics import Metrics
from .wire import Refusal

__all__ = ["Lease", "Leases", "Outcome"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a piece of work ended: its value, or what it raised."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(eq=False)
class Lease:
    """A client's hold on a sandbox."""

    id: str
    client: str
    spec: SandboxSpec
    ttl_s: float
    deadline: float
    """On the clock of `Leases`."""
    thread: ThreadPoolExecutor
    made: "Future[Outcome]" = field(default_factory=Future)
    """The sandbox."""
    ended: "Future[None] | None" = None
    """Set when the lease begins to end, done when its container is gone."""
    pending: int = 0
    command_number: int = -1
    command: "Future[Outcome] | None" = None
    shown: list[str] = field(default_factory=list)
    """Pieces of output of that command so far, where its client wants to see them."""


class Leases:
    """The table of leases over a backend; all methods may be called from any thread.

    Args:
        backend: where sandboxes come from; closed with this.
        limits: how many there may be.
        metrics: what is counted.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        limits: ServiceLimits,
        metrics: Metrics | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.metrics = metrics or Metrics()
        self.metrics.capacity.set(limits.max_sandboxes)
        self._clock = clock
        self._lock = threading.Lock()
        self._table: dict[tuple[str, str], Lease] = {}
        self._warm: OrderedDict[SandboxSpec, int] = OrderedDict()
        self._draining = False

    @property
    def draining(self) -> bool:
        """True when no new leases are given."""
        return self._draining

    def count(self) -> int:
        """Leases there are, those that are ending included."""
        with self._lock:
            return len(self._table)

    def of(self, client: str) -> list[str]:
        """Ids of a client's leases."""
        with self._lock:
            return [lease.id for lease in self._table.values() if lease.client == client]

    def open(self, client: str, lease_id: str, spec: SandboxSpec, ttl_s: float) -> Lease:
        """A new lease, whose sandbox is made in its own thread; or the one that the client has by this id.

        Raises:
            Refusal: draining, a limit is reached, or the id is that of a lease with another specification.
        """
        with self._lock:
            lease = self._table.get((client, lease_id))
            if lease is not None:
                if lease.spec != spec or lease.ended is not None:
                    raise Refusal("conflict", f"lease {lease_id}: the id is taken")
                self._touch(lease)
                return lease
            if self._draining:
                raise Refusal("draining", "the service is being stopped: it gives no new leases")
            mine = sum(lease.client == client for lease in self._table.values())
            if mine >= self.limits.per_client:
                raise Refusal("quota", f"client {client!r} has {mine} sandboxes, as many as it may have")
            if len(self._table) >= self.limits.max_sandboxes:
                raise Refusal("busy", f"all {self.limits.max_sandboxes} sandboxes are taken")
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"lease-{lease_id[:24]}")
            lease = Lease(lease_id, client, spec, ttl_s, self._clock() + ttl_s, thread)
            self._table[client, lease_id] = lease
            self._show()
        thread.submit(self._make, lease)
        return lease

    def get(self, client: str, lease_id: str) -> Lease:
        """A client's lease, renewed.

        Raises:
            Refusal: it has none of this id.
        """
        with self._lock:
            lease = self._table.get((client, lease_id))
            if lease is None or lease.ended is not None:
                raise Refusal(
                    "gone", f"lease {lease_id}: there is none; it was released, or its time was over"
                )
            self._touch(lease)
            return lease

    def renew(self, client: str, lease_ids: Iterable[str]) -> list[str]:
        """Renew leases; returns the ids of those that are gone."""
        lost = []
        for lease_id in lease_ids:
            try:
                self.get(client, lease_id)
            except Refusal:
                lost.append(lease_id)
        return lost

    def submit(self, lease: Lease, action: Callable[[Sandbox], Any]) -> "Future[Outcome]":
        """Do something with a lease's sandbox, after what it is doing now.

        Raises:
            Refusal: the lease is ending, or too much waits for it already.
        """
        with self._lock:
            return self._submit(lease, action)

    def command(
        self,
        lease: Lease,
        number: int,
        command: str,
        timeout_s: float,
        half_bytes: int,
        *,
        show: bool = False,
    ) -> "Future[Outcome]":
        """Run a command, or join the one that has this number; with `show`, `lease.shown` grows meanwhile.

        Raises:
            Refusal: the number is below the last one, or as `submit`.
        """

        shown: list[str] = []

        def run(sandbox: Sandbox) -> CommandResult:
            with self.metrics.command.time():
                result = sandbox.run(
                    command,
                    timeout_s=timeout_s,
                    half_bytes=half_bytes,
                    on_output=shown.append if show else None,
                )
            self.metrics.commands.labels("timed_out" if result.timed_out else "ended").inc()
            return result

        with self._lock:
            if number < lease.command_number:
                raise Refusal("conflict", f"lease {lease.id}: command {number} is over")
            if number > lease.command_number or lease.command is None:
                lease.command = self._submit(lease, run)
                lease.command_number, lease.shown = number, shown
            return lease.command

    def end(self, lease: Lease, how: str = "released") -> "Future[None]":
        """Begin to end a lease; the future is done when the sandbox is back in the pool, or gone.

        Args:
            lease: see there; ending it twice is ending it once.
            how: "released": the sandbox is kept warm where it can be and nothing runs in it. Otherwise it is removed.
        """
        with self._lock:
            if lease.ended is None:
                lease.ended = Future()
                keep = how == "released" and lease.pending == 0 and not self._draining
                threading.Thread(
                    target=self._finish, args=(lease, keep, how), name=f"end-{lease.id[:24]}", daemon=True
                ).start()
            return lease.ended

    def expire(self) -> int:
        """End the leases whose time is over; returns how many."""
        now = self._clock()
        with self._lock:
            over = [lease for lease in self._table.values() if lease.deadline <= now and lease.ended is None]
        for lease in over:
            logger.warning("lease %s of %s was not renewed; it ends", lease.id, lease.client)
            self.end(lease, "expired")
        return len(over)

    def drain(self) -> None:
        """Give no new leases from now on."""
        with self._lock:
            self._draining = True
        self.metrics.draining.set(1)

    def close(self) -> None:
        """End all leases, cutting what runs, and close the backend; idempotent."""
        self.drain()
        with self._lock:
            leases = list(self._table.values())
        endings = [self.end(lease, "drained") for lease in leases]
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for ending in endings:
            with contextlib.suppress(TimeoutError):
                ending.result(max(0.0, deadline - time.monotonic()))
        self.backend.close()

    def _submit(self, lease: Lease, action: Callable[[Sandbox], Any]) -> "Future[Outcome]":
        if lease.ended is not None:
            raise Refusal("gone", f"lease {lease.id}: it is ending")
        if lease.pending >= self.limits.queue:
            raise Refusal("conflict", f"lease {lease.id}: {lease.pending} requests wait for it already")
        lease.pending += 1

        def work() -> Outcome:
            try:
                return Outcome(action(lease.made.result().get()))
            except Exception as error:
                return Outcome(error=error)
            finally:
                with self._lock:
                    lease.pending -= 1
                    self._touch(lease)  # a long command must not leave its lease short of time

        return lease.thread.submit(work)

    def _make(self, lease: Lease) -> None:
        try:
            with self.metrics.making.time():
                outcome = Outcome(self._acquire(lease.spec))
        except Exception as error:
            outcome = Outcome(error=error)
        lease.made.set_result(outcome)

    def _acquire(self, spec: SandboxSpec) -> Sandbox:
        """A warm sandbox, or a new one, for which a warm one of another kind may have to go."""
        victim = None
        with self._lock:
            if self._warm.get(spec, 0):
                self._count_warm(spec, -1)
            elif len(self._table) + sum(self._warm.values()) > self.limits.max_sandboxes:
                victim = next(iter(self._warm), None)
                if victim is not None:
                    self._count_warm(victim, -1)
        if victim is not None:
            self.backend.acquire(victim).close()
        return self.backend.acquire(spec)

    def _finish(self, lease: Lease, keep: bool, how: str) -> None:
        assert lease.ended is not None
        try:
            outcome = lease.made.result()  # making one can't be cut, but ends
            if outcome.error is None:
                self._put_away(outcome.value, keep)
        except Exception as error:
            logger.warning("lease %s: %s", lease.id, error)
        finally:
            lease.thread.shutdown(wait=False)
            with self._lock:
                del self._table[lease.client, lease.id]
                self._show()
            self.metrics.ended.labels(how).inc()
            lease.ended.set_result(None)

    def _put_away(self, sandbox: Sandbox, keep: bool) -> None:
        if not keep:
            with contextlib.suppress(SandboxError):
                sandbox.close()
            return
        with self._lock:
            self._count_warm(sandbox.spec, 1)
        self.backend.release(sandbox)
        if not getattr(sandbox, "reusable", False):  # it is gone, not warm
            with self._lock:
                self._count_warm(sandbox.spec, -1)

    def _count_warm(self, spec: SandboxSpec, change: int) -> None:
        left = self._warm.pop(spec, 0) + change
        if left > 0:
            self._warm[spec] = left  # at the end: the first one is the one that was not used for longest
        self.metrics.warm.set(sum(self._warm.values()))

    def _touch(self, lease: Lease) -> None:
        lease.deadline = max(lease.deadline, self._clock() + lease.ttl_s)

    def _show(self) -> None:
        self.metrics.leases.set(len(self._table))
