"""Where an environment's tasks come from: generated ones, or those of a data set.

Invariant: the seed decides the task. Of a data set, the seeds 0 to n - 1 are its n problems, each once.
"""

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

from agentenv.errors import UsageError

from .data import RefusedRow, load_tasks
from .embedded import generate_task
from .task import MathTask

__all__ = ["DataSetTasks", "GeneratedTasks", "TaskSource"]

logger = logging.getLogger(__name__)

_HASH_STEPS: Final = 10_000


class TaskSource(Protocol):
    """Tasks by seed."""

    def task(self, seed: int) -> MathTask:
        """The seed's task."""


class GeneratedTasks:
    """See `embedded.generate_task`.

    Raises:
        UsageError: a split, level or family that there is not.
    """

    def __init__(self, split: str, levels: Sequence[int], families: Sequence[str] | None) -> None:
        self.split, self.levels, self.families = split, levels, families
        self.task(0)

    def task(self, seed: int) -> MathTask:
        return generate_task(seed, split=self.split, levels=self.levels, families=self.families)


class DataSetTasks:
    """Problems of a data set, in an order that is mixed once and for all.

    Args:
        source: a file, or the name of a data set on the hub.
        split: an official split; None for "test" or the only one. With `heldout_share` "train" or "heldout": parts of
            what None stands for otherwise.
        config: of a hub data set that has several.
        fields: names of the fields of problem and answer, where they are not known ones.
        heldout_share: share of the problems that a hash of their text holds out; 0 divides nothing.

    Raises:
        UsageError: see `data.load_tasks`, or no problem in the split.
    """

    def __init__(
        self,
        source: str,
        *,
        split: str | None = None,
        config: str | None = None,
        fields: Mapping[str, str] | None = None,
        heldout_share: float = 0.0,
    ) -> None:
        number = isinstance(heldout_share, int | float) and not isinstance(heldout_share, bool)
        if not number or not 0.0 <= heldout_share < 1.0:
            raise UsageError(
                f"heldout_share is {heldout_share!r}; it has to be a number of at least 0 and below 1"
            )
        if heldout_share and split not in (None, "train", "heldout"):
            raise UsageError(f"split is {split!r}; with heldout_share there are train and heldout")
        if split == "heldout" and not heldout_share:
            # No official split has this name, and a file's rows without a field `split` are in every split.
            raise UsageError(
                f"split is 'heldout': {source} has none; give heldout_share, such as 0.1, or a data set of its own"
            )
        official = None if heldout_share else split
        tasks = list(_load_once(source, official, config, _frozen(fields)))
        if heldout_share:
            wanted = split == "heldout"
            tasks = [task for task in tasks if (_share(task.problem) < heldout_share) == wanted]
            if not tasks:
                raise UsageError(
                    f"{source}: heldout_share={heldout_share} leaves no problem to split {split!r}"
                )
        random.Random(0).shuffle(tasks)
        self.tasks = tasks

    def task(self, seed: int) -> MathTask:
        return self.tasks[seed % len(self.tasks)]


def _frozen(fields: Any) -> tuple[tuple[str, str], ...]:
    if fields is not None and not isinstance(fields, Mapping):
        raise UsageError(
            f"fields is {fields!r}; it maps problem and answer to names of the data set's fields"
        )
    return tuple(sorted((str(key), value) for key, value in (fields or {}).items()))


def _share(problem: str) -> float:
    """Where a problem's text lies between 0 and 1, by its hash."""
    digest = hashlib.blake2b(" ".join(problem.split()).encode("utf-8", "replace"), digest_size=6).digest()
    return int.from_bytes(digest) % _HASH_STEPS / _HASH_STEPS


@lru_cache(maxsize=4)
def _load_once(
    source: str, split: str | None, config: str | None, fields: tuple[tuple[str, str], ...]
) -> tuple[MathTask, ...]:
    """A data set is read once in a process, however many environments use it. Rows that are refused are logged."""
    refused: list[RefusedRow] = []
    tasks = load_tasks(source, split, config=config, fields=dict(fields) or None, refused=refused)
    for row in refused[:10]:
        logger.warning("%s: %s is refused: %s", source, row.row, row.reason)
    if refused:
        logger.warning("%s: %d of %d rows are refused", source, len(refused), len(refused) + len(tasks))
    return tuple(tasks)
