"""Checkpoints that are there whole or not at all.

Invariants:

* A checkpoint is written into a staging folder beside its final place and renamed when complete; a folder
  called ``checkpoint-N`` is therefore never half written, whenever the process died.
* The last file written into it is ``COMPLETE``: a folder that was copied in part is told apart too.
* Staging folders of dead runs are removed at the next save.
* What is loaded into something it does not fit is the user's mistake, and said to be one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.errors import UsageError

COMPLETE = "COMPLETE"
_STAGING = ".unfinished-checkpoint"


@contextmanager
def staged_checkpoint(
    run_dir: Path, name: str, *, is_main_process: bool, wait: object = None
) -> Iterator[Path]:
    """Folder to write checkpoint ``name`` under; it becomes ``run_dir/name`` when the block ends without an
    error.

    Args:
        run_dir: folder of the run.
        name: such as ``checkpoint-10``. The block must create this folder inside the one it is given.
        is_main_process: only this process creates, renames and removes folders.
        wait: barrier of all processes, called before the rename; None for a single process.
    """
    barrier = wait if callable(wait) else (lambda: None)
    staging = run_dir / _STAGING
    if is_main_process:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    barrier()
    yield staging
    barrier()
    if is_main_process:
        finished = staging / name
        (finished / COMPLETE).touch()
        _flush(finished)
        final = run_dir / name
        if final.exists():
            # Left by an earlier run that was continued from before this step.
            final.rename(staging / "replaced")
        finished.rename(final)
        _flush_folder(run_dir)
        shutil.rmtree(staging, ignore_errors=True)
    barrier()


def require_complete(folder: str | os.PathLike[str]) -> Path:
    """The checkpoint's path.

    Raises:
        UsageError: the folder does not exist or is not a complete checkpoint.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"checkpoint {str(path)!r} does not exist")
    if not (path / COMPLETE).exists():
        raise UsageError(
            f"checkpoint {str(path)!r} is not complete (no file {COMPLETE}): it cannot be continued from"
        )
    return path


@contextmanager
def fitting(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Around the loading of a checkpoint.

    Raises:
        UsageError: what is in the checkpoint does not fit what it is loaded into.
    """
    try:
        yield
    except UsageError:
        raise
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and "state_dict" not in str(error):
            raise  # such as a device without memory
        raise UsageError(
            f"checkpoint {str(folder)!r} does not fit the model or the settings of this run: {error}"
        ) from error


def last_complete(run_dir: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step in the run's folder, or None."""
    found = [
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in Path(run_dir).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit() and (path / COMPLETE).exists()
    ]
    return max(found)[1] if found else None


def _flush(folder: Path) -> None:
    """Bring the files to the disk before the rename: a power cut could keep the name and lose the content."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
