"""Where each episode of trajectories.jsonl lies, and what a list shows of it.

Invariants:
- Each byte is read once, and of a line only what the list shows is parsed and kept; of a file that was replaced or cut
  (`RunDirectory.rewind`) no row is left.
- The file may hold anything: a line that is no episode is counted and left out, and every value of a row has its type.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

from agentenv.report.run_directory import PHASES, episode_head
from agentenv.report.text_files import open_regular
from agentenv.viewer.followed_file import FollowedFile

__all__ = ["MAX_NAME_CHARS", "EpisodeIndex", "EpisodeRow"]

MAX_NAME_CHARS: Final = 1000
"""Of an id or a reason; what is longer is cut."""
_LARGEST: Final = 2**63


class EpisodeRow(NamedTuple):
    """What the list knows of an episode; where the file has no number it is None, where no text it is empty."""

    offset: int
    """Of the line in the file, in bytes."""
    length: int
    """Of the line with its end, in bytes."""
    phase: str
    step: int
    episode_id: str
    task_id: str
    group_id: str
    seed: int | None
    reward: float | None
    outcome: str
    """solved, not solved, or failed: ended by a failure of the infrastructure."""
    end_reason: str
    start_version: int | None
    staleness: int | None
    """Weight updates between the episode's start and its use in training; None outside training."""
    turns: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    action_tokens: int | None
    duration_s: float | None

    @property
    def key(self) -> tuple[str, int, str]:
        """Names the episode, also after the file was rewritten."""
        return self.phase, self.step, self.episode_id


class EpisodeIndex:
    """The episodes of one file, which may be missing, grow, or be replaced.

    Args:
        path: trajectories.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = FollowedFile(path, self._add, self._clear)
        self.generation = 0
        """Changes when the file was replaced or cut: rows read before are void."""
        self._clear()

    def _clear(self) -> None:
        self.generation += 1
        self.rows: list[EpisodeRow] = []
        """In the order of the file; appended to by :meth:`refresh`, a new list with each generation."""
        self.phases: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.end_reasons: Counter[str] = Counter()
        self.unreadable = 0
        """Lines that are no episode."""

    @property
    def read_share(self) -> float:
        """Of the file's bytes; 1: all of it, but for a line that is being written."""
        return 1.0 if self._file.complete else self._file.read_bytes / max(1, self._file.size)

    def refresh(self, *, budget_s: float = math.inf) -> None:
        """Read what is new, for about so many seconds; from any thread."""
        with self._lock:
            self._file.poll(budget_s=budget_s)

    def _add(self, offset: int, line: bytes) -> None:
        row = _row(offset, line)
        if row is None:
            self.unreadable += 1
            return
        self.rows.append(row)
        self.phases[row.phase] += 1
        self.outcomes[row.outcome] += 1
        self.end_reasons[row.end_reason] += 1

    def find(self, phase: str, step: int, episode_id: str) -> EpisodeRow | None:
        """The row of an episode; None: there is none."""
        key = (phase, step, episode_id)
        return next(
            (row for row in reversed(self.rows) if row.episode_id == episode_id and row.key == key), None
        )

    def read(self, row: EpisodeRow) -> dict[str, Any] | None:
        """The whole line of a row; None where the file no longer has it there."""
        try:
            with open_regular(self._file.path) as descriptor:
                line = os.pread(descriptor, row.length, row.offset)
            value = json.loads(line.decode("utf-8", "replace"))
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and _row(row.offset, line[:-1]) == row else None


def _row(offset: int, line: bytes) -> EpisodeRow | None:
    try:
        head = json.loads(episode_head(line).decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(head, dict) or head.get("phase") not in PHASES:
        return None
    get = head.get
    phase, step, start = head["phase"], _whole(get("step")), _whole(get("start_version"))
    if step is None:
        return None
    if not get("terminated") and not get("truncated"):
        outcome = "failed"
    else:
        outcome = "solved" if get("success") is True else "not solved"
    return EpisodeRow(
        offset=offset,
        length=len(line) + 1,
        phase=sys.intern(phase),
        step=step,
        episode_id=_text(get("episode_id")),
        task_id=_text(get("task_id")),
        group_id=_text(get("group_id")),
        seed=_whole(get("seed")),
        reward=_number(get("reward")),
        outcome=outcome,
        end_reason=sys.intern(_text(get("end_reason"))),
        start_version=start,
        # Step n trains with the weights of version n - 1.
        staleness=step - 1 - start if phase == "train" and start is not None else None,
        turns=_whole(get("turns")),
        prompt_tokens=_whole(get("prompt_tokens")),
        completion_tokens=_whole(get("completion_tokens")),
        action_tokens=_whole(get("action_tokens")),
        duration_s=_number(get("duration_s")),
    )


def _text(value: Any) -> str:
    return value[:MAX_NAME_CHARS] if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int and -_LARGEST < value < _LARGEST else None  # a bool is no number here


def _number(value: Any) -> float | None:
    return value if type(value) in (float, int) and -_LARGEST < value < _LARGEST else None
