"""What a viewer says of a run as a whole: its state and its curves.

Invariants:
- The directory may be of a running or a crashed run, of another version, or made by somebody who means harm: what
  can't be read is named and left out, and nothing blocks or grows with it.
- Every text is to be shown as text, with nothing hidden in it (`revealed`).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentenv.report.charts import standalone
from agentenv.report.page import UNISOLATED_WARNING
from agentenv.report.run_directory import FORMAT, is_being_written
from agentenv.report.text_files import open_regular
from agentenv.report.training_curves import CURVES, thinned
from agentenv.report.transcripts import cut, revealed
from agentenv.viewer.followed_file import FollowedFile

__all__ = ["RunFiles"]

MAX_JSON_BYTES: Final = 16 << 20
"""Of run.json and summary.json."""
MAX_STEPS: Final = 100_000
"""Of metrics; what follows is left out."""
CHART_POINTS: Final = 400
"""Most points of a curve; more are replaced by means."""
RECENT_S: Final = 60.0
"""A run that wrote something so lately counts as running where its lock can't be seen."""
_CHART_NAMES: Final = frozenset(name for chart in CURVES for name in chart.names)


class RunFiles:
    """The files of a run directory other than its episodes.

    Args:
        path: of the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._metrics: list[dict[str, float | None]] = []
        self._file = FollowedFile(path / "metrics.jsonl", self._add, self._restart)

    def _restart(self) -> None:
        self._metrics = []

    def _add(self, offset: int, line: bytes) -> None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if (
            not isinstance(value, dict)
            or _finite(value.get("step")) is None
            or len(self._metrics) >= MAX_STEPS
        ):
            return
        names = _CHART_NAMES.intersection(value)
        self._metrics.append({name: _finite(value[name]) for name in ("step", *sorted(names))})

    def metrics(self) -> Sequence[Mapping[str, float | None]]:
        """The lines of metrics.jsonl so far, as far as a chart draws them."""
        with self._lock:
            self._file.poll()
            return self._metrics

    def state(self) -> dict[str, Any]:
        """Name, state, progress, warnings and charts of the run, for JSON."""
        record, summary = self._object("run.json"), self._object("summary.json")
        metrics = self.metrics()
        settings = record.get("settings")
        written = max(
            (_modified(self._path / name) for name in ("metrics.jsonl", "trajectories.jsonl")), default=0.0
        )
        age_s = max(0.0, time.time() - written) if written else None
        shown = {
            "name": _text(record.get("name")) or self._path.resolve().name,
            "path": str(self._path),
            "started": _text(record.get("started")),
            "state": self._state(summary, age_s),
            "sandbox": _text(summary.get("sandbox")) or _text(record.get("sandbox")),
        }
        drawn = {name for line in metrics for name in line}
        return {
            **{name: revealed(cut(text, max_chars=500)) for name, text in shown.items()},
            "step": metrics[-1]["step"] if metrics else None,
            "max_steps": _finite(settings.get("max_steps")) if isinstance(settings, dict) else None,
            "written_s_ago": None if age_s is None else round(age_s),
            "warnings": [revealed(cut(text, max_chars=2000)) for text in self._warnings(record, summary)],
            "charts": [
                {"number": number, "title": chart.title, "text": chart.text}
                for number, chart in enumerate(CURVES)
                if drawn.intersection(chart.names)
            ],
        }

    def _state(self, summary: Mapping[str, Any], age_s: float | None) -> str:
        if status := _text(summary.get("status")):
            return status
        if is_being_written(self._path) or (age_s is not None and age_s < RECENT_S):
            return "running"
        return "stopped"

    def _warnings(self, record: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
        warnings = []
        if record.get("unreadable"):
            warnings.append(f"run.json: {record['unreadable']}")
        elif record.get("format") != FORMAT:
            found = _finite(record.get("format"))
            warnings.append(
                f"run.json: layout version {found}; this program reads {FORMAT} and shows what it can."
            )
        if summary.get("unreadable") and (self._path / "summary.json").exists():
            warnings.append(f"summary.json: {summary['unreadable']}")
        if error := _text(summary.get("error")):
            warnings.append(f"The run failed: {error}")
        if "local-unisolated" in (summary.get("sandbox"), record.get("sandbox")):
            warnings.append(UNISOLATED_WARNING)
        return warnings

    def chart(self, number: int) -> str | None:
        """A chart as an SVG file; None: there is none of this number, or nothing to draw."""
        if not 0 <= number < len(CURVES):
            return None
        svg = CURVES[number].svg(thinned(self.metrics(), CHART_POINTS))
        return standalone(svg) if svg else None

    def _object(self, name: str) -> dict[str, Any]:
        try:
            with open_regular(self._path / name) as descriptor:
                size = os.fstat(descriptor).st_size
                if size > MAX_JSON_BYTES:
                    return {"unreadable": f"is over {MAX_JSON_BYTES} bytes"}
                value = json.loads(os.read(descriptor, size))
        except FileNotFoundError:
            return {"unreadable": "there is no such file"}
        except (ValueError, RecursionError):
            return {"unreadable": "not valid JSON"}
        return value if isinstance(value, dict) else {"unreadable": "not a JSON object"}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _finite(value: Any) -> float | None:
    if type(value) not in (int, float) or not abs(value) < 1e15:  # a bool is no number here
        return None
    return value if math.isfinite(value) else None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
