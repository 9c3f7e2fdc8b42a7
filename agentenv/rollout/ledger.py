"""Which task comes next: the prompt ledger.

Invariants:

* The sequence of task seeds is a function of the arguments alone.
* ``state_dict`` and ``load_state_dict`` put a new ledger at the same place: nothing is skipped, nothing comes twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentenv.errors import UsageError


@runtime_checkable
class Ledger(Protocol):
    """Hands out the seeds that ``env.reset`` gets."""

    def next_seed(self) -> int:
        """Seed of the next task.

        Raises:
            StopIteration: there is none left.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to that position."""
        ...


class TaskLedger:
    """Ledger over given task seeds, or over an endless stream of them.

    Args:
        task_seeds: a sequence is gone through in epochs, each in an order of its own; any other iterable is read once
            as it comes (on resume it must be given anew and is read up to the position); None: endless random seeds
            in [0, 2**31).
        seed: of the orders or of the random seeds.

    Raises:
        UsageError: an empty sequence.
    """

    def __init__(self, task_seeds: Iterable[int] | None = None, *, seed: int = 0) -> None:
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []
        self._fixed: Sequence[int] | None = None
        self._stream: Iterator[int] | None = None
        if isinstance(task_seeds, Sequence):
            if not task_seeds:
                raise UsageError("TaskLedger got an empty sequence of task seeds")
            self._fixed = task_seeds
        elif task_seeds is not None:
            self._stream = iter(task_seeds)

    def next_seed(self) -> int:
        """Seed of the next task; see :class:`Ledger`."""
        position = self._position
        if self._stream is not None:
            value = int(next(self._stream))
        elif self._fixed is not None:
            epoch, index = divmod(position, len(self._fixed))
            if epoch != self._epoch:
                self._order = list(range(len(self._fixed)))
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
                self._epoch = epoch
            value = int(self._fixed[self._order[index]])
        else:
            value = random.Random(f"{self._seed}/{position}").randrange(2**31)
        self._position += 1
        return value

    def state_dict(self) -> dict[str, Any]:
        """Position, with what it is a position in."""
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises:
            UsageError: it is one of another ledger, or before what was read from a stream already.
        """
        own = self._identity()
        theirs = {name: state.get(name) for name in own}
        if theirs != own:
            raise UsageError(f"the ledger to resume was made with {theirs}, this one with {own}")
        if self._stream is not None:
            skip = int(state["position"]) - self._position
            if skip < 0:
                raise UsageError(
                    f"the stream of task seeds was read up to {self._position} and can't go back to "
                    f"{state['position']}; give it anew"
                )
            self._stream = itertools.islice(self._stream, skip, None)
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "num_tasks": len(self._fixed) if self._fixed is not None else None,
            "is_stream": self._stream is not None,
        }
