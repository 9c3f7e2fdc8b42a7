"""Idle sandboxes that have been reset, by specification.

Invariants:
- What is in the pool is in the state of a new sandbox and belongs to nobody.
- The newest is taken first: its memory is the warmest.
- After `close` nothing is taken and nothing is put in.
"""

import threading
from collections import defaultdict
from typing import Generic, TypeVar

from .base import SandboxSpec

__all__ = ["WarmPool"]

S = TypeVar("S")


class WarmPool(Generic[S]):
    """A thread-safe stack of idle sandboxes per specification."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[SandboxSpec, list[S]] = defaultdict(list)
        self._closed = False

    def take(self, spec: SandboxSpec) -> S | None:
        """An idle sandbox of this specification, or None."""
        with self._lock:
            idle = self._idle.get(spec)
            return idle.pop() if idle and not self._closed else None

    def put(self, spec: SandboxSpec, sandbox: S) -> bool:
        """Keep a sandbox for the next `take`; false after `close`: the caller still has it."""
        with self._lock:
            if self._closed:
                return False
            self._idle[spec].append(sandbox)
            return True

    def close(self) -> list[S]:
        """Hand out all that are idle, for removal."""
        with self._lock:
            self._closed = True
            sandboxes = [sandbox for idle in self._idle.values() for sandbox in idle]
            self._idle.clear()
            return sandboxes
