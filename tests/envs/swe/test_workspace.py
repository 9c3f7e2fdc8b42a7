"""Tasks by seed: the split of a data set, and its keep list."""

import json
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.env import SWEEnv
from agentenv_envs.swe.workspace import RowTasks

ROW = {
    "repo": "demo==1.0",
    "package": "demo==1.0",
    "install": [],
    "source_root": ".",
    "problem_statement": "It is wrong.",
    "patch": "diff --git a/demo.py b/demo.py\n--- a/demo.py\n+++ b/demo.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "diff --git a/test_demo.py b/test_demo.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_demo.py\n"
    "@@ -0,0 +1 @@\n+def test_it(): pass\n",
    "FAIL_TO_PASS": ["test_demo.py::test_it"],
    "PASS_TO_PASS": [],
    "base_commit": "",
}


def _write(path: Path, rows: int) -> str:
    path.write_text("".join(json.dumps({**ROW, "instance_id": f"demo-{i}"}) + "\n" for i in range(rows)))
    return str(path)


def _ids(tasks: RowTasks) -> set[str]:
    return {row.instance_id for row in tasks.rows}


def test_a_large_data_set_is_split_by_id_and_nothing_is_lost(tmp_path: Path) -> None:
    source = _write(tmp_path / "many.jsonl", 20)
    train, held_out = _ids(RowTasks(source, "train")), _ids(RowTasks(source, "heldout"))
    assert len(held_out) == 4
    assert not train & held_out
    assert len(train | held_out) == 20


def test_a_small_data_set_is_not_split(tmp_path: Path) -> None:
    source = _write(tmp_path / "few.jsonl", 3)
    assert _ids(RowTasks(source, "train")) == _ids(RowTasks(source, "heldout"))


def test_seeds_go_round_the_rows_of_a_split_in_mixed_order_and_all_has_every_row(tmp_path: Path) -> None:
    tasks = RowTasks(_write(tmp_path / "many.jsonl", 20), "all")
    for first in (0, 2**31 + 7):
        played = [tasks.row(first + number).instance_id for number in range(20)]
        assert sorted(played) == sorted(f"demo-{i}" for i in range(20))
        assert played != sorted(played)
    assert tasks.row(3) == RowTasks(str(tmp_path / "many.jsonl"), "all").row(23)


def test_a_data_set_has_no_held_out_families(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="heldout_families"):
        RowTasks(_write(tmp_path / "few.jsonl", 3), "heldout_families")


def test_rows_of_another_split_of_the_data_set_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    rows = [{**ROW, "instance_id": f"demo-{name}", "split": name} for name in ("train", "dev")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _ids(RowTasks(str(path), "train", "dev")) == {"demo-dev"}
    assert len(_ids(RowTasks(str(path), "train"))) == 2


def test_rows_that_are_refused_are_logged_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = json.loads((Path(__file__).parent / "fixtures" / "package_rows.jsonl").read_text())
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "instance_id": "b", "patch": ""}) + "\n")
    rows = RowTasks(str(path), "train").rows
    assert [task.instance_id for task in rows] == [row["instance_id"]]
    assert "b: the row is refused: field 'patch' must not be empty" in caplog.text
    assert "1 of 2 rows are refused" in caplog.text


def test_a_keep_list_leaves_the_other_rows_out_even_broken_ones(tmp_path: Path) -> None:
    source = _write(tmp_path / "many.jsonl", 15)
    with (tmp_path / "many.jsonl").open("a") as file:
        file.write(json.dumps({**ROW, "instance_id": "demo-broken", "patch": 7}) + "\n")
    keep = tmp_path / "keep.txt"
    keep.write_text("".join(f"demo-{i}\n" for i in range(12)))
    train = _ids(RowTasks(source, "train", keep=str(keep)))
    held_out = _ids(RowTasks(source, "heldout", keep=str(keep)))
    assert len(held_out) == 2, "one in five of those that are kept"
    assert train | held_out == {f"demo-{i}" for i in range(12)}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("demo-1\nother\n", "has no row 'other'"),
        ("demo-1\ndemo-broken\n", "demo-broken: field 'patch' must be a string"),
        ("\n", "names no row; a list of ids is needed"),
        (None, "can't be read as a list of ids"),
    ],
)
def test_a_keep_list_that_does_not_fit_is_the_users_mistake(
    tmp_path: Path, ids: str | None, message: str
) -> None:
    source = _write(tmp_path / "rows.jsonl", 3)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({**ROW, "instance_id": "demo-broken", "patch": 7}) + "\n")
    keep = tmp_path / "keep.txt"
    if ids is not None:
        keep.write_text(ids)
    with pytest.raises(UsageError, match=message):
        RowTasks(source, "train", keep=str(keep))


def test_a_keep_list_without_a_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match=r"keep='keep\.txt': embedded tasks need no list"):
        SWEEnv(keep="keep.txt")
