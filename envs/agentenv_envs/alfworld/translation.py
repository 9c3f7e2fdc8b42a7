"""Translations of PDDL for the planner's library that the engine runs on: made once per problem, kept, made ahead.

The engine translates a problem four times per game: twice when it loads it and twice when it resets it, each time once
for playing and once for planning. Nobody plans here, so one translation serves all four; and it can be made before it
is needed, by a process of its own.

Invariants:
- what a translation holds is text and numbers (JSON), whoever made it;
- `sys.argv`, `sys.stdout` and the translator's options are after a translation as they were before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentenv.errors import UsageError

logger = logging.getLogger(__name__)

__all__ = [
    "Prefetcher",
    "TranslationCache",
    "TranslationFolder",
    "main",
    "problem_key",
    "translate",
    "untouched_process",
]

_KEPT = 256
"""Translations that a process keeps, 4 to 60 KB each."""


@contextlib.contextmanager
def untouched_process() -> Iterator[None]:
    """Put `sys.argv` and `sys.stdout` back afterwards: translating overwrites both."""
    argv, stdout = sys.argv, sys.stdout
    try:
        yield
    finally:
        sys.argv, sys.stdout = argv, stdout


def problem_key(domain: str, problem: str) -> str:
    """Name of a translation."""
    return hashlib.blake2b(f"{len(domain)}\0{domain}{problem}".encode(), digest_size=16).hexdigest()


def translate(domain: str, problem: str) -> bytes:
    """Translate a problem; 0.1 to 1 s of computing.

    Returns:
        compressed JSON, for `TranslationCache.put`

    Raises:
        Exception: the translator's, of any kind, for text that is no PDDL.
    """
    from fast_downward import interface
    from fast_downward.translate.pddl.conditions import Atom

    with untouched_process():
        task, sas = interface.pddl2sas(domain, problem)
    content = {
        "sas": sas,
        "types": [[type_.name, list(type_.supertype_names)] for type_ in task.types],
        "objects": [[thing.name, thing.type_name] for thing in task.objects],
        "actions": [
            [action.name, [[p.name, p.type_name] for p in action.parameters]] for action in task.actions
        ],
        "init": [[fact.predicate, *fact.args] for fact in task.init if isinstance(fact, Atom)],
    }
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)


def _unpack(packed: bytes) -> tuple[Any, str]:
    """What `pddl2sas` returned: as much of the task as the engine reads, and the translation."""
    from fast_downward.translate.pddl.conditions import Atom

    content = json.loads(zlib.decompress(packed))

    def typed(pairs: list[list[str]]) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, type_name=type_name) for name, type_name in pairs]

    task = SimpleNamespace(
        types=[SimpleNamespace(name=name, supertype_names=above) for name, above in content["types"]],
        objects=typed(content["objects"]),
        actions=[
            SimpleNamespace(name=name, parameters=typed(parameters))
            for name, parameters in content["actions"]
        ],
        init=[Atom(predicate, arguments) for predicate, *arguments in content["init"]],
    )
    return task, content["sas"]


class TranslationCache:
    """Translations by problem, the latest used ones; safe to be filled by another thread."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._latest: tuple[str, tuple[Any, str]] | None = None
        self.lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._packed

    def put(self, key: str, packed: bytes) -> None:
        """Keep a translation."""
        with self.lock:
            self._packed[key] = packed
            self._packed.move_to_end(key)
            while len(self._packed) > self._kept:
                self._packed.popitem(last=False)

    def packed(self, key: str) -> bytes | None:
        """A translation as it is kept; None where it isn't."""
        return self._packed.get(key)

    def pddl2sas(
        self, domain: str, problem: str, verbose: bool = False, optimize: bool = False
    ) -> tuple[Any, str]:
        """In place of `fast_downward.pddl2sas`; the translation for planning is the one for playing."""
        key = problem_key(domain, problem)
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        with self.lock:
            packed = self._packed.get(key)
            if packed is not None:
                self._packed.move_to_end(key)
        if packed is None:
            packed = translate(domain, problem)
            self.put(key, packed)
        self._latest = key, _unpack(packed)
        return self._latest[1]


class TranslationFolder:
    """Translations in files, by content: for all processes and runs that are given the same folder.

    A file that is missing or of another version of the translator is made anew, and so is one that is torn.

    Args:
        folder: is made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = metadata.version("fast-downward-textworld")

    def load(self, key: str, cache: TranslationCache) -> None:
        """Bring a translation into a cache, if the folder has it and the cache doesn't."""
        if key in cache:
            return
        file = self._file(key)
        with contextlib.suppress(OSError):
            packed = file.read_bytes()
            try:
                json.loads(zlib.decompress(packed))
            except (ValueError, zlib.error):
                file.unlink()
            else:
                cache.put(key, packed)

    def save(self, key: str, cache: TranslationCache) -> None:
        """Write a translation of a cache, if the folder doesn't have it.

        Raises:
            UsageError: the folder can't be written.
        """
        file, packed = self._file(key), cache.packed(key)
        if packed is None or file.exists():
            return
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(packed)
            part.replace(file)
        except OSError as error:
            raise UsageError(f"cache_dir {self._folder} can't be written: {error.strerror}") from None

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}-{self._version}.json.z"


class Prefetcher:
    """Fills a cache from a process that translates beside the player.

    Args:
        cache: what it fills.

    The process starts with the first request and ends with `close`, or with the process that began it.
    """

    def __init__(self, cache: TranslationCache) -> None:
        self._cache = cache
        self._wanted: set[str] = set()
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[tuple[str, str, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def request(self, domain: str, problem: str) -> None:
        """Have a problem translated, if it isn't yet; returns at once."""
        key = problem_key(domain, problem)
        with self._changed:
            if not self._is_running():  # never begun, or this is a fork of the process that began it
                self._wanted.clear()
                self._requests = queue.SimpleQueue()
            if key in self._cache or key in self._wanted:
                return
            self._wanted.add(key)
            self._requests.put((key, domain, problem))
            if not self._is_running():
                self._thread = threading.Thread(target=self._run, name="alfworld-prefetch", daemon=True)
                self._thread.start()

    def wait(self, domain: str, problem: str, timeout_s: float) -> bool:
        """Wait for a translation that was requested; not at all for another one.

        Returns:
            False: it was requested and has not come in time.
        """
        key = problem_key(domain, problem)
        with self._changed:
            return self._changed.wait_for(
                lambda: key not in self._wanted or not self._is_running(), timeout_s
            )

    def close(self) -> None:
        """End the process; idempotent."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._wanted.clear()
            self._changed.notify_all()
        if thread is not None:
            self._requests.put(None)
            thread.join()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except (
            OSError
        ) as error:  # no process, or one that has gone: games are translated when they are needed
            logger.warning("prefetching of ALFWorld's games ended: %s", error)
        finally:
            with self._changed:
                self._wanted.clear()
                self._changed.notify_all()

    def _serve(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            while (request := self._requests.get()) is not None:
                key = request[0]
                if key in self._wanted:
                    packed = _ask(process, request)
                    if packed:
                        self._cache.put(key, packed)
                with self._changed:
                    self._wanted.discard(key)
                    self._changed.notify_all()
            process.kill()


def _ask(process: subprocess.Popen[bytes], request: tuple[str, str, str]) -> bytes:
    """A translation; empty where the process has none.

    Raises:
        OSError: the process has gone.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    header = process.stdout.readline()
    if not header:
        raise BrokenPipeError("its process has gone")
    return process.stdout.read(int(header))


def main() -> None:
    """Translate what comes in on stdin: a JSON line for each problem, answered by its length and the translation."""
    os.nice(5)
    answers = sys.stdout.buffer
    for line in sys.stdin.buffer:
        _, domain, problem = json.loads(line)
        try:
            packed = translate(domain, problem)
        except (Exception, SystemExit):  # said where the game is played
            packed = b""
        answers.write(f"{len(packed)}\n".encode() + packed)
        answers.flush()
