"""Sandboxes as a recipe sees them: closed and counted at the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from agentenv.errors import AgentEnvError
from agentenv.report import Progress

logger = logging.getLogger(__name__)


class Sandboxes(Protocol):
    """Where an environment's commands run; an SWE ``SandboxBackend`` is one."""

    @property
    def kind(self) -> str:
        """What isolates them."""
        ...

    def left(self) -> int:
        """How many still exist."""
        ...

    def close(self) -> None:
        """Remove all of them."""
        ...


def show_lines(stage: str, work: Callable[[Callable[[str], None]], Any]) -> None:
    """Do something long that tells where it is in lines of text, such as the making of an image, and show them.

    Args:
        stage: what is going on.
        work: takes what is called with each line.
    """
    lines = 0

    def show(line: str) -> None:
        nonlocal lines
        lines += 1
        progress.update(lines, {"now": line})

    with Progress() as progress:
        progress.stage(stage, unit="line")
        work(show)


def close_sandboxes(sandboxes: Sandboxes | None) -> int | None:
    """Remove all of them; never raises.

    Returns:
        How many are left, 0 where the environment has none; None where they cannot be counted any more.
    """
    if sandboxes is None:
        return 0
    try:
        sandboxes.close()
    except Exception:
        logger.exception("the sandboxes did not close cleanly")
    try:
        return sandboxes.left()
    except AgentEnvError as error:
        logger.warning("the sandboxes that are left cannot be counted: %s", error)
    except Exception:
        logger.exception("the sandboxes that are left cannot be counted")
    return None
