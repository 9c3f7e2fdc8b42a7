"""Rows of real software-engineering tasks: read, checked, and brought to one record.

Two kinds of rows are read, both in the SWE-bench schema (`instance_id`, `problem_statement`, `patch`,
`test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`):

- image rows: the repository lies in a published container image. The row names it in `image`,
  `docker_image` or `image_name`; else the name follows from the id (`image_name_of`).
- package rows: `package` ("name==version") is a release whose source distribution is the repository; the
  image is built from it (`package_image`).

Invariants:
- A row is accepted whole or refused: a missing field or one of a wrong type is a `UsageError` that names
  the file, the row (its id, or its line while it has none) and the field. Nothing is guessed, no row is
  left out in silence.
- Ids are unique in a file and safe as part of a file name or an image tag.
- Paths are relative to the repository and stay inside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

__all__ = ["SWETask", "image_name_of", "load_tasks", "parse_task"]

_PACKAGE_TIMEOUT_S = 600.0
_IMAGE_TIMEOUT_S = 1800.0  # the limit of SWE-bench's own harness
_FILE_KINDS = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][\w.+-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?==[A-Za-z0-9][\w.!+-]*")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][^\n\r\x00]*")
# What the published images of SWE-bench and of its relatives need before a command sees the repository's
# Python.
_CONDA_SETUP = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
)


@dataclass(frozen=True)
class SWETask:
    """One task on a real repository.

    Attributes:
        instance_id: unique in its file.
        problem_statement: what the agent is told.
        patch: the gold fix, a unified diff; read by calibration alone.
        test_patch: a unified diff that brings the hidden tests; applied while grading alone.
        fail_to_pass: pytest ids that fail before the fix and pass after it.
        pass_to_pass: pytest ids that pass before and after it.
        test_files: files that a grading run hands to pytest, in this order.
        repo: name of the repository, for reports.
        base_commit: commit that the image holds; empty for package rows.
        image: name of a published image; None for package rows.
        package: "name==version"; None for image rows.
        source_archive: path of a source distribution that is taken instead of the package index's; None for that.
        bug_patch: a unified diff that brings the bug into the release; the repository's one commit has it applied.
            Empty where the release itself has what is to be repaired.
        install: requirements that the tests of a package row need.
        source_root: directory, relative to the repository, from which a package row's code is imported.
        workdir: where the repository lies in the sandbox.
        setup: shell command run before the tests; may change the shell's environment.
        timeout_s: seconds that one run of the tests may take.
    """

    instance_id: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_files: tuple[str, ...]
    repo: str = ""
    base_commit: str = ""
    image: str | None = None
    package: str | None = None
    source_archive: str | None = None
    bug_patch: str = ""
    install: tuple[str, ...] = ()
    source_root: str = "."
    workdir: str = "/testbed"
    setup: str = ""
    timeout_s: float = _PACKAGE_TIMEOUT_S

    @property
    def test_ids(self) -> tuple[str, ...]:
        """FAIL_TO_PASS and PASS_TO_PASS together."""
        return self.fail_to_pass + self.pass_to_pass

    @property
    def foreign_ids(self) -> tuple[str, ...]:
        """Test ids that are not of pytest's form `path.py::name`: the grader can't run these."""
        return tuple(i for i in self.test_ids if _file_of(i) is None)


def load_tasks(source: str | Path, split: str | None = None) -> list[SWETask]:
    """Read every row of a file or of a hub data set.

    Args:
        source: path of a .jsonl, .json (an array of rows) or .parquet file, or a hub name "owner/name".
        split: split of a hub data set, "test" by default. Rows of a local file are chosen by their field
            `split` where they have one; a row without it belongs to every split.

    Returns:
        The tasks in the file's order; at least one.

    Raises:
        UsageError: no such file, no rows, a broken row (see the module's invariants), or a data set that
            can't be loaded.
        MissingExtraError: Parquet or a hub name without `pyarrow` or `datasets`.
    """
    name = str(source)
    path = Path(source).expanduser()
    rows: Iterable[tuple[str, Any]]
    if path.is_file():
        if path.suffix not in _FILE_KINDS:
            raise UsageError(
                f"{name}: unknown kind of file {path.suffix!r}; allowed: {', '.join(_FILE_KINDS)}"
            )
        rows = _local_rows(path)
        if split is not None:
            rows = (
                (where, row)
                for where, row in rows
                if not isinstance(row, dict) or row.get("split", split) == split
            )
    elif path.is_dir():
        raise UsageError(
            f"{name}: is a directory; give one file ({', '.join(_FILE_KINDS)}) or a hub name owner/name"
        )
    elif path.suffix in _FILE_KINDS or not _HUB_NAME.fullmatch(name):
        raise UsageError(f"{name}: no such file")
    else:
        rows = _hub_rows(name, split or "test")
    tasks: list[SWETask] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        task = parse_task(row, source=name, where=where)
        if task.instance_id in seen:
            before = seen[task.instance_id]
            raise UsageError(f"{name}: {where}: instance_id {task.instance_id!r} is there already ({before})")
        seen[task.instance_id] = where
        tasks.append(task)
    if not tasks:
        raise UsageError(f"{name}: holds no rows" + (f" of split {split!r}" if split is not None else ""))
    return tasks


def parse_task(row: object, *, source: str, where: str) -> SWETask:
    """Check one row and bring it to a `SWETask`.

    Args:
        row: a mapping of the row's fields.
        source: file or data set that it came from, for messages.
        where: place in it ("line 3"), for messages while the row has no id.

    Raises:
        UsageError: see the module's invariants.
    """
    if not isinstance(row, Mapping):
        raise UsageError(f"{source}: {where}: a row must be an object, got {type(row).__name__}")
    fields = _Fields(row, source, where)
    instance_id = fields.text("instance_id")
    if not _INSTANCE_ID.fullmatch(instance_id):
        raise fields.error(
            "instance_id", "may hold letters, digits, '.', '_', '+' and '-' alone", instance_id
        )
    fields.where = repr(instance_id)
    fail_to_pass = fields.names("FAIL_TO_PASS")
    if not fail_to_pass:
        raise fields.error("FAIL_TO_PASS", "must name at least one test", [])
    pass_to_pass = fields.names("PASS_TO_PASS")
    both = set(fail_to_pass) & set(pass_to_pass)
    if both:
        raise fields.error("PASS_TO_PASS", "shares tests with FAIL_TO_PASS", sorted(both)[0])
    common: dict[str, Any] = {
        "instance_id": instance_id,
        "problem_statement": fields.text("problem_statement"),
        "patch": fields.text("patch"),
        "test_patch": fields.text("test_patch"),
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
        "test_files": _test_files(fields, fail_to_pass + pass_to_pass),
    }
    if "package" in row:
        package = fields.text("package")
        if not _PACKAGE.fullmatch(package):
            raise fields.error("package", "must be 'name==version'", package)
        install = fields.names("install")
        for requirement in install:
            # A leading dash would be an option of pip, not a requirement.
            if not _REQUIREMENT.fullmatch(requirement):
                raise fields.error("install", "must be requirements such as 'pytest<8'", requirement)
        return SWETask(
            **common,
            repo=fields.text("repo", default=package),
            base_commit=fields.text("base_commit", default="", empty=True),
            package=package,
            source_archive=fields.neighbour("source_archive"),
            bug_patch=fields.text("bug_patch", default="", empty=True),
            install=install,
            source_root=fields.path("source_root"),
            timeout_s=fields.seconds("timeout_s", _PACKAGE_TIMEOUT_S),
        )
    return SWETask(
        **common,
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit"),
        image=_image_of(fields, instance_id, source),
        setup=_CONDA_SETUP,
        timeout_s=fields.seconds("timeout_s", _IMAGE_TIMEOUT_S),
    )


def image_name_of(instance_id: str, dataset: str = "") -> str:
    """The published image of a row that names none itself.

    Source: the naming rules of SWE-bench's images (`swebench/sweb.eval.x86_64.<id>`, `__` written as
    `_1776_`) and of SWE-Gym's (`xingyaoww/sweb.eval.x86_64.<id>`, `__` written as `_s_`).
    """
    if "swe-gym" in dataset.lower():
        return f"xingyaoww/sweb.eval.x86_64.{instance_id.replace('__', '_s_')}:latest".lower()
    return f"swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_')}:latest".lower()


class _Fields:
    """Typed access to a row's fields; every error names file, row and field."""

    def __init__(self, row: Mapping[str, Any], source: str, where: str) -> None:
        self.row = row
        self.source = source
        self.where = where

    def error(self, field: str, rule: str, value: object) -> UsageError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return UsageError(f"{self.source}: {self.where}: field {field!r} {rule}, got {shown}")

    def text(self, field: str, *, default: str | None = None, empty: bool = False) -> str:
        value = self.row.get(field)
        if value is None:
            if default is not None:
                return default
            raise UsageError(f"{self.source}: {self.where}: field {field!r} is missing")
        if not isinstance(value, str):
            raise self.error(field, "must be a string", value)
        if not empty and not value.strip():
            raise self.error(field, "must not be empty", value)
        if not _encodable(value):
            raise self.error(field, "must be valid Unicode", value)
        return value

    def names(self, field: str) -> tuple[str, ...]:
        """A list of strings, as such or as a JSON string, without repetitions."""
        value = self.row.get(field)
        if value is None:
            raise UsageError(f"{self.source}: {self.where}: field {field!r} is missing")
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise self.error(field, "must be a list of strings or such a list as JSON", value) from None
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise self.error(field, "must be a list of strings or such a list as JSON", value)
        if not all(map(_encodable, value)):
            raise self.error(field, "must be valid Unicode", value)
        return tuple(dict.fromkeys(value))

    def path(self, field: str) -> str:
        value = self.text(field)
        return self.checked_path(field, value)

    def checked_path(self, field: str, value: str) -> str:
        parts = value.split("/")
        # A leading dash would be read as an option by git and pytest.
        if (
            value.startswith(("/", "-"))
            or ".." in parts
            or ".git" in parts
            or any(c in value for c in "\n\r\0\\")
        ):
            raise self.error(field, "must be a path inside the repository", value)
        return value.removeprefix("./").rstrip("/") or "."

    def neighbour(self, field: str) -> str | None:
        """Path of a file that the row names relative to the folder of the rows' file."""
        if self.row.get(field) is None:
            return None
        path = Path(self.source).expanduser().parent / self.path(field)
        if not path.is_file():
            raise self.error(field, "must be a file beside the rows' own", self.row[field])
        return str(path.absolute())

    def seconds(self, field: str, default: float) -> float:
        value = self.row.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.error(field, "must be a number of seconds above 0", value)
        return float(value)


def _encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON allows lone surrogates, files and commands don't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _test_files(fields: _Fields, ids: tuple[str, ...]) -> tuple[str, ...]:
    """The row's `test_files`, followed by files of its ids that the row forgot."""
    named = fields.names("test_files") if fields.row.get("test_files") is not None else ()
    files = [fields.checked_path("test_files", name) for name in named]
    for test_id in ids:
        file = _file_of(test_id)
        if file is not None:
            files.append(fields.checked_path("FAIL_TO_PASS or PASS_TO_PASS", file))
    return tuple(dict.fromkeys(files))


def _file_of(test_id: str) -> str | None:
    """File part of a pytest id, None where the id is not of that form."""
    file, separator, _ = test_id.partition("::")
    return file if separator and file.endswith(".py") else None


def _image_of(fields: _Fields, instance_id: str, source: str) -> str:
    for field in ("image", "docker_image", "image_name"):
        if fields.row.get(field) is not None:
            return fields.text(field)
    return image_name_of(instance_id, source)


def _local_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read as UTF-8 text: {error}") from None
    if path.suffix == ".json":
        rows = _decode(text, f"{path}")
        if not isinstance(rows, list):
            raise UsageError(f"{path}: must hold an array of rows, got {type(rows).__name__}")
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    # Only line feeds end a row: JSON strings may hold U+2028 and other characters that str.splitlines
    # breaks at.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _decode(line, f"{path}: line {number}")


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: is not JSON: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: can't be read as Parquet: {error}") from None
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _hub_rows(name: str, split: str) -> Iterable[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "train") from None
    try:
        rows = datasets.load_dataset(name, split=split)
    # The hub's client raises errors of many libraries (HTTP, files, its own); to the user all are one.
    except Exception as error:
        raise UsageError(
            f"{name}: split {split!r} can't be loaded from the hub: {type(error).__name__}: {error}"
        ) from error
    return ((f"row {number}", dict(row)) for number, row in enumerate(rows, 1))
