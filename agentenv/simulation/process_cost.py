"""What a stretch of work costs its process: Python's collector and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Collector:
    """CPU seconds of Python's collector; fits ``gc.callbacks``."""

    def __init__(self) -> None:
        self.total_s = self.longest_s = 0.0
        self._began = 0.0

    def __call__(self, phase: str, _: object) -> None:
        now = time.thread_time()
        if phase == "start":
            self._began = now
        else:
            self.total_s += now - self._began
            self.longest_s = max(self.longest_s, now - self._began)


@contextmanager
def collecting(*, on: bool) -> Iterator[Collector]:
    """Watch Python's collector, or switch it off meanwhile."""
    collector, was_on = Collector(), gc.isenabled()
    if not on:
        gc.disable()
    gc.callbacks.append(collector)
    try:
        yield collector
    finally:
        gc.callbacks.remove(collector)
        if was_on:
            gc.enable()


def peak_mb() -> float:
    """Most resident memory of this process so far, in MB (10^6 bytes); NaN where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return float("nan")
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return peak_kb * 1024 / 1e6
