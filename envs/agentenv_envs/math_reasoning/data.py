r"""Rows of mathematics data sets: read from a file or from the hub, and brought to one record.

Which data sets there are, and what is read of their rows: `SCHEMAS`, and the table in docs/environments-math.md.

Invariants:
- the first schema whose fields a row has is its own; a row of none is one error that names the file, the row, the
  fields that it has, and those that are needed;
- a row's problem is left as it is, but for the words of DAPO's prompt that ask for another form of answer;
- a problem that is there already is left out, and the log says how many were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from agentenv.errors import UsageError
from agentenv_envs.rows import read_rows

from .boxed import last_boxed
from .grading import MAX_ANSWER_CHARS
from .task import MathTask

__all__ = ["SCHEMAS", "RefusedRow", "Schema", "load_tasks"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schema:
    """Which fields hold what; `a.b` is field b of the object in field a."""

    name: str
    problem: str
    answer: str
    form: str = "plain"
    """What the answer's field holds: "plain" the answer, "boxed" a solution with the answer in its last box, "hashes" a
    solution with the answer behind `####`."""
    id: tuple[str, ...] = ("unique_id", "id", "ID", "extra_info.index")
    """Fields that may hold a name of the problem; the first that is there counts."""
    family: tuple[str, ...] = ("subject", "type", "topic", "data_source")
    level: tuple[str, ...] = ("level",)


#: In the order in which they are tried.
SCHEMAS: Final = (
    Schema("DAPO-Math", "prompt", "reward_model.ground_truth"),
    Schema("MATH-500, AIME", "problem", "answer"),
    Schema("MATH", "problem", "solution", "boxed"),
    Schema("AIME_2024", "Problem", "Answer"),
    Schema("GSM8K", "question", "answer", "hashes"),
    Schema("AIME2025", "question", "answer"),
    Schema("DeepMath", "question", "final_answer"),
)
_DAPO_HEAD = re.compile(r"\s*Solve the following math problem step by step\.[^\n]{0,300}\n\s*")
_DAPO_TAIL = re.compile(r'\s*Remember to put your answer on its own line after "Answer:"\.?\s*$')
_LEVEL = re.compile(r"(?:Level )?([0-9]{1,3})")
_HASHES: Final = "####"
_SHOWN_CHARS = 80
_MISSING: Final = object()


@dataclass(frozen=True)
class RefusedRow:
    """A row that can't be a task."""

    row: str
    """Its place in the file."""
    reason: str


class _RowError(Exception):
    """What is wrong with a row, without its place."""


def load_tasks(
    source: str | Path,
    split: str | None = None,
    *,
    config: str | None = None,
    fields: Mapping[str, str] | None = None,
    refused: list[RefusedRow] | None = None,
) -> list[MathTask]:
    """Read the problems of a file or of a hub data set.

    Args:
        source: path of a .jsonl, .json (an array of rows) or .parquet file, or a hub name "owner/name".
        split: see `rows.read_rows`.
        config: configuration of a hub data set that has several.
        fields: {"problem": FIELD, "answer": FIELD}, and "id", "family", "level" where there are such, instead of
            `SCHEMAS`; `a.b` is field b of the object in field a.
        refused: gets an entry for each row with a value that is none, and the others are returned; without it the first
            such row is an error. A row without the fields is always an error.

    Returns:
        The tasks in the file's order, each problem once; at least one.

    Raises:
        UsageError: no such file, one that can't be read as rows, no rows, a broken row (see `refused`), none that is
            not broken, rows of an unknown form, or a data set that can't be loaded.
        MissingExtraError: Parquet or a hub name without `pyarrow` or `datasets`.
    """
    name = str(source)
    schemas = SCHEMAS if fields is None else (_own_schema(fields),)
    stem = Path(name).stem
    tasks: dict[str, MathTask] = {}
    ids: set[str] = set()
    repeated = differing = 0
    for where, row in read_rows(source, split, config=config):
        schema = _schema_of(row, schemas, name, where)
        try:
            task = _parse(row, schema, stem)
        except _RowError as error:
            if refused is None:
                raise UsageError(f"{name}: {where}: {error}") from None
            refused.append(RefusedRow(where, str(error)))
            continue
        there = tasks.get(task.problem)
        if there is not None:
            repeated += 1
            differing += there.answer != task.answer
            continue
        if task.task_id in ids:
            task = _renamed(task)
        ids.add(task.task_id)
        tasks[task.problem] = task
    if repeated:
        logger.warning(
            "%s: %d rows repeat a problem and are left out, %d of them with another answer",
            name,
            repeated,
            differing,
        )
    if not tasks and refused:
        raise UsageError(f"{name}: no row can be a task; the first: {refused[0].row}: {refused[0].reason}")
    if not tasks:
        which = "" if split is None else f" of split {split!r}{_splits_of(source, config)}"
        raise UsageError(f"{name}: holds no rows{which}")
    return list(tasks.values())


def _splits_of(source: str | Path, config: str | None) -> str:
    """What a file's rows say of their splits, for a message; empty for what is no file."""
    if not Path(source).expanduser().is_file():
        return ""
    rows = (row for _, row in read_rows(source, config=config) if isinstance(row, dict))
    splits = sorted({str(row["split"]) for row in rows if row.get("split") is not None})
    return f"; there are: {', '.join(splits)}" if splits else ""


def _own_schema(fields: Mapping[str, str]) -> Schema:
    allowed = ("problem", "answer", "id", "family", "level")
    for key, value in fields.items():
        if key not in allowed or not isinstance(value, str) or not value:
            raise UsageError(
                f"fields: {key!r}: {value!r}; it maps {', '.join(allowed)} to names of the data set's fields"
            )
    for key in ("problem", "answer"):
        if key not in fields:
            raise UsageError(f"fields: {key!r} is missing; both problem and answer are needed")
    id, family, level = ((fields[key],) if key in fields else () for key in ("id", "family", "level"))
    return Schema("your own", fields["problem"], fields["answer"], id=id, family=family, level=level)


def _schema_of(row: Any, schemas: tuple[Schema, ...], name: str, where: str) -> Schema:
    if not isinstance(row, dict):
        raise UsageError(f"{name}: {where}: must be an object with fields, got {type(row).__name__}")
    for schema in schemas:
        if _field(row, schema.problem) is _MISSING or _field(row, schema.answer) is _MISSING:
            continue
        if schema.form == "hashes" and _HASHES not in str(row[schema.answer]):
            continue
        return schema
    found = ", ".join(sorted(map(str, row))) or "none"
    needed = " or ".join(
        dict.fromkeys(f"{schema.problem} and {schema.answer} ({schema.name})" for schema in schemas)
    )
    hint = "" if schemas is not SCHEMAS else "; or name them: fields={'problem': ..., 'answer': ...}"
    raise UsageError(f"{name}: {where}: has the fields {found}; needed are {needed}{hint}")


def _field(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _first(row: Mapping[str, Any], paths: tuple[str, ...]) -> Any:
    """The first of the fields that is there; None where none is."""
    return next((value for path in paths if (value := _field(row, path)) is not _MISSING), None)


def _parse(row: Mapping[str, Any], schema: Schema, stem: str) -> MathTask:
    problem = _problem(_field(row, schema.problem), schema.problem)
    answer = _answer(_field(row, schema.answer), schema)
    level = _LEVEL.fullmatch(str(_first(row, schema.level)))
    family = _first(row, schema.family)
    return MathTask(
        task_id=_whole_text(_task_id(_first(row, schema.id), stem, problem)),
        family=_whole_text(family if isinstance(family, str) and family.strip() else stem),
        problem=problem,
        answer=answer,
        level=int(level[1]) if level else None,
    )


def _problem(value: Any, field: str) -> str:
    if isinstance(value, list):  # a conversation
        said = [turn for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = said[-1].get("content") if said else value
    if not isinstance(value, str):
        raise _RowError(
            f"field {field!r} must be a string, or a conversation with a user's turn, got {_shown(value)}"
        )
    text = (
        _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", value, count=1)).strip()
        if "Answer:" in value
        else value.strip()
    )
    if not text:
        raise _RowError(f"field {field!r} must not be empty, got {_shown(value)}")
    return _whole_text(text)


def _answer(value: Any, schema: Schema) -> str:
    given = value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and math.isfinite(value):
        value = int(value) if value.is_integer() else f"{Decimal(repr(value)):f}"  # 1e-07 would be e - 7
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise _RowError(f"field {schema.answer!r} must be a string or a number, got {_shown(given)}")
    if schema.form == "hashes":
        value = value.rpartition(_HASHES)[2]
    elif schema.form == "boxed" or r"\boxed" in value:
        boxed = last_boxed(value)
        if boxed is None:
            raise _RowError(f"field {schema.answer!r} must hold \\boxed{{ANSWER}}, got {_shown(given)}")
        value = boxed[1]
    answer: str = _whole_text(value.strip())
    if not answer:
        raise _RowError(f"field {schema.answer!r} must not be empty, got {_shown(given)}")
    if len(answer) > MAX_ANSWER_CHARS:
        raise _RowError(
            f"field {schema.answer!r} must be an answer of at most {MAX_ANSWER_CHARS} characters, has {len(answer)}"
        )
    return answer


def _task_id(id: Any, stem: str, problem: str) -> str:
    if isinstance(id, str) and id.strip():
        # A mere number says little beside those of other data sets.
        return f"{stem}-{id}" if id.strip().isdigit() else id
    if isinstance(id, int) and not isinstance(id, bool):
        return f"{stem}-{id}"
    return f"{stem}-{hashlib.blake2b(problem.encode(), digest_size=6).hexdigest()}"


def _whole_text(text: str) -> str:
    """The text as UTF-8 can hold it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _renamed(task: MathTask) -> MathTask:
    """The task with a name that is made of its content too: another problem has its name."""
    digest = hashlib.blake2b(task.problem.encode(), digest_size=6).hexdigest()
    return dataclasses.replace(task, task_id=f"{task.task_id}-{digest}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
