"""Which episodes a list shows, in which order, and one page of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentenv.report.transcripts import revealed
from agentenv.viewer.episode_index import EpisodeRow

__all__ = ["RANGES", "SORTABLE", "EpisodeQuery", "page_of", "row_to_json"]

RANGES: Final = ("reward", "start_version", "staleness", "step")
"""Columns that a filter bounds from below and above."""
SORTABLE: Final = (
    "step", "task_id", "reward", "outcome", "end_reason", "start_version", "staleness", "turns", "action_tokens",
    "duration_s",
)  # fmt: skip


@dataclass(frozen=True)
class EpisodeQuery:
    """What is asked for; an empty text or None leaves a filter out."""

    phase: str = ""
    outcome: str = ""
    end_reason: str | None = None
    """As it is shown."""
    task: str = ""
    """Part of the task's id, capitals or not."""
    task_id: str | None = None
    """The whole id."""
    ranges: tuple[tuple[str, float | None, float | None], ...] = ()
    """Column, least and greatest value. An episode without a value is in no range."""
    sort: str = ""
    """One of :data:`SORTABLE`; empty: the order of the file, which also decides between equals."""
    descending: bool = True

    def select(self, rows: Sequence[EpisodeRow]) -> Sequence[EpisodeRow]:
        """The rows that pass, in order; those without a value to sort by come last."""
        tests = self._tests()
        chosen = [row for row in rows if all(test(row) for test in tests)] if tests else list(rows)
        if self.descending:
            chosen.reverse()
        if self.sort:
            name = self.sort
            valued = [row for row in chosen if getattr(row, name) is not None]
            valued.sort(key=lambda row: getattr(row, name), reverse=self.descending)
            return valued + [row for row in chosen if getattr(row, name) is None]
        return chosen

    def _tests(self) -> list[Callable[[EpisodeRow], bool]]:
        tests: list[Callable[[EpisodeRow], bool]] = []
        if self.phase:
            tests.append(lambda row: row.phase == self.phase)
        if self.outcome:
            tests.append(lambda row: row.outcome == self.outcome)
        if self.end_reason is not None:
            shown = functools.cache(revealed)
            tests.append(lambda row: shown(row.end_reason) == self.end_reason)
        if self.task_id is not None:
            tests.append(lambda row: row.task_id == self.task_id)
        if self.task:
            part = self.task.casefold()
            tests.append(lambda row: part in row.task_id.casefold())
        for name, low, high in self.ranges:
            if low is not None or high is not None:
                tests.append(_within(name, low, high))
        return tests


def _within(name: str, low: float | None, high: float | None) -> Callable[[EpisodeRow], bool]:
    def test(row: EpisodeRow) -> bool:
        value = getattr(row, name)
        return value is not None and (low is None or value >= low) and (high is None or value <= high)

    return test


def page_of(rows: Sequence[EpisodeRow], page: int, size: int) -> tuple[Sequence[EpisodeRow], int, int]:
    """The rows of a page, its number and the number of pages; a page past the last is the last.

    Args:
        rows: all that were selected.
        page: from 1.
        size: rows of a page.
    """
    pages = max(1, -(-len(rows) // size))
    page = min(max(1, page), pages)
    return rows[(page - 1) * size : page * size], page, pages


def row_to_json(row: EpisodeRow) -> dict[str, Any]:
    """What the page gets of a row: `key` as the file has it, every text to be shown with nothing hidden in it."""
    shown = {
        name: revealed(value) if isinstance(value, str) else value for name, value in row._asdict().items()
    }
    # Beyond 2**53 a browser would round it.
    shown["seed"] = None if row.seed is None else str(row.seed)
    return {**shown, "key": list(row.key)}
