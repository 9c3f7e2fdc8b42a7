"""What training computed for each token of some episodes, kept beside trajectories.jsonl for a person to look at.

    tokens/records.bin    the records, one after the other: each the compressed columns of one episode
    tokens/index.jsonl    where each lies: {"phase", "step", "episode_id", "offset", "bytes", "crc"}

A file of its own, since a line of JSON takes six times the room of the columns, and read without torch or a tokenizer:
the text of each token is decoded when it is written. ``model/`` has the run's tokenizer only once the run is over.

Invariants:
- An episode is in the index only after its record is in the file: what a crash left of a record, or of a line of the
  index, is not seen by readers and is cut off by the next writer.
- One writer at a time (the run directory's lock); readers need no lock, also while the run is being written.
- One episode is found without reading the records of others.
- An episode id that comes twice is that of the later record.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from agentenv.errors import UsageError
from agentenv.report.text_files import open_regular, replace_lines

FOLDER = "tokens"
"""Of the records, in the run directory."""
_MAGIC = b"agentenv tokens 1\n"
"""First bytes of records.bin, with the version of its layout."""
_SIZES = struct.Struct("<II")
"""Before each segment: its tokens, and the bytes of its text."""
_COLUMNS = (
    ("token_ids", "<i4"),
    ("action_mask", "<i1"),
    ("policy_versions", "<i4"),
    ("kept", "<i1"),
    ("rollout_logprobs", "<f4"),
    ("policy_logprobs", "<f4"),
    ("values", "<f4"),
    ("advantages", "<f4"),
)
_MOST_BYTES = 256 << 20
"""Of the index, and of a record before and after decompression, that are read: nothing of ours is as large."""
_COMPRESSION = 1
"""zlib's fastest: what is left after it are the mantissas of the numbers, which no level makes smaller."""


@dataclass(frozen=True)
class SegmentTokens:
    """One unbroken token sequence of an episode; equally long lists over its prompt and completion.

    Numbers are None where there is none: on tokens that the policy did not sample, and where training computed none.
    One that is not finite is None too; its token has ``kept`` False.
    """

    token_ids: Sequence[int]
    texts: Sequence[str]
    """What each token adds to the text. A character of several tokens stands at the last of them."""
    action_mask: Sequence[bool]
    """The policy sampled the token."""
    policy_versions: Sequence[int]
    """Version of the weights that sampled it; -1 where none did."""
    rollout_logprobs: Sequence[float | None]
    """Natural log-prob that the engine reported."""
    policy_logprobs: Sequence[float | None]
    """That under the weights being trained, before the step."""
    values: Sequence[float | None]
    """The critic's estimate, in units of reward, that the advantages were computed from."""
    advantages: Sequence[float | None]
    """As they entered the loss."""
    kept: Sequence[bool | None]
    """False: the objective's mask or clip left the token without gradient. None: it was not trained."""

    @property
    def ratios(self) -> list[float | None]:
        """exp(policy log-prob - rollout log-prob), of each token that has both."""
        return [
            None if policy is None or rollout is None else _exp(policy - rollout)
            for policy, rollout in zip(self.policy_logprobs, self.rollout_logprobs, strict=True)
        ]


@dataclass(frozen=True)
class EpisodeTokens:
    """The tokens of an episode, in segments: several where a chat template rewrote history, oldest first."""

    episode_id: str
    step: int
    """Training step that the episode was used in, from 1; of an evaluation, steps done before it."""
    segments: Sequence[SegmentTokens]
    phase: str = "train"
    """As in trajectories.jsonl."""


def read_tokens(run: str | Path, episode_id: str) -> EpisodeTokens | None:
    """What was recorded of an episode; None where nothing was.

    Args:
        run: directory of the run, which may be being written.
        episode_id: as in trajectories.jsonl.

    Raises:
        UsageError: the records are of another layout, or damaged.
    """
    folder = Path(run) / FOLDER
    try:
        with open_regular(folder / "index.jsonl") as descriptor:
            size = os.fstat(descriptor).st_size
            if size > _MOST_BYTES:
                raise UsageError(f"{folder}/index.jsonl: is over {_MOST_BYTES} bytes")
            index = os.read(descriptor, size)
    except FileNotFoundError:
        return None
    wanted = f'"episode_id": {json.dumps(episode_id)}, '.encode()
    end = index.rfind(b"\n") + 1
    while (place := index.rfind(wanted, 0, end)) >= 0:
        start = index.rfind(b"\n", 0, place) + 1
        entry = _entry(index[start : index.index(b"\n", place)])
        if entry is not None and entry["episode_id"] == episode_id:
            with (
                open_regular(folder / "records.bin") as descriptor,
                open(descriptor, "rb", closefd=False) as records,
            ):
                _check_magic(records, folder)
                return _read(records, entry)
        end = start
    return None


def recorded_episodes(run: str | Path) -> Iterator[Mapping[str, Any]]:
    """The lines of the index, in the order of writing; none where nothing was recorded."""
    try:
        lines = (Path(run) / FOLDER / "index.jsonl").read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        entry = _entry(line) if line.endswith(b"\n") else None
        if entry is not None:
            yield entry


class TokenWriter:
    """Appends records to those of a run directory.

    Args:
        run: directory of the run; the caller holds its lock.

    Raises:
        UsageError: the records there are of another layout.
    """

    def __init__(self, run: str | Path) -> None:
        self._folder = Path(run) / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._records_path, self._index_path = self._folder / "records.bin", self._folder / "index.jsonl"
        self._size = keep_records(run, lambda entry: True)
        if not self._size:
            self._records_path.write_bytes(_MAGIC)
            self._size = len(_MAGIC)

    @property
    def size_bytes(self) -> int:
        """Of all records so far."""
        return self._size

    def append(self, episodes: Iterable[EpisodeTokens]) -> None:
        """Write the records of episodes.

        Raises:
            ValueError: the lists of a segment differ in length.
        """
        bodies, lines = [], []
        offset = self._size
        for episode in episodes:
            body = _encode(episode)
            entry = {
                "phase": episode.phase,
                "step": episode.step,
                "episode_id": episode.episode_id,
                "offset": offset,
                "bytes": len(body),
                "crc": zlib.crc32(body),
            }
            bodies.append(body)
            lines.append(json.dumps(entry) + "\n")
            offset += len(body)
        # Its end is known better than the file's: a write that failed half-way (a full disk) is written over.
        with self._records_path.open("r+b") as records:
            records.seek(self._size)
            records.write(b"".join(bodies))
            records.truncate()
        with self._index_path.open("a", encoding="ascii") as index:
            index.write("".join(lines))
        self._size = offset


def keep_records(run: str | Path, keep: Callable[[Mapping[str, Any]], bool]) -> int:
    """Drop the records whose line of the index is not to be kept, and what a crash left half-written.

    Args:
        run: directory of the run; the caller holds its lock.
        keep: of a line of the index, with ``phase`` and ``step``.

    Returns:
        the size of what is left, in bytes; 0 where nothing was ever recorded.

    Raises:
        UsageError: the records are of another layout.
    """
    folder = Path(run) / FOLDER
    records_path, index_path = folder / "records.bin", folder / "index.jsonl"
    size = records_path.stat().st_size if records_path.exists() else 0
    if size < len(_MAGIC):
        index_path.unlink(missing_ok=True)
        return 0
    with records_path.open("rb") as records:
        _check_magic(records, folder)
    kept = [
        entry for entry in recorded_episodes(run) if entry["offset"] + entry["bytes"] <= size and keep(entry)
    ]
    # The index first: a crash between the two leaves bytes that nothing points to.
    replace_lines(index_path, (json.dumps(entry) + "\n" for entry in kept))
    end = max((entry["offset"] + entry["bytes"] for entry in kept), default=len(_MAGIC))
    os.truncate(records_path, end)
    return int(end)


def _encode(episode: EpisodeTokens) -> bytes:
    parts = []
    for segment in episode.segments:
        count = len(segment.token_ids)
        texts = [text.encode("utf-8", "surrogatepass") for text in segment.texts]
        columns: dict[str, Sequence[Any]] = {name: getattr(segment, name) for name, _ in _COLUMNS}
        columns["kept"] = [-1 if kept is None else int(kept) for kept in segment.kept]
        lengths = {"texts": len(texts)} | {name: len(column) for name, column in columns.items()}
        if set(lengths.values()) != {count}:
            raise ValueError(f"tokens of episode {episode.episode_id!r}: lengths differ: {lengths}")
        text = b"".join(texts)
        parts.append(_SIZES.pack(count, len(text)))
        # numpy makes NaN of None.
        parts += [np.array(columns[name], dtype=kind).tobytes() for name, kind in _COLUMNS]
        parts += [np.array([len(piece) for piece in texts], dtype="<u4").tobytes(), text]
    return zlib.compress(b"".join(parts), _COMPRESSION)


def _read(records: IO[bytes], entry: Mapping[str, Any]) -> EpisodeTokens:
    records.seek(entry["offset"])
    body = records.read(min(entry["bytes"], _MOST_BYTES))
    decompressor = zlib.decompressobj()
    is_whole = len(body) == entry["bytes"] and zlib.crc32(body) == entry["crc"]
    data = memoryview(decompressor.decompress(body, _MOST_BYTES) if is_whole else b"")
    if not is_whole or decompressor.unconsumed_tail:
        raise UsageError(
            f"{FOLDER}/records.bin: the record of episode {entry['episode_id']!r} is damaged; others may be whole"
        )
    segments = []
    while data:
        count, text_bytes = _SIZES.unpack_from(data)
        data = data[_SIZES.size :]
        columns: dict[str, Any] = {}
        for name, kind in (*_COLUMNS, ("lengths", "<u4")):
            column = np.frombuffer(data, dtype=kind, count=count)
            data = data[column.nbytes :]
            columns[name] = [_number(x) for x in column.tolist()] if kind == "<f4" else column.tolist()
        columns["action_mask"] = [bool(x) for x in columns["action_mask"]]
        columns["kept"] = [None if x < 0 else bool(x) for x in columns["kept"]]
        columns["texts"] = _split(bytes(data[:text_bytes]), columns.pop("lengths"))
        data = data[text_bytes:]
        segments.append(SegmentTokens(**columns))
    return EpisodeTokens(entry["episode_id"], entry["step"], segments, entry["phase"])


def _split(text: bytes, lengths: Sequence[int]) -> list[str]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [
        text[end - length : end].decode("utf-8", "surrogatepass")
        for end, length in zip(ends, lengths, strict=True)
    ]


def _entry(line: bytes) -> Mapping[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _check_magic(records: IO[bytes], folder: Path) -> None:
    if records.read(len(_MAGIC)) != _MAGIC:
        raise UsageError(
            f"{folder}: records of another version, this program reads {_MAGIC.decode().strip()!r}"
        )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _exp(value: float) -> float | None:
    try:
        return math.exp(value)
    except OverflowError:
        return None
