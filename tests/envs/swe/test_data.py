"""Reading rows: what is accepted, and what a refusal names."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.data import image_name_of, load_tasks

FIXTURE = Path(__file__).parent / "fixtures" / "package_rows.jsonl"


def package_row(**changes: Any) -> dict[str, Any]:
    row = json.loads(FIXTURE.read_text())
    return {key: value for key, value in {**row, **changes}.items() if value is not ...}


def image_row(**changes: Any) -> dict[str, Any]:
    row = {
        "instance_id": "astropy__astropy-12907",
        "repo": "astropy/astropy",
        "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
        "problem_statement": "It is broken.",
        "patch": "diff --git a/x.py b/x.py\n",
        "test_patch": "diff --git a/tests/test_x.py b/tests/test_x.py\n",
        "FAIL_TO_PASS": ["astropy/tests/test_x.py::test_a"],
        "PASS_TO_PASS": "[]",
        **changes,
    }
    return {key: value for key, value in row.items() if value is not ...}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_package_row_becomes_a_task_with_its_recipe() -> None:
    (task,) = load_tasks(FIXTURE)
    assert task.package == "inflection==0.5.1"
    assert task.image is None
    assert task.install == ("pytest<8",)
    assert task.source_root == "."
    assert task.workdir == "/testbed"
    assert task.fail_to_pass == ("test_issue_camelize.py::test_lower_camel_case[-]",)
    assert len(task.pass_to_pass) == 8
    assert task.test_files == ("test_issue_camelize.py", "test_inflection.py")
    assert task.foreign_ids == ()


def test_the_shared_rows_are_read(shared_data: Path) -> None:
    tasks = load_tasks(shared_data / "swe_pypi" / "tasks.jsonl")
    assert [(task.package, len(task.test_ids)) for task in tasks] == [
        ("flask==2.2.3", 59),
        ("click==8.1.7", 100),
        ("marshmallow==3.19.0", 389),
    ]
    for task in tasks:
        assert task.foreign_ids == ()
        assert set(task.test_files) == {test_id.partition("::")[0] for test_id in task.test_ids}


def test_test_lists_may_be_lists_or_json(tmp_path: Path) -> None:
    as_json = load_tasks(write_lines(tmp_path / "a.jsonl", package_row()))
    rows = package_row(
        FAIL_TO_PASS=json.loads(package_row()["FAIL_TO_PASS"]),
        PASS_TO_PASS=json.loads(package_row()["PASS_TO_PASS"]),
    )
    assert load_tasks(write_lines(tmp_path / "b.jsonl", rows)) == as_json


def test_json_arrays_and_parquet_give_the_same_tasks_as_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [package_row(), package_row(instance_id="other")]
    expected = load_tasks(write_lines(tmp_path / "rows.jsonl", *rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_tasks(tmp_path / "rows.json") == expected
    assert load_tasks(tmp_path / "rows.parquet") == expected


def test_an_image_row_is_named_by_its_id_unless_it_names_an_image(tmp_path: Path) -> None:
    rows = [image_row(), image_row(instance_id="other", image="example/image:1")]
    tasks = load_tasks(write_lines(tmp_path / "rows.jsonl", *rows))
    assert tasks[0].image == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert tasks[1].image == "example/image:1"
    assert tasks[0].timeout_s == 1800


def test_images_of_swe_gym_have_another_rule() -> None:
    name = image_name_of("getmoto__moto-5752", "SWE-Gym/SWE-Gym")
    assert name == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"


def test_files_of_ids_are_run_even_where_the_row_does_not_name_them(tmp_path: Path) -> None:
    row = package_row(test_files=..., PASS_TO_PASS=["b/test_b.py::test_b"])
    (task,) = load_tasks(write_lines(tmp_path / "rows.jsonl", row))
    assert task.test_files == ("test_issue_camelize.py", "b/test_b.py")


def test_ids_that_are_not_pytests_are_kept_where_a_log_is_parsed(tmp_path: Path) -> None:
    row = image_row(FAIL_TO_PASS=["test_x (tests.X)", "a.py::test_y"])
    (task,) = load_tasks(write_lines(tmp_path / "rows.jsonl", row))
    assert task.log_parser == "pytest_v2"
    assert task.foreign_ids == ("test_x (tests.X)",)
    assert task.test_files == ("tests/test_x.py", "a.py")


def test_ids_that_are_not_pytests_are_refused_where_nothing_else_could_run_them(tmp_path: Path) -> None:
    row = image_row(repo="some/repository", FAIL_TO_PASS=["test_x (tests.X)", "a.py::test_y"])
    with pytest.raises(UsageError, match=r"no test command is known .* such as 'test_x \(tests.X\)'"):
        load_tasks(write_lines(tmp_path / "rows.jsonl", row))


@pytest.mark.parametrize(
    "field",
    [
        "instance_id",
        "problem_statement",
        "patch",
        "test_patch",
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "install",
        "source_root",
    ],
)
def test_a_missing_field_of_a_package_row_is_named(tmp_path: Path, field: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", package_row(), package_row(**{field: ...}))
    with pytest.raises(UsageError) as caught:
        load_tasks(path)
    where = "line 2" if field == "instance_id" else "'inflection-0.5.1__camelize-empty'"
    assert str(caught.value) == f"{path}: {where}: field {field!r} is missing"


@pytest.mark.parametrize("field", ["repo", "base_commit"])
def test_a_missing_field_of_an_image_row_is_named(tmp_path: Path, field: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", image_row(**{field: ...}))
    with pytest.raises(UsageError, match=f"'astropy__astropy-12907': field '{field}' is missing"):
        load_tasks(path)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("instance_id", "a/b", "may hold letters, digits"),
        ("instance_id", 3, "must be a string"),
        ("problem_statement", " ", "must not be empty"),
        ("patch", ["a"], "must be a string"),
        ("patch", "\ud800", "must be valid Unicode"),
        ("FAIL_TO_PASS", "[]", "must name at least one test"),
        ("FAIL_TO_PASS", "test_a", "must be a list of strings"),
        ("FAIL_TO_PASS", {"a": 1}, "must be a list of strings"),
        ("PASS_TO_PASS", [1], "must be a list of strings"),
        ("PASS_TO_PASS", ["test_issue_camelize.py::test_lower_camel_case[-]"], "shares tests"),
        ("PASS_TO_PASS", ["../test_a.py::test_a"], "must be a path inside the repository"),
        ("test_files", ["/etc/passwd"], "must be a path inside the repository"),
        ("test_files", ["--collect-only"], "must be a path inside the repository"),
        ("package", "inflection", "must be 'name==version'"),
        ("package", "--index-url=x==1", "must be 'name==version'"),
        ("install", ["--pre"], "must be requirements"),
        ("source_root", "/src", "must be a path inside the repository"),
        ("timeout_s", -1, "must be a number of seconds above 0"),
        ("timeout_s", True, "must be a number of seconds above 0"),
        ("timeout_s", 10**400, "must be a number of seconds above 0 and at most 86400"),
        ("PASS_TO_PASS", "[" * 100_000, "must be a list of strings"),
        ("install", "[" + "9" * 5000 + "]", "must be a list of strings"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named_with_its_value(
    tmp_path: Path, field: str, value: object, rule: str
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", package_row(**{field: value}))
    with pytest.raises(UsageError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert field in message
    assert rule in message


def test_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", package_row(), package_row())
    with pytest.raises(UsageError, match=r"line 2: instance_id .* is there already \(line 1\)"):
        load_tasks(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "\n\n", "holds no rows"),
        ("rows.jsonl", "{", "line 1: is not JSON"),
        ("rows.jsonl", "[]\n", "line 1: a row must be an object, got list"),
        ("rows.json", "{}", "must hold an array of rows, got dict"),
        ("rows.json", "[]", "holds no rows"),
        ("rows.parquet", "no parquet", "can't be read as Parquet"),
        ("rows.csv", "a,b", "unknown kind of file '.csv'"),
    ],
)
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        load_tasks(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "folder/missing.jsonl", "missing"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_tasks(tmp_path / name)
    with pytest.raises(UsageError, match="no such file"):
        load_tasks(name)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        load_tasks(tmp_path)


def test_a_split_chooses_rows_that_have_one(tmp_path: Path) -> None:
    rows = [
        package_row(split="train"),
        package_row(instance_id="b", split="test"),
        package_row(instance_id="c"),
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    assert [task.instance_id for task in load_tasks(path, "test")] == ["b", "c"]
    assert len(load_tasks(path)) == 3


def test_a_line_separator_inside_a_string_does_not_end_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = package_row(problem_statement="one\u2028two")
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (task,) = load_tasks(path)
    assert task.problem_statement == "one\u2028two"


@pytest.mark.parametrize(
    ("splits", "chosen", "read"),
    [(["dev", "test"], None, "test"), (["train"], None, "train"), (["train"], "dev", "dev")],
)
def test_a_hub_name_goes_to_datasets(
    monkeypatch: pytest.MonkeyPatch, splits: list[str], chosen: str | None, read: str
) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        return [image_row()]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: splits)
    (task,) = load_tasks("SWE-bench/SWE-bench_Verified", chosen)
    assert asked == [("SWE-bench/SWE-bench_Verified", read)]
    assert task.instance_id == "astropy__astropy-12907"


def test_splits_of_a_hub_data_set_are_named_where_none_is_test(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, split: str) -> None:
        raise ValueError(f"Unknown split {split!r}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "filtered"])
    with pytest.raises(UsageError, match=r"split 'test' can't be loaded .*; there are: train, filtered"):
        load_tasks("owner/name")


def test_a_hub_that_can_not_be_reached_is_told_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, split: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UsageError, match=r"owner/name: split 'train' can't be loaded.*no route"):
        load_tasks("owner/name", "train")


def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + FIXTURE.read_bytes().replace(b"\n", b"\r\n"))
    assert load_tasks(path) == load_tasks(FIXTURE)


def test_a_number_that_python_does_not_read_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"timeout_s": ' + "9" * 5000 + "}\n")
    with pytest.raises(UsageError, match="line 1: is not JSON"):
        load_tasks(path)
