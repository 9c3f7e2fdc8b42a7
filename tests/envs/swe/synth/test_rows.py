"""Rows: diffs that git takes, tests that are taken out, and a file that survives crashes."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.synth.rows import RowFile, unified_diff, without_tests

TESTS = """\
import pytest


@pytest.mark.parametrize("x", [1, 2])
def test_a(x):
    assert x


class TestB:
    def test_c(self):
        pass

    def test_d(self):
        pass
"""


@pytest.mark.parametrize("seed", range(20))
def test_git_applies_a_diff_and_its_reverse(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    lines = [chance.choice(["", "a", "b\u2028c", "\ta  ", "é\r"]) for _ in range(chance.randint(0, 30))]
    other = [line for line in lines if chance.random() < 0.8] + chance.choices(
        ["x", ""], k=chance.randint(0, 2)
    )
    old, new = ("\n".join(text) + chance.choice(["", "\n"]) for text in (lines, other))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "f.py").write_bytes(old.encode())
    for before, after in ((old, new), (new, old)):
        diff = unified_diff("f.py", before, after)
        assert bool(diff) == (before != after)
        if diff:
            subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True)
        assert (tmp_path / "f.py").read_bytes() == after.encode()


def test_tests_are_taken_out_with_their_decorators() -> None:
    assert without_tests(TESTS, ["t.py::test_a[1]", "t.py::TestB::test_d"]) == (
        "import pytest\n\n\n\n\nclass TestB:\n    def test_c(self):\n        pass\n\n"
    )


def test_a_class_that_loses_every_test_stays_a_class() -> None:
    left = without_tests("class A:\n    def test_x(self): pass\n", ["t.py::A::test_x"])
    assert left == "class A:\n    pass\n"


def test_a_file_whose_tests_come_from_elsewhere_is_emptied() -> None:
    assert without_tests(TESTS, ["t.py::TestB::test_inherited"]) == ""


def test_rows_and_verdicts_are_there_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowFile(path) as file:
        file.append({"instance_id": "a", "synth": {"release": "r"}, "text": "\u2028é"})
        file.note("k1", "kept")
        file.note("k2", "no test fails")
    with RowFile(path) as file:
        assert [row["text"] for row in file.rows] == ["\u2028é"]
        assert file.verdicts == {"k1": "kept", "k2": "no test fails"}
        assert (file.count("r"), file.count("other")) == (1, 0)


def test_a_line_that_a_crash_cut_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    whole = json.dumps({"instance_id": "a"}) + "\n"
    path.write_text(whole + '{"instance_id": "b", "pat')
    with RowFile(path) as file:
        assert [row["instance_id"] for row in file.rows] == ["a"]
    assert path.read_text() == whole


@pytest.mark.parametrize("content", ["hello\n", "hello", "[1]\n", '{"a": 1}\n', '{"instance_id": "a"}'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="--output"):
        RowFile(path)
    assert path.read_text() == content


def test_two_runs_can_not_write_to_one_file(tmp_path: Path) -> None:
    with RowFile(tmp_path / "rows.jsonl"), pytest.raises(UsageError, match="another run writes to it"):
        RowFile(tmp_path / "rows.jsonl")
