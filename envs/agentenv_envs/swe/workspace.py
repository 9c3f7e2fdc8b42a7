"""A task laid out in a sandbox: what the environment needs of it, for embedded tasks and for real repositories.

Invariants:
- a workspace owns its sandbox from `open` to `close`, and gives it back exactly once;
- grading reads only what the agent left (a module, or a patch), and runs it where nothing else of the agent's is.
"""

import functools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from agentenv.errors import SandboxError, UsageError

from .calibration_report import read_keep_list
from .data import RefusedRow, SWETask, load_tasks
from .diffs import file_diff, shortened
from .embedded.oracle import MAX_MODULE_BYTES
from .embedded.oracle import grade as grade_module
from .embedded.tasks import EMBEDDED_WORKDIR, MODULE, TEST_COMMAND, EmbeddedTask, generate_task
from .grading import grade as grade_patch
from .repository import open_workspace, workspace_patch
from .sandbox import Sandbox, SandboxBackend, SandboxSpec

logger = logging.getLogger(__name__)

MAX_RECORDED_PATCH = 50_000
"""Characters of a diff that is kept with the episode."""


class Tasks(Protocol):
    """Tasks by seed, and how to lay one out."""

    def open(self, seed: int, backend: SandboxBackend) -> "Workspace":
        """Lay out the seed's task; the same seed gives the same task."""


class Workspace(Protocol):
    """One task in one sandbox."""

    task_id: str
    family: str
    issue: str
    workdir: str
    test_command: str | None
    sandbox: Sandbox
    patch: str | None
    """What the agent changed, as a diff of at most `MAX_RECORDED_PATCH` characters to be read; None before `grade`, and
    where there is nothing to compare."""

    def grade(self) -> dict[str, Any]:
        """What the agent's work is worth: {"resolved": bool, ...}; the sandbox may be used up by it.

        Raises:
            SandboxError: it could not be found out; this is never a 0.
        """

    def close(self) -> None:
        """Give the sandbox back."""


class EmbeddedTasks:
    """Tasks generated from a seed; see `embedded.tasks.generate_task`."""

    def __init__(self, split: str, levels: Sequence[int], families: Sequence[str] | None) -> None:
        self.split, self.levels, self.families = split, tuple(levels), families
        self.task(0)  # refuses a bad split, level or family at once

    def task(self, seed: int) -> EmbeddedTask:
        return generate_task(seed, split=self.split, levels=self.levels, families=self.families)

    def open(self, seed: int, backend: SandboxBackend) -> "EmbeddedWorkspace":
        return EmbeddedWorkspace(self.task(seed), backend)


class EmbeddedWorkspace:
    """An embedded task in a sandbox with a read-only root, which a reset makes as good as new."""

    workdir = EMBEDDED_WORKDIR
    test_command: str | None = TEST_COMMAND

    def __init__(self, task: EmbeddedTask, backend: SandboxBackend) -> None:
        self.task = task
        self.task_id, self.family, self.issue = task.task_id, task.family, task.issue
        self.patch: str | None = None
        self._backend = backend
        self._spec = SandboxSpec(
            workdir=EMBEDDED_WORKDIR,
            read_only=True,
            # Edits within one second may leave the size as it was: byte code of the text before would be used.
            environment={"PYTHONDONTWRITEBYTECODE": "1"},
        )
        self.sandbox = backend.acquire(self._spec)
        try:
            self.sandbox.write_files(task.files)
        except BaseException:
            self.close()
            raise

    def grade(self) -> dict[str, Any]:
        try:
            module = self.sandbox.read_file(MODULE, max_bytes=MAX_MODULE_BYTES)
        except FileNotFoundError:
            return {"resolved": False, "reason": f"{MODULE} is gone"}
        if len(module) >= MAX_MODULE_BYTES:
            return {"resolved": False, "reason": f"{MODULE} is over {MAX_MODULE_BYTES} bytes"}
        source = module.decode(errors="replace")
        self.patch = shortened(file_diff(MODULE, self.task.files[MODULE], source), MAX_RECORDED_PATCH)
        try:
            return grade_module(self.task, source, self.sandbox)
        except SandboxError as error:
            # An agent can make its sandbox fail a reset; that must not save a wrong answer from its 0.
            logger.info("%s: graded in another sandbox: %s", self.task_id, error)
        other = self._backend.acquire(self._spec)
        try:
            return grade_module(self.task, source, other)
        finally:
            self._backend.release(other)

    def close(self) -> None:
        self._backend.release(self.sandbox)


@functools.lru_cache(maxsize=4)
def _load_once(source: str, dataset_split: str | None, keep: frozenset[str] | None) -> tuple[SWETask, ...]:
    """A data set is read once in a process, however many environments use it. Rows that are refused are logged."""
    refused: list[RefusedRow] = []
    tasks = load_tasks(source, dataset_split, refused=refused)
    if keep is None:
        for row in refused:
            logger.warning("%s: the row is refused: %s", row.instance_id, row.reason)
        if refused:
            logger.warning("%s: %d of %d rows are refused", source, len(refused), len(refused) + len(tasks))
        return tuple(tasks)
    for row in refused:
        if row.instance_id in keep:
            raise UsageError(f"{source}: {row.instance_id}: {row.reason}")
    missing = keep.difference(task.instance_id for task in tasks)
    if missing:
        raise UsageError(f"keep: {source} has no row {min(missing)!r} ({len(missing)} are not there)")
    return tuple(task for task in tasks if task.instance_id in keep)


class RowTasks:
    """Rows of a data set, all or those of a keep list. One in five is held out by its id; fewer than ten rows are not
    split, and split "all" has every row. Seeds go round: n seeds in a row bring each of n rows once, in mixed order."""

    def __init__(
        self, source: str, split: str, dataset_split: str | None = None, keep: str | None = None
    ) -> None:
        if split not in ("train", "heldout", "all"):
            raise UsageError(f"split is {split!r}; a data set has train, heldout and all")
        kept = None if keep is None else read_keep_list(Path(keep))
        rows = sorted(_load_once(source, dataset_split, kept), key=lambda row: row.instance_id)
        if len(rows) >= 10 and split != "all":
            held_out = {row.instance_id for row in random.Random(0).sample(rows, len(rows) // 5)}
            rows = [row for row in rows if (row.instance_id in held_out) == (split == "heldout")]
        self.rows = random.Random(0).sample(rows, len(rows))

    def row(self, seed: int) -> SWETask:
        """The seed's."""
        return self.rows[seed % len(self.rows)]

    def open(self, seed: int, backend: SandboxBackend) -> "RowWorkspace":
        return RowWorkspace(self.row(seed), backend)


class RowWorkspace:
    """A real repository in an ordinary container of its own; the work is graded in another one."""

    test_command: str | None = None

    def __init__(self, task: SWETask, backend: SandboxBackend) -> None:
        self.task = task
        self.task_id, self.family, self.issue = task.instance_id, task.repo, task.problem_statement
        self.workdir = task.workdir
        self.patch: str | None = None
        self._backend = backend
        self.sandbox = open_workspace(task, backend)

    def grade(self) -> dict[str, Any]:
        patch = workspace_patch(self.sandbox)
        self.patch = shortened(patch, MAX_RECORDED_PATCH)
        grade = grade_patch(self.task, patch, self._backend)
        if grade.status == "invalid":
            raise SandboxError(f"{self.task_id}: not graded: {grade.evidence.get('reason', 'unknown')}")
        return {"resolved": grade.resolved, **grade.evidence}

    def close(self) -> None:
        self._backend.release(self.sandbox)
