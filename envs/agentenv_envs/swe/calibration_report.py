"""What a calibration leaves: the report, the list of rows to keep, and a table of reasons.

Invariants:
- A file appears whole or not at all.
- A reason belongs to exactly one class; the table's counts add up to the number of rows.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from agentenv.errors import UsageError

from .calibrate import Calibration

__all__ = ["read_keep_list", "reason_class", "reason_table", "write_keep_list", "write_report"]

CALIBRATES = "calibrates"
_EXAMPLE_CHARS = 90

# The first that is found in a reason decides; `grading` and `log_grading` write what they match.
_CLASSES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^the row is refused: ", "the row is refused"),
        (r"^not deterministic", "not deterministic"),
        (r"^the tests pass without the fix", "the tests pass without the fix"),
        (r" is invalid: .*test_patch does not apply", "test_patch does not apply"),
        (r" is invalid: .*(no pytest|are not pytest's)", "the tests can't be run"),
        (r" is invalid: .*(can't be pulled|no such image)", "the image is not there"),
        (r" is invalid: .*pip \w+ for ", "the package can't be fetched"),
        (r" is invalid: .*building the image ", "the image can't be built"),
        (r" is invalid: ", "the sandbox failed"),
        (r": the patch does not apply", "the gold patch does not apply"),
        (r": the tests took over", "the tests take too long"),
        (r": (the log names no test|the run left no results)", "the tests leave no results"),
        (r", (expected [A-Za-z]+|not expected)$", "outcomes are not those of the row"),
        (r": (FAIL|PASS)_TO_PASS .*: missing$", "an expected test does not run"),
        (r": FAIL_TO_PASS ", "a FAIL_TO_PASS test fails with the fix"),
        (r": PASS_TO_PASS ", "a PASS_TO_PASS test fails with the fix"),
        (r"^the gold patch is failed: ", "the test run is not sound"),
    )
)
_OTHER = "the row can't be built as it is"


def reason_class(result: Calibration) -> str:
    """The kind of reason, in few words that are the same for all rows with it."""
    if result.calibrates:
        return CALIBRATES
    for pattern, name in _CLASSES:
        if pattern.search(result.reason):
            return name
    return _OTHER


def reason_table(results: Sequence[Calibration]) -> str:
    """A table of classes, the most frequent first: rows, share, and one example with its reason."""
    classes: dict[str, list[Calibration]] = {}
    for result in results:
        classes.setdefault(reason_class(result), []).append(result)
    width = max((len(name) for name in classes), default=0)
    lines = [f" rows  share  {'class':<{width}}  for example"]
    for name, found in sorted(classes.items(), key=lambda item: (-len(item[1]), item[0])):
        example = " ".join(f"{found[0].instance_id}: {found[0].reason}".rstrip(": ").split())
        if len(example) > _EXAMPLE_CHARS:
            example = example[: _EXAMPLE_CHARS - 3] + "..."
        lines.append(f"{len(found):5}  {len(found) / len(results):5.0%}  {name:<{width}}  {example}")
    return "\n".join(lines) + "\n"


def write_report(path: Path, results: Iterable[Calibration]) -> None:
    """Write results as a JSON list of {"instance_id", "gold", "noop", "reason"}; the file is replaced at
    once.

    Raises:
        UsageError: the file can't be written.
    """
    _write(path, json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False) + "\n")


def write_keep_list(path: Path, results: Iterable[Calibration]) -> None:
    """Write the ids of rows that calibrate, one a line in the order of the rows; the file is replaced at once.

    Raises:
        UsageError: the file can't be written.
    """
    _write(path, "".join(f"{result.instance_id}\n" for result in results if result.calibrates))


def read_keep_list(path: Path) -> frozenset[str]:
    """The ids of a keep list; at least one.

    Raises:
        UsageError: the file can't be read, or holds no id.
    """
    try:
        ids = frozenset(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read as a list of ids: {error}") from None
    if not ids:
        raise UsageError(f"{path}: names no row; a list of ids is needed, one a line")
    return ids


def _write(path: Path, text: str) -> None:
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"{path}: can't be written: {error.strerror or error}") from None
