"""From a row of any data set to a `SWETask`.

Which kind a row is follows from its fields, and from the data set's name where the fields leave it open:

- package rows: `package` ("name==version"); the image is built from that release's source distribution.
- R2E-Gym: `expected_output_json`.
- SWE-smith: an image or a repository that is named swesmith; the row's patch is the bug.
- SWE-rebench: `install_config` holds the test command; rows of its second version have a `language`.
- SWE-Gym: one of its repositories, or a data set named so.
- SWE-bench: all others; `eval_script`, `log_parser` and `eval_type` come with version 5 of the schema.

Invariants:
- A row becomes a task whole or is refused with a `RowError`: nothing is guessed, and no test is left out in silence.
- Ids are safe as part of a file name or an image tag. Paths are relative to the repository and stay inside it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from .diffs import commit_diff, diff_paths, reverse_diff
from .fields import Fields, is_inside
from .log_parsers import PARSERS, STATUSES, parser_name, without_colours
from .task import PACKAGE_TIMEOUT_S, SWETask, file_of
from .test_commands import (
    CONDA_SETUP,
    SWE_GYM_REPOS,
    command_of_repo,
    eval_script,
    marked_script,
    parser_of_repo,
    smith_command,
)

__all__ = ["SCHEMAS", "image_name_of", "parse_task", "schema_of"]

_BENCH_TIMEOUT_S = 1800.0  # the limit of SWE-bench's own harness
_R2E_TIMEOUT_S = 300.0  # of R2E-Gym's
_SMITH_TIMEOUT_S = 120.0  # of SWE-smith's
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][\w.+-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?==[A-Za-z0-9][\w.!+-]*")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][^\n\r\x00]*")
_SMITH_IMAGE = re.compile(
    r"(?:[\w.-]+/)*swesmith\.\w+\.(?P<name>[\w.-]+)\.(?P<commit>[0-9a-f]{8})(?::[\w.-]+)?"
)
_SMITH_REPO = re.compile(r"(?:swesmith/)?(?P<name>[\w.-]+__[\w.-]+)\.(?P<commit>[0-9a-f]{8})(?:\..*)?")
# Tests, and what tells of the fix, in the images of R2E-Gym.
_R2E_HIDDEN = (
    "run_tests.sh",
    "r2e_tests",
    "expected_test_output.json",
    "execution_result.json",
    "parsed_commit.json",
    "syn_issue.json",
    "modified_files.json",
    "modified_entities.json",
    "/r2e_tests",
    "/run_tests.sh",
)
_R2E_BEFORE = (
    "export PATH=/testbed/.venv/bin:$PATH",
    "[ -e run_tests.sh ] || cp /run_tests.sh run_tests.sh",
    "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests",
)


def parse_task(row: object, *, source: str, where: str) -> SWETask:
    """Check one row and bring it to a `SWETask`.

    Args:
        row: a mapping of the row's fields.
        source: file or data set that it came from, for messages and for the kind of row.
        where: place in it ("line 3"), for messages while the row has no id.

    Raises:
        RowError: see the module's invariants.
    """
    if not isinstance(row, Mapping):
        raise Fields({}, source, where).refused(f"a row must be an object, got {type(row).__name__}")
    fields = Fields(row, source, where)
    return SCHEMAS[schema_of(row, source)](fields)


def schema_of(row: Mapping[str, Any], source: str = "") -> str:
    """Which kind a row is: a key of `SCHEMAS`."""
    if "package" in row:
        return "package"
    if row.get("expected_output_json") is not None or row.get("parsed_commit_content") is not None:
        return "r2e-gym"
    image, repo, name = str(row.get("image_name")), str(row.get("repo")), source.lower()
    if "swesmith." in image or repo.startswith("swesmith/") or "swe-smith" in name:
        return "swe-smith"
    if row.get("install_config") is not None:
        return "swe-rebench"
    if "swe-gym" in name or repo.lower() in SWE_GYM_REPOS:
        return "swe-gym"
    return "swe-bench"


def image_name_of(instance_id: str, dataset: str = "") -> str:
    """The published image of a row that names none itself.

    Source: the naming rules of SWE-bench's images (`swebench/sweb.eval.x86_64.<id>`, `__` written as
    `_1776_`), of SWE-rebench's (the same, under `swerebench`) and of SWE-Gym's
    (`xingyaoww/sweb.eval.x86_64.<id>`, `__` written as `_s_`).
    """
    if "swe-gym" in dataset.lower():
        return f"xingyaoww/sweb.eval.x86_64.{instance_id.replace('__', '_s_')}:latest".lower()
    owner = "swerebench" if "swe-rebench" in dataset.lower() else "swebench"
    return f"{owner}/sweb.eval.x86_64.{instance_id.replace('__', '_1776_')}:latest".lower()


def _package(fields: Fields) -> SWETask:
    instance_id = _id_of(fields, fields.text("instance_id"))
    fail_to_pass, pass_to_pass = _tests(fields)
    common = _common(fields, instance_id, fail_to_pass, pass_to_pass)
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
        test_files=_test_files(fields, fail_to_pass + pass_to_pass),
        repo=fields.text("repo", default=package),
        base_commit=fields.text("base_commit", default="", empty=True),
        package=package,
        source_archive=fields.neighbour("source_archive"),
        bug_patch=fields.text("bug_patch", default="", empty=True),
        install=install,
        source_root=fields.path("source_root"),
        timeout_s=fields.seconds("timeout_s", PACKAGE_TIMEOUT_S),
        schema="package",
    )


def _bench(fields: Fields) -> SWETask:
    """Rows of SWE-bench, SWE-Gym and SWE-rebench, which share most fields."""
    schema = schema_of(fields.row, fields.source)
    instance_id = _id_of(fields, fields.text("instance_id"))
    fail_to_pass, pass_to_pass = _tests(fields)
    common = _common(fields, instance_id, fail_to_pass, pass_to_pass)
    repo, base_commit = fields.text("repo"), fields.text("base_commit")
    parser, script = _how_to_run(fields, repo, common["test_patch"])
    ids = fail_to_pass + pass_to_pass
    if parser:
        files = _files_at_hand(common["test_patch"], ids)
    else:
        foreign = [test_id for test_id in ids if file_of(test_id) is None]
        if foreign:
            raise fields.refused(
                f"no test command is known for repo {repo!r}, and its tests can't be run by pytest alone, "
                f"such as {foreign[0]!r}; give 'eval_script' and 'log_parser'"
            )
        files = _test_files(fields, ids)
    return SWETask(
        **common,
        test_files=files,
        repo=repo,
        base_commit=base_commit,
        image=_image_of(fields, image_name_of(instance_id, schema)),
        workdir=_workdir_of(fields, repo),
        setup=CONDA_SETUP,
        timeout_s=fields.seconds("timeout_s", _BENCH_TIMEOUT_S),
        schema=schema,
        log_parser=parser,
        eval_script=script,
    )


def _how_to_run(fields: Fields, repo: str, test_patch: str) -> tuple[str, str]:
    """Parser and script of a row in the SWE-bench schema; two empty strings where it is left to our pytest run."""
    eval_type = fields.text("eval_type", default="pass_and_fail", empty=True)
    if eval_type not in ("", "pass_and_fail"):
        raise fields.error("eval_type", "must be 'pass_and_fail', other rules are not supported", eval_type)
    if fields.row.get("eval_script") is not None:
        script = fields.text("eval_script")
        if marked_script(script, "a", "b") is None:
            raise fields.error(
                "eval_script", "must have one marker line before the tests and one after", script
            )
        return _parser_of(fields, fields.text("log_parser", default=parser_of_repo(repo))), script
    if fields.row.get("install_config") is not None:
        config = Fields(fields.mapping("install_config"), fields.source, f"{fields.where}: install_config")
        config.row_name = fields.row_name
        as_list = isinstance(config.row.get("test_cmd"), list)
        command = "\n".join(config.names("test_cmd")) if as_list else config.text("test_cmd")
        parser = _parser_of(config, config.text("log_parser", default="parse_log_pytest"))
        if not _is_rebench_2(fields):
            files = [path for path in diff_paths(test_patch) if path.endswith(".py") and is_inside(path)]
            command = " ".join([command, *map(shlex.quote, files)])
        before = config.names("eval_commands") if config.row.get("eval_commands") else ()
        return parser, eval_script(command, before=before, workdir=_workdir_of(fields, repo))
    known = command_of_repo(repo, fields.text("version", default="", empty=True), test_patch)
    if known is None:
        return "", ""
    command, before = known
    return parser_of_repo(repo), eval_script(command, before=before)


def _is_rebench_2(fields: Fields) -> bool:
    """Whether a row is of SWE-rebench's second version, whose commands are whole and whose images are laid out anew."""
    return fields.row.get("install_config") is not None and fields.row.get("language") is not None


def _workdir_of(fields: Fields, repo: str) -> str:
    if not _is_rebench_2(fields):
        return "/testbed"
    name = repo.rpartition("/")[2]
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise fields.error("repo", "must be owner/name", repo)
    return f"/{name}"


def _smith(fields: Fields) -> SWETask:
    instance_id = _id_of(fields, fields.text("instance_id"))
    fail_to_pass, pass_to_pass = _tests(fields)
    image = fields.text("image_name", default="")
    named = _SMITH_IMAGE.fullmatch(image) or _SMITH_REPO.fullmatch(fields.text("repo", default=instance_id))
    if named is None:
        raise fields.error("image_name", "must be swesmith.<arch>.<owner>_1776_<repo>.<commit>", image)
    name = named["name"].replace("_1776_", "__")
    bug = fields.text("patch")
    try:
        gold = reverse_diff(bug)
    except ValueError as error:
        raise fields.error("patch", str(error), bug) from None
    files = tuple(dict.fromkeys(file for file in map(file_of, fail_to_pass) if file and is_inside(file)))
    if name == "python__mypy":
        raise fields.refused(
            "tests of python/mypy in SWE-smith are sections of data files, which is not supported"
        )
    command, parser = smith_command(name, files)
    if parser != "unittest":
        if not files:
            raise fields.error("FAIL_TO_PASS", "must name tests of pytest, path.py::name", fail_to_pass[0])
        # The run is limited to the files of FAIL_TO_PASS, as SWE-smith's own: other tests would be missing.
        pass_to_pass = tuple(test_id for test_id in pass_to_pass if file_of(test_id) in files)
    return SWETask(
        instance_id=instance_id,
        problem_statement=fields.text("problem_statement"),
        patch=gold,
        test_patch="",
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        test_files=files,
        repo=name.replace("__", "/"),
        base_commit=fields.text("base_commit", default=named["commit"], empty=True),
        image=_image_of(fields, f"swesmith.x86_64.{name}.{named['commit']}"),
        setup=CONDA_SETUP,
        timeout_s=fields.seconds("timeout_s", _SMITH_TIMEOUT_S),
        schema="swe-smith",
        log_parser=parser,
        eval_script=eval_script(command),
        bug_patch=bug,
        hidden=files,
    )


def _r2e(fields: Fields) -> SWETask:
    repo, commit = fields.text("repo_name"), fields.text("commit_hash")
    instance_id = _id_of(fields, f"{repo}__{commit}", field="repo_name")
    expected = fields.mapping("expected_output_json")
    for test, status in expected.items():
        if status not in STATUSES:
            raise fields.error(
                "expected_output_json", f"must map tests to {', '.join(STATUSES)}", {test: status}
            )
    # Names as the parser of the log gives them; skipped tests report nothing there.
    named = {without_colours(test).partition(" - ")[0]: status for test, status in expected.items()}
    named = {test: status for test, status in named.items() if status != "SKIPPED"}
    if not named:
        raise fields.error(
            "expected_output_json", "must name at least one test that is not skipped", expected
        )
    gold = ""
    if fields.row.get("parsed_commit_content") is not None:
        try:
            gold = commit_diff(fields.mapping("parsed_commit_content"))
        except ValueError as error:
            raise fields.refused(f"field 'parsed_commit_content' {error}") from None
    statement = fields.text("problem_statement")
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    return SWETask(
        instance_id=instance_id,
        problem_statement=issue[1].strip() if issue else statement,
        patch=gold,
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        test_files=("run_tests.sh", "r2e_tests"),
        repo=repo,
        base_commit=commit,
        image=fields.text("docker_image"),
        setup="export PATH=/testbed/.venv/bin:$PATH",
        timeout_s=fields.seconds("timeout_s", _R2E_TIMEOUT_S),
        schema="r2e-gym",
        log_parser="r2e",
        eval_script=eval_script("bash run_tests.sh", before=_R2E_BEFORE),
        expected=tuple(named.items()),
        hidden=_R2E_HIDDEN,
    )


SCHEMAS = {
    "package": _package,
    "swe-bench": _bench,
    "swe-gym": _bench,
    "swe-rebench": _bench,
    "swe-smith": _smith,
    "r2e-gym": _r2e,
}
"""What reads a row, by its kind."""


def _id_of(fields: Fields, instance_id: str, field: str = "instance_id") -> str:
    if not _INSTANCE_ID.fullmatch(instance_id):
        raise fields.error(field, "may hold letters, digits, '.', '_', '+' and '-' alone", instance_id)
    fields.name_row(instance_id)
    return instance_id


def _tests(fields: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    fail_to_pass = fields.names("FAIL_TO_PASS")
    if not fail_to_pass:
        raise fields.error("FAIL_TO_PASS", "must name at least one test", [])
    pass_to_pass = fields.names("PASS_TO_PASS")
    both = set(fail_to_pass) & set(pass_to_pass)
    if both:
        raise fields.error("PASS_TO_PASS", "shares tests with FAIL_TO_PASS", sorted(both)[0])
    return fail_to_pass, pass_to_pass


def _common(
    fields: Fields, instance_id: str, fail_to_pass: tuple[str, ...], pass_to_pass: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "problem_statement": fields.text("problem_statement"),
        "patch": fields.text("patch"),
        "test_patch": fields.text("test_patch"),
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
    }


def _parser_of(fields: Fields, name: str) -> str:
    parser = parser_name(name)
    if parser is None:
        raise fields.error("log_parser", f"must be one of {', '.join(PARSERS)}", name)
    return parser


def _test_files(fields: Fields, ids: tuple[str, ...]) -> tuple[str, ...]:
    """The row's `test_files`, followed by files of its ids that the row forgot."""
    named = fields.names("test_files") if fields.row.get("test_files") is not None else ()
    files = [fields.checked_path("test_files", name) for name in named]
    for test_id in ids:
        file = file_of(test_id)
        if file is not None:
            files.append(fields.checked_path("FAIL_TO_PASS or PASS_TO_PASS", file))
    return tuple(dict.fromkeys(files))


def _files_at_hand(test_patch: str, ids: tuple[str, ...]) -> tuple[str, ...]:
    """Files of a test patch and of ids, as far as they are files: names in logs may be anything."""
    named = [*diff_paths(test_patch), *filter(None, map(file_of, ids))]
    return tuple(dict.fromkeys(name for name in named if is_inside(name)))


def _image_of(fields: Fields, otherwise: str) -> str:
    for field in ("image", "docker_image", "image_name"):
        if fields.row.get(field) is not None:
            return _published(fields.text(field))
    return _published(otherwise)


def _published(image: str) -> str:
    """A SWE-smith image by its public name: registries allow no double underscore, and it lies under an owner."""
    if not image.startswith("swesmith."):
        return image
    return f"jyangballin/{image.replace('__', '_1776_')}".lower()
