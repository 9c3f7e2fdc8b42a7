"""Who holds which slot of the official service: one lease per episode, given back once or not at all.

The service hands out slots by number and takes each one back by itself when its episode is over. Nothing tells a slot
that was given back from one that somebody else holds by now, so a second release takes it away from them.

Invariants:
- A lease is open until it is released, ended (the service said so), or abandoned (nobody knows). Only a release sends
  anything, and only if it is the first of these.
- A process opens at most `slots` leases on a service; more of them wait, with a deadline.
- A slot that the service hands out although an episode of this process runs on it is lost to both.
- A forked child holds nothing, and can neither use nor release what its parent holds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from agentenv.errors import InfrastructureError

__all__ = ["Lease", "Service", "reserve", "service_of"]

logger = logging.getLogger(__name__)

DOWN_S: Final = 5.0
"""Seconds for which a service that failed is asked last."""

Send = Callable[[dict[str, Any]], Any]


class Lease:
    """A slot of a service. Made by `Service.open`."""

    def __init__(self, service: Service, slot: int) -> None:
        self.service = service
        self.slot = slot
        self._process = os.getpid()
        self._open = True
        self._busy = False
        self._lost = ""
        self._successor: Lease | None = None

    def begin(self) -> None:
        """An action is about to be sent.

        Raises:
            InfrastructureError: the slot has been lost.
        """
        with _free:
            self._check()
            self._busy = True

    def went_on(self) -> None:
        """The service answered, and the episode goes on.

        Raises:
            InfrastructureError: the slot has been lost, maybe to an episode that began while the action was on its way.
        """
        with _free:
            self._busy = False
            if self._successor is not None:
                _hand_out_twice(self, self._successor)
            self._check()

    def ended(self) -> None:
        """The service answered that the episode is over, and has taken the slot back."""
        with _free:
            if self._close():
                self._make_room()

    def release(self, send: Send) -> None:
        """Give the slot back, unless the lease is over in any way; what goes wrong is logged, and not tried again."""
        with _free:
            if self._successor is not None and self._open:
                _hand_out_twice(self, self._successor)
            if not self._close():
                return
        try:
            send({"action": "release_one", "env_idx": self.slot})
        except InfrastructureError as error:
            logger.warning("slot %d of %s may be lost: %s", self.slot, self.service.url, error)
        finally:
            # Only now: whoever waits for room finds the slot free.
            with _free:
                self._make_room()

    def abandon(self, why: str) -> None:
        """Leave the slot alone: it may be somebody else's."""
        with _free:
            self._abandon(why)

    def _abandon(self, why: str) -> None:
        if self._close():
            self.service.abandoned += 1
            self._make_room()
            logger.warning(
                "slot %d of %s is left alone (%s); release_all there brings it back when nothing runs",
                self.slot, self.service.url, why,
            )  # fmt: skip

    def _check(self) -> None:
        if self._process != os.getpid():
            raise InfrastructureError(
                f"slot {self.slot} of {self.service.url} is held by the process that was forked"
            )
        if self._lost:
            raise InfrastructureError(self._lost)

    def _close(self) -> bool:
        """Whether it was open, and this process's; from here on it is not, and does not count as the slot's holder."""
        was, self._open = self._open and self._process == os.getpid(), False
        if self.service.held.get(self.slot) is self:
            del self.service.held[self.slot]
        return was

    def _make_room(self) -> None:
        self.service.count -= 1
        _free.notify()


class Service:
    """What this process holds of one service. Made by `service_of`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.held: dict[int, Lease] = {}
        self.count = 0
        """Leases that are open or being opened."""
        self.abandoned = 0
        self.down_until = 0.0

    def open(self, slot: int) -> Lease:
        """The reserved lease has its slot.

        Raises:
            InfrastructureError: this process holds it already; then it is lost to both.
        """
        lease = Lease(self, slot)
        with _free:
            other = self.held.get(slot)
            self.held[slot] = lease
            if other is not None:
                if other._busy:
                    # Its action may have ended its episode; the answer will tell.
                    other._successor = lease
                else:
                    _hand_out_twice(other, lease)
            lease._check()
        return lease

    def unreserve(self, *, failed: bool) -> None:
        """The reserved lease got no slot."""
        with _free:
            self.count -= 1
            if failed:
                self.down_until = time.monotonic() + DOWN_S
            _free.notify()


_free = threading.Condition()
_services: dict[str, Service] = {}


def _after_fork() -> None:
    global _free
    _free = threading.Condition()
    _services.clear()


os.register_at_fork(after_in_child=_after_fork)


def _hand_out_twice(one: Lease, other: Lease) -> None:
    """Neither may go on, nor release: the slot has the episode of the other, or of nobody."""
    for lease in (one, other):
        lease._lost = (
            f"{lease.service.url} gave slot {lease.slot} to a second episode while the first one ran"
        )
        lease._abandon("it was handed out twice")


def service_of(url: str) -> Service:
    """The process's record of a service."""
    with _free:
        return _services.setdefault(url, Service(url))


def reserve(urls: Sequence[str], slots: int, wait_s: float) -> Service:
    """Room for one more lease, on the service that is up and has the fewest; `open` or `unreserve` must follow.

    Args:
        urls: of services that may be taken.
        slots: that this process may hold of each.
        wait_s: longest wait for room, seconds.

    Raises:
        InfrastructureError: there was none.
    """
    services = [service_of(url) for url in urls]
    deadline = time.monotonic() + wait_s
    with _free:
        while True:
            now = time.monotonic()
            room = [service for service in services if service.count < slots]
            if room:
                best = min(room, key=lambda service: (now < service.down_until, service.count))
                best.count += 1
                return best
            if now >= deadline:
                raise InfrastructureError(
                    f"all {slots} slots of {', '.join(urls)} were in use by this process for {wait_s:g} s"
                )
            _free.wait(deadline - now)
