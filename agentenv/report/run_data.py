"""What the report needs of a run directory, read in one pass and bounded memory.

Invariants:
- The directory may be being written, be cut short, or come from an older or a newer version: what is there is read, and
  what is not understood is said in :attr:`RunData.notes`; only a directory without run.json is refused.
- Memory follows the number of steps and of evaluation episodes, not that of training episodes: a run of 100,000 is
  streamed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.report.run_directory import FORMAT, PHASES, is_being_written
from agentenv.report.text_files import read_json
from agentenv.report.transcripts import choose_pairs

_MOST_KINDS = 1000
"""Kinds of ends that are told apart: an environment may write what it likes there."""


@dataclass
class Failure:
    """Episodes that failed for one reason."""

    phases: Counter[str] = field(default_factory=Counter)
    example: str = ""
    """What the first one that said something said."""


@dataclass
class RunData:
    """A run, as far as it is known."""

    record: Mapping[str, Any]
    """run.json."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """summary.json; empty while the run is not over."""
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl that have a step."""
    ends: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    """Per phase: how many episodes had an outcome ("solved", "not solved", "failed") and an end reason."""
    failures: dict[str, Failure] = field(default_factory=dict)
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=list)
    """Episodes of the same task before and after training."""
    lone: list[Mapping[str, Any]] = field(default_factory=list)
    """Without pairs: the first ones before training, or else of training."""
    is_live: bool = False
    """A process holds the directory's lock."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""

    @property
    def status(self) -> str:
        """finished, interrupted, failed, running, or stopped: it ended without a word."""
        known = self.summary.get("status")
        return str(known) if known else "running" if self.is_live else "stopped"

    def result(self, phase: str) -> Mapping[str, Any] | None:
        """The evaluation of a phase, where it is known."""
        found = self.summary.get(phase) or self.record.get(phase)
        return found if isinstance(found, Mapping) and found.get("success") is not None else None


def read_run(run: str | Path) -> RunData:
    """Read a run directory.

    Raises:
        UsageError: there is no run.json, or it is no JSON object.
    """
    path = Path(run)
    data = RunData(read_json(path / "run.json"), is_live=is_being_written(path))
    layout = data.record.get("format")
    if layout != FORMAT:
        data.notes.append(
            f"run.json has layout version {layout!r}, this program writes {FORMAT}: "
            "what it does not understand is left out."
        )
    if (path / "summary.json").exists():
        data.summary = read_json(path / "summary.json")
    data.metrics = [
        line for _, line in _scan(path / "metrics.jsonl", data.notes) if isinstance(line.get("step"), int)
    ]
    _read_episodes(path / "trajectories.jsonl", data)
    return data


def outcome(line: Mapping[str, Any]) -> str:
    """solved, not solved or failed."""
    info = line.get("info")
    if isinstance(info, Mapping) and "failure" in info:
        return "failed"
    return "solved" if line.get("success") else "not solved"


def _read_episodes(path: Path, data: RunData) -> None:
    found: dict[str, list[dict[str, Any]]] = {phase: [] for phase in PHASES}
    for offset, line in _scan(path, data.notes):
        phase = str(line.get("phase"))
        if phase not in found:
            continue
        kind = outcome(line)
        reason = str(line.get("end_reason") or "unknown")
        counts = data.ends.setdefault(phase, Counter())
        counts[(kind, reason) if len(counts) < _MOST_KINDS else (kind, "other")] += 1
        if kind == "failed":
            _add_failure(data.failures, phase, line)
        # The texts stay in the file; of training the first episodes are enough.
        if phase != "train" or len(found[phase]) < 2:
            place = {name: line.get(name) for name in ("seed", "task_id", "success")}
            found[phase].append({**place, "offset": offset})
    if not path.exists():
        return
    with path.open("rb") as lines:

        def whole(place: Mapping[str, Any]) -> Mapping[str, Any]:
            lines.seek(place["offset"])
            episode: Mapping[str, Any] = json.loads(lines.readline())
            return episode

        pairs = choose_pairs(found["before"], found["after"])
        data.pairs = [(whole(before), whole(after)) for before, after in pairs]
        if not pairs:
            data.lone = [whole(place) for place in (found["before"] or found["train"])[:2]]


def _add_failure(failures: dict[str, Failure], phase: str, line: Mapping[str, Any]) -> None:
    reason = str(line["info"]["failure"])
    if reason not in failures and len(failures) >= _MOST_KINDS:
        reason = "other"
    failure = failures.setdefault(reason, Failure())
    failure.phases[phase] += 1
    failure.example = failure.example or str(line["info"].get("error") or "")


def _scan(path: Path, notes: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSONL file with their offsets; of others how many there are is noted.

    A last line without its end is one being written: it is left out without a word.
    """
    if not path.exists():
        return
    broken, offset = 0, 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield offset, value
            else:
                broken += line.endswith(b"\n")
            offset += len(line)
    if broken:
        noun, was = ("line", "was") if broken == 1 else ("lines", "were")
        notes.append(f"{broken} {noun} of {path.name} could not be read and {was} left out.")
