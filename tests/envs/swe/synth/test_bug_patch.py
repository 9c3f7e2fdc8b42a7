"""Rows whose bug is brought in: how they are read, and what their repository shows."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe import repository
from agentenv_envs.swe.data import parse_task
from agentenv_envs.swe.package_folder import PackageFolder
from agentenv_envs.swe.package_image import package_image_tag
from agentenv_envs.swe.repository import open_workspace
from agentenv_envs.swe.sandbox.local_backend import LocalBackend

BUG = "--- a/pkg.py\n+++ b/pkg.py\n@@ -1 +1 @@\n-VALUE = 'right'\n+VALUE = 'wrong'\n"
ROW = {
    "instance_id": "pkg-1.0__synth-1",
    "package": "pkg==1.0",
    "install": [],
    "source_root": ".",
    "problem_statement": "Wrong value.",
    "patch": "-",
    "test_patch": "-",
    "bug_patch": BUG,
    "FAIL_TO_PASS": ["tests/test_pkg.py::test_value"],
    "PASS_TO_PASS": [],
}


def parse(tmp_path: Path, **changes: Any) -> Any:
    return parse_task({**ROW, **changes}, source=str(tmp_path / "rows.jsonl"), where="line 1")


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release in a folder, in place of one that pip fetches."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pkg.py").write_text("VALUE = 'right'\n")
    (folder / ".gitignore").write_text("data.txt\n")
    (folder / "data.txt").write_text("shipped, though ignored\n")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "Import"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(
        repository, "ensure_package_folder", lambda task, progress: PackageFolder(folder.parent)
    )
    return folder


def test_the_repository_has_the_bug_and_no_object_with_the_fix(tmp_path: Path, release: Path) -> None:
    backend = LocalBackend()
    try:
        sandbox = open_workspace(parse(tmp_path), backend)
        assert sandbox.read_file("pkg.py") == b"VALUE = 'wrong'\n"
        assert len(sandbox.run("git log --all --format=%H").output.split()) == 1
        assert sandbox.run("git status --porcelain").output == ""
        assert sandbox.run("git ls-files").output.split() == [".gitignore", "data.txt", "pkg.py"]
        every = "git cat-file --batch-all-objects --batch; find .git -type f -exec cat {} +"
        shown = sandbox.run(every, half_bytes=100_000).output
        assert "'wrong'" in shown
        assert "'right'" not in shown
        backend.release(sandbox)
    finally:
        backend.close()


def test_a_bug_patch_that_does_not_apply_is_an_error_and_leaves_no_sandbox(
    tmp_path: Path, release: Path
) -> None:
    backend = LocalBackend()
    try:
        with pytest.raises(SandboxError, match="does not apply"):
            open_workspace(parse(tmp_path, bug_patch=BUG.replace("right", "other")), backend)
        assert backend.left() == 0
    finally:
        backend.close()


def test_an_archive_is_found_beside_the_rows_and_changes_the_image(tmp_path: Path) -> None:
    (tmp_path / "pkg-1.0.tar.gz").write_bytes(b"one")
    task = parse(tmp_path, source_archive="pkg-1.0.tar.gz")
    assert task.source_archive == str(tmp_path / "pkg-1.0.tar.gz")
    tag = package_image_tag(task, "base")
    assert tag != package_image_tag(parse(tmp_path), "base")
    (tmp_path / "pkg-1.0.tar.gz").write_bytes(b"two")
    assert package_image_tag(task, "base") != tag


@pytest.mark.parametrize("value", ["missing.tar.gz", "../pkg.tar.gz", "/pkg.tar.gz", 3])
def test_an_archive_that_is_elsewhere_or_missing_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(UsageError, match=r"'pkg-1\.0__synth-1': field 'source_archive'"):
        parse(tmp_path, source_archive=value)
