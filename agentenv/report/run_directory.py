"""The output directory of a run: what is in it, who may write to it, and how a resumed run goes on with it.

    run.json            settings, versions and what resuming needs (what the user set, the result before training)
    metrics.jsonl       one line a training step
    trajectories.jsonl  episodes as readable text: phase before, train or after
    tokens/             log-probs, advantages and so on for each token of some episodes; see token_records.py
    trace.json          with --trace: what happened when; trace-2.json of the first resumed run, and so on
    summary.json        the result
    report.html         the same for a person
    checkpoints/        what --resume starts from
    model/              the trained policy, as transformers loads it, with its card (README.md, curve.svg)
    critic/             the pretrained critic, where values were pretrained; `critic_model` reads it
    adapter/            its adapters alone, where such were trained

Invariants:
- One process writes at a time (an advisory lock that the kernel drops when its holder dies).
- A directory that holds anything is never written to by a new run; only a run of its own is resumed.
- JSON files are replaced atomically; JSONL files are appended to, and a line torn by a crash is dropped.
- After :meth:`RunDirectory.rewind` to step n no line of a later step is left.
- In a line of trajectories.jsonl `info` and `messages`, which may be long, come last, and nothing before them is
  nested: :func:`episode_head` reads the rest without them.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from agentenv.errors import UsageError
from agentenv.report.text_files import read_json, read_lines, replace_lines, write_json, write_text
from agentenv.report.token_records import EpisodeTokens, TokenWriter, keep_records
from agentenv.trajectory import Trajectory

__all__ = [
    "FORMAT",
    "PHASES",
    "RunDirectory",
    "episode_head",
    "episode_record",
    "is_being_written",
    "read_json",
    "read_lines",
    "write_json",
    "write_text",
]

FORMAT = 1
"""Version of the directory's layout, in run.json."""
PHASES = ("before", "train", "after")


class RunDirectory:
    """An opened output directory: :meth:`create` or :meth:`resume` opens it, :meth:`close` lets go of it."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self._lock = lock
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.trajectories_path = path / "trajectories.jsonl"
        self.summary_path = path / "summary.json"
        self.checkpoints_path = path / "checkpoints"
        self.model_path = path / "model"
        self._tokens: TokenWriter | None = None
        self.record: dict[str, Any] = {}
        """What run.json holds; :meth:`save_record` writes it."""

    @staticmethod
    def check(path: str | Path, *, resume: bool = False) -> Path:
        """Whether a run may start (or go on) in ``path``; writes nothing.

        Raises:
            UsageError: a new run would meet existing files, or there is no run to resume.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise UsageError(f"output directory {path}: is a file")
        if resume:
            if not (path / "run.json").is_file():
                raise UsageError(f"output directory {path}: no run to resume there (run.json is missing)")
        elif path.is_dir() and any(path.iterdir()):
            raise UsageError(
                f"output directory {path}: already in use; choose another, or go on with its run by --resume"
            )
        return path

    @classmethod
    def create(cls, path: str | Path, record: Mapping[str, Any]) -> RunDirectory:
        """Make the directory of a new run.

        Args:
            path: must not exist, or be empty.
            record: JSON-able start of run.json (arguments, versions).

        Raises:
            UsageError: the directory is in use, or cannot be made or written to.
        """
        path = cls.check(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise UsageError(f"output directory {path}: cannot be written to ({error.strerror})") from None
        run = cls(path, lock)
        run.record = {"format": FORMAT, **record}
        run.save_record()
        return run

    @classmethod
    def resume(cls, path: str | Path) -> RunDirectory:
        """Open the directory of an earlier run to go on with it.

        Raises:
            UsageError: there is no run, another process writes to it, or its layout is of another version.
        """
        path = cls.check(path, resume=True)
        run = cls(path, _lock(path))
        try:
            run.record = read_json(path / "run.json")
            if run.record.get("format") != FORMAT:
                found = run.record.get("format")
                raise UsageError(
                    f"output directory {path}: layout version {found!r}, this program reads {FORMAT}"
                )
        except UsageError:
            run.close()
            raise
        return run

    def rewind(self, step: int) -> None:
        """Drop what a crashed run wrote after the checkpoint of ``step``: later steps, results of the end."""
        _filter_lines(self.metrics_path, lambda line: line["step"] <= step)
        self._keep_episodes(
            lambda line: line["phase"] == "before" or (line["phase"] == "train" and line["step"] <= step)
        )
        self.summary_path.unlink(missing_ok=True)

    def drop_phase(self, phase: str) -> None:
        """Drop the episodes of a phase that did not finish and is about to run again."""
        self._keep_episodes(lambda line: line["phase"] != phase)

    def _keep_episodes(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        self._tokens = None
        _filter_lines(self.trajectories_path, keep)
        keep_records(self.path, keep)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a training step; a value that is not finite is written as null."""
        values = {name: _number(value) for name, value in metrics.items()}
        _append(self.metrics_path, [{"step": step, **values}])

    def log_trajectories(self, phase: str, step: int, trajectories: Iterable[Trajectory]) -> None:
        """Append episodes as readable text, without their token ids.

        Args:
            phase: one of :data:`PHASES`.
            step: training steps done when the episode was used (0 before training).
            trajectories: what the policy did.
        """
        if phase not in PHASES:
            raise ValueError(f"phase is {phase!r}, must be one of {', '.join(PHASES)}")
        _append(self.trajectories_path, [episode_record(phase, step, item) for item in trajectories])

    def log_tokens(self, episodes: Iterable[EpisodeTokens], *, max_bytes: float = math.inf) -> bool:
        """Append what was computed for each token of episodes.

        Args:
            episodes: their phase is one of :data:`PHASES`.
            max_bytes: of all records of the run; where they have reached it nothing more is written.

        Returns:
            whether there is room for more.
        """
        self._tokens = self._tokens or TokenWriter(self.path)
        if self._tokens.size_bytes < max_bytes:
            self._tokens.append(episodes)
        return self._tokens.size_bytes < max_bytes

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        write_json(self.summary_path, summary)

    def new_trace_path(self) -> Path:
        """A file for a trace, as no run before had one: each has a clock of its own."""
        return next(path for path in trace_paths(self.path) if not path.exists())

    def save_record(self) -> None:
        """Replace run.json by :attr:`record`."""
        write_json(self.path / "run.json", self.record)

    def close(self) -> None:
        """Release the lock; may be called again."""
        self._lock.close()


def trace_paths(run: Path) -> Iterator[Path]:
    """Where the traces of a run and of those that resumed it are, in their order; without end."""
    yield run / "trace.json"
    yield from (run / f"trace-{number}.json" for number in itertools.count(2))


def episode_record(phase: str, step: int, trajectory: Trajectory) -> dict[str, Any]:
    """A line of trajectories.jsonl: what a person wants to read of an episode."""
    return {
        "phase": phase,
        "step": step,
        "episode_id": trajectory.episode_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "reward": _number(trajectory.reward),
        "success": trajectory.success,
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "end_reason": trajectory.end_reason,
        "start_version": trajectory.start_version,
        "turns": trajectory.turns,
        "prompt_tokens": len(trajectory.prompt_ids),
        "completion_tokens": len(trajectory.completion_ids),
        "action_tokens": trajectory.num_action_tokens,
        "duration_s": round(trajectory.duration_s, 4),
        "info": trajectory.info,
        "messages": trajectory.messages,
    }


def episode_head(line: bytes) -> bytes:
    """A line of trajectories.jsonl as a JSON object without `info` and `messages`; a line of another form as it is.

    What it cuts at can't stand inside a string, where a quotation mark has a backslash before it.
    """
    end = line.find(b', "info": ')
    return line[:end] + b"}" if end >= 0 else line


def is_being_written(path: Path) -> bool:
    """Whether a process holds the lock of a run directory, as far as can be seen from here.

    Linux lists locks; to try the lock, as is done elsewhere, could be in the way of a run that starts at that moment.
    """
    try:
        found = (path / ".lock").stat()
        if not stat.S_ISREG(found.st_mode):
            return False
        try:
            locks = Path("/proc/locks").read_text()
        except OSError:
            with (path / ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True
    place = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
    return any(" FLOCK " in line and place in line for line in locks.splitlines())


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    # Lone surrogates have no UTF-8 form; json's default keeps them as escapes.
    text = "".join(json.dumps(record, default=str) + "\n" for record in records)
    with path.open("a", encoding="utf-8") as out:
        out.write(text)


def _filter_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    if path.exists():
        replace_lines(path, (json.dumps(line) + "\n" for line in read_lines(path) if keep(line)))


def _number(value: Any) -> float | int | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(value) if isinstance(value, int) else round(number, 6)


def _lock(path: Path) -> IO[str]:
    lock = (path / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UsageError(f"output directory {path}: another process is writing to it") from None
    return lock
