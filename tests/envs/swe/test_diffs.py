"""Diffs as text: turned around they undo what git made, and a parsed commit becomes one that git applies."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentenv_envs.swe.diffs import commit_diff, diff_paths, file_diff, reverse_diff, shortened

BEFORE = {
    "a.py": "one\n-- two\n++ three\nfour",
    "gone.py": "x\n",
    "old name.py": "1\n2\n3\n4\n5\n",
    "same.py": "s\n",
}
AFTER = {
    "a.py": "one\n++ three\n-- 2\nfour\n",
    "new.py": "y\n",
    "new name.py": "1\n2\n3\n4\n6\n",
    "same.py": "s\n",
}


def git(folder: Path, *arguments: str, given: str | None = None) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=given).stdout


def write(folder: Path, files: dict[str, str]) -> None:
    for path in folder.glob("*.py"):
        path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


@pytest.fixture
def diff(tmp_path: Path) -> str:
    """A diff with a change, a new, a removed and a renamed file and a new mode; the folder has it applied."""
    git(tmp_path, "init", "-q")
    write(tmp_path, BEFORE)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "before")
    write(tmp_path, AFTER)
    (tmp_path / "same.py").chmod(0o755)
    git(tmp_path, "add", "-A")
    return git(tmp_path, "diff", "--cached", "-M")


def test_a_turned_diff_undoes_what_the_diff_did(tmp_path: Path, diff: str) -> None:
    assert "rename from" in diff
    assert "new mode" in diff
    git(tmp_path, "apply", "-", given=reverse_diff(diff))
    assert files_of(tmp_path) == BEFORE
    assert not (tmp_path / "same.py").stat().st_mode & 0o100


def test_turned_twice_it_does_what_it_did(tmp_path: Path, diff: str) -> None:
    git(tmp_path, "reset", "-q", "--hard")
    git(tmp_path, "apply", "-", given=reverse_diff(reverse_diff(diff)))
    assert files_of(tmp_path) == AFTER


def test_a_diff_names_its_files(diff: str) -> None:
    assert set(diff_paths(diff)) == {"a.py", "gone.py", "new.py", "new name.py", "same.py"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no diff", "not a git diff"),
        ("diff --git a/x b/x\nGIT binary patch\nliteral 3\n", "binary"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary"),
    ],
)
def test_what_can_not_be_turned_around_is_told(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reverse_diff(text)


def parsed_file(path: str, **changes: Any) -> dict[str, Any]:
    """A file of a commit as R2E-Gym writes it: line 2 changed."""
    lines = [("context", "one"), ("deleted", "two"), ("added", "2"), ("note", "No newline at end of file")]
    return {
        "header": {"file": {"path": path}, "misc_line": None},
        "index_line": {"old_commit_hash": "0123456", "new_commit_hash": "789abcd", "mode": "100644"},
        "is_binary_file": False,
        "minus_file": {"path": f"a/{path}"},
        "plus_file": {"path": f"b/{path}"},
        "hunks": [
            {
                "descriptor": {
                    "old_range": {"start": 1, "length": 2},
                    "new_range": {"start": 1, "length": 2},
                    "section": "",
                },
                "line_group": {"all_lines": [{"type": kind, "content": text} for kind, text in lines]},
            }
        ],
        **changes,
    }


def test_a_parsed_commit_gives_the_fix_without_its_tests(tmp_path: Path) -> None:
    files = ["x.py", "tests/test_x.py", "pkg/x_test.py", "README.md", "test_y.py"]
    diff = commit_diff({"file_diffs": [parsed_file(path) for path in files]})
    assert diff_paths(diff) == ("x.py",)
    git(tmp_path, "init", "-q")
    (tmp_path / "x.py").write_text("one\ntwo\n")
    git(tmp_path, "apply", "-", given=diff)
    assert (tmp_path / "x.py").read_text() == "one\n2"


@pytest.mark.parametrize(
    "commit",
    [{}, {"file_diffs": [{}]}, {"file_diffs": 3}, {"file_diffs": [parsed_file("x.py", is_binary_file=True)]}],
)
def test_a_commit_of_another_form_is_told(commit: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has not the form of a parsed commit"):
        commit_diff(commit)


def test_the_diff_of_a_file_is_one_that_git_applies_and_empty_without_a_change(tmp_path: Path) -> None:
    before, after = "one\ntwo\nthree\n", "one\n2\nthree\nfour\n"
    diff = file_diff("x.py", before, after)
    assert diff_paths(diff) == ("x.py",)
    git(tmp_path, "init", "-q")
    (tmp_path / "x.py").write_text(before)
    git(tmp_path, "apply", "-", given=diff)
    assert (tmp_path / "x.py").read_text() == after
    assert file_diff("x.py", before, before) == ""


def test_a_long_diff_is_cut_and_says_so() -> None:
    assert shortened("+" * 10, 10) == "+" * 10
    assert shortened("+" * 12, 10) == "+" * 10 + "\n[2 more characters]\n"
