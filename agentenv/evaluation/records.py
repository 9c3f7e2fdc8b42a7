"""What an evaluation keeps of each episode, in a file that a killed run goes on from.

The file has a first line with the settings and then one line an episode, in the order in which they ended.

Invariants:

* A line is there in full or not at all: what a killed run left of its last line is cut off.
* A file with episodes is gone on from only with the settings that it was begun with.
* Two processes never write to the same file.
* A report is made of these lines alone, in the order of their indices: it does not depend on interruptions.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from agentenv.errors import UsageError
from agentenv.trajectory import Trajectory

__all__ = ["EpisodeLog", "EpisodeRecord"]

_INVALID = ("invalid_actions", "malformed_actions")


@dataclass
class EpisodeRecord:
    """One episode."""

    index: int
    """Position in the list of tasks."""
    seed: int
    """Of the task."""
    task_id: str
    family: str
    success: bool
    reward: float
    steps: int
    end_reason: str
    failed: bool
    """Infrastructure ended it: neither success nor failure of the policy."""
    error: str = ""
    """Of a failed one."""
    invalid_actions: int | None = None
    """None: the environment does not count them."""
    prompt_tokens: int | None = None
    """Summed over the turns, as a server bills them; None: unknown, or no model."""
    completion_tokens: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's, as it reported them with the last step."""
    seconds: float = 0.0
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, index: int, trajectory: Trajectory) -> EpisodeRecord:
        """From what the rollout gives."""
        info = trajectory.info
        metrics = info.get("metrics") if isinstance(info.get("metrics"), Mapping) else {}
        numbers = {
            str(name): float(value)
            for name, value in (metrics or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        invalid = next((numbers[name] for name in _INVALID if name in numbers), None)
        if invalid is None:  # an episode that the rollout cut off has no last word of the environment
            invalid = next((info[name] for name in _INVALID if isinstance(info.get(name), int | float)), None)
        return cls(
            index=index,
            seed=trajectory.seed,
            task_id=trajectory.task_id,
            family=str(info.get("family") or "other"),
            success=trajectory.success and not trajectory.failed,
            reward=trajectory.reward,
            steps=trajectory.turns,
            end_reason=trajectory.end_reason,
            failed=trajectory.failed,
            error=str(info.get("error", "")) if trajectory.failed else "",
            invalid_actions=None if invalid is None else int(invalid),
            metrics={name: value for name, value in numbers.items() if name not in _INVALID},
            seconds=round(trajectory.duration_s, 3),
            messages=[dict(message) for message in trajectory.messages],
        )

    @classmethod
    def read(cls, line: Mapping[str, Any], episodes: int | None) -> EpisodeRecord:
        """From a line of the file, without the messages.

        Args:
            line: that `asdict` made.
            episodes: that the evaluation has; None: unknown.

        Raises:
            TypeError: it lacks something, or something is of another type.
            ValueError: it is none of these episodes.
        """
        known = {item.name for item in fields(cls)} - {"messages"}
        record = cls(**{name: value for name, value in line.items() if name in known})
        for name, kind in get_type_hints(cls).items():
            value = getattr(record, name)
            kind = {float: float | int, dict[str, float]: dict, list[dict[str, str]]: list}.get(kind, kind)
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {value!r}")
        if not 0 <= record.index < (math.inf if episodes is None else episodes):
            raise ValueError(f"index is {record.index}")
        if not all(isinstance(value, int | float) for value in record.metrics.values()):
            raise TypeError(f"metrics are {record.metrics!r}")
        return record


class EpisodeLog:
    """The file of an evaluation; a context manager.

    Args:
        path: of the file; None: nothing is kept.
        settings: JSON-able, by the name of their option.
        overwrite: begin anew, whatever is there.

    Raises:
        UsageError: the file was begun with other settings, is in use, is damaged or cannot be written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self._path = path
        self._settings = dict(settings)
        self._file: io.FileIO | None = None
        self.records: dict[int, EpisodeRecord] = {}
        """By index, without their messages, which only the file has; those that failed are not among them after a
        start, so that they are played again."""
        if path is not None:
            self._open(path, overwrite)

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, record: EpisodeRecord) -> None:
        """Keep an episode; its messages leave the memory.

        Raises:
            UsageError: the file can't be written any more; the episodes before are kept.
        """
        self._write(asdict(record))
        record.messages = []
        self.records[record.index] = record

    def close(self) -> None:
        """Give the file free."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, path: Path, overwrite: bool) -> None:
        try:
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise UsageError(f"--json: {path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UsageError(f"{path} is in use by another evaluation") from None
        try:
            self._read(path, overwrite)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path, overwrite: bool) -> None:
        assert self._file is not None
        data = b"" if overwrite else path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(self._file.fileno(), len(whole))
        # Not splitlines: texts hold other separators, which JSON leaves as they are.
        lines = whole.decode("utf-8", "replace").split("\n")[:-1]
        if not lines:
            self._begin()
            return
        number = 1
        try:
            begun_with = dict(json.loads(lines[0])["settings"])
            for line in lines[1:]:
                number += 1
                record = EpisodeRecord.read(json.loads(line), begun_with.get("episodes"))
                if record.failed:
                    self.records.pop(record.index, None)
                else:
                    self.records[record.index] = record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: not a line of an evaluation ({error!r})") from error
        if number == 1:  # a command that failed before its first episode binds nobody
            os.ftruncate(self._file.fileno(), 0)
            self._begin()
            return
        self._check(path, begun_with)

    def _begin(self) -> None:
        self._write({"settings": self._settings})

    def _write(self, content: Mapping[str, Any]) -> None:
        """Write a line, in full or not at all."""
        if self._file is None:
            return
        # What has no UTF-8 form, such as an odd byte of a file's name in an error, becomes JSON's own escape.
        left = f"{json.dumps(content, ensure_ascii=False)}\n".encode(errors="backslashreplace")
        try:
            size = os.fstat(self._file.fileno()).st_size
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                os.ftruncate(self._file.fileno(), size)
                raise
        except OSError as error:
            raise UsageError(f"--json: {self._path} cannot be written: {error.strerror}") from error

    def _check(self, path: Path, begun_with: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self._settings))
        changed = [
            f"{name} was {begun_with.get(name)!r} and is now {now.get(name)!r}"
            for name in dict.fromkeys([*begun_with, *now])
            if begun_with.get(name) != now.get(name)
        ]
        if changed:
            raise UsageError(
                f"{path} was begun with other settings: {'; '.join(changed)}. Repeat the command as it was, name "
                "another file, or begin anew with --overwrite"
            )
