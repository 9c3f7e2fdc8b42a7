"""Files that a command was asked to write: looked at before the work, written whole or not at all."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

__all__ = ["check_can_plot", "check_writable", "save_plot"]

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_writable(option: str, path: Path | None) -> None:
    """Whether a file can be written there.

    Args:
        option: that named it, for the message.
        path: None: no file is wanted.

    Raises:
        UsageError: it can't.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: no such directory: {path.parent}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(f"{option} {path}: can't be written: {error.strerror or error}") from error


def check_can_plot(option: str, path: Path | None) -> None:
    """Whether a plot can be drawn and written there; arguments as of :func:`check_writable`.

    Raises:
        UsageError: it can't.
        MissingExtraError: matplotlib is missing.
    """
    check_writable(option, path)
    if path is None:
        return
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise UsageError(f"{option} {path}: must end in one of {', '.join(_PLOT_SUFFIXES)}")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error


def save_plot(canvas: Any, path: Path, *, dpi: int = 150) -> None:
    """Write a matplotlib figure, in the format that the path's end names."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    try:
        canvas.savefig(name, dpi=dpi)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
