"""What of an agent's patch is graded."""

import difflib

import pytest

from agentenv_envs.swe.repository import apply_agent_patch, is_protected, workspace_patch
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.local_backend import LocalBackend

TEST_FILES = ("tests/unit/test_a.py", "pkg/tests/test_b.py", "checks/check_c.py", "test_root.py")


@pytest.mark.parametrize(
    "path",
    [
        "tests/unit/test_a.py",
        "tests/helpers.py",
        "tests",
        "pkg/tests/data/x.json",
        "checks/check_c.py",
        "test_root.py",
        "test_root/__init__.py",
        "checks/check_c.cpython-312-x86_64-linux-gnu.so",
        "checks/check_c",
        "conftest.py",
        "src/pkg/conftest.py",
        "pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sub/pyproject.toml",
        "src/sitecustomize.py",
        "src/sitecustomize/__init__.py",
        "usercustomize.py",
        "src/x.pth",
        "src/pkg/__pycache__/a.cpython-311.pyc",
        "src/pkg/a.pyc",
        "src/evil.egg-info/entry_points.txt",
        "src/evil-1.dist-info/entry_points.txt",
    ],
)
def test_what_decides_how_tests_run_is_protected(path: str) -> None:
    assert is_protected(path, TEST_FILES)


@pytest.mark.parametrize(
    "path",
    [
        "src/pkg/code.py",
        "pkg/code.py",
        "pkg/testing.py",
        "pkg/tests.py",
        "checks/other.py",
        "test_root_2.py",
        "setup.py",
        "src/pytest_plugin.py",
        "other/tests/test_x.py",
        "tests2/a.py",
        "docs/conftest.rst",
    ],
)
def test_everything_else_is_the_agents_to_change(path: str) -> None:
    assert not is_protected(path, TEST_FILES)


def test_a_patch_that_is_not_where_git_was_told_to_write_it_is_no_patch() -> None:
    backend = LocalBackend()
    try:
        sandbox = backend.acquire(SandboxSpec(read_only=True, environment={"PATH": "bin:/usr/bin:/bin"}))
        # As an agent could: a `git` that does nothing and a `stat` that names a size.
        sandbox.write_files({"bin/git": "", "bin/stat": "rm -rf .git; echo 5"})
        sandbox.run("mkdir .git; chmod +x bin/*")
        assert workspace_patch(sandbox) == ""
    finally:
        backend.close()


def test_new_files_in_the_place_of_installed_modules_are_left_out() -> None:
    added = {
        "hypothesis.py": False,
        "src/yaml/__init__.py": False,
        "unit/random.py": False,  # the first folder above the test that is no package
        "json.cpython-311-x86_64-linux-gnu.so": False,
        "time.py": False,
        "test.py": False,
        "helper.py": True,
        "src/pkg/random.py": True,
        "unit/checks/random.py": True,
        "docs/random.py": True,
        "src/new/__init__.py": True,
        "odd 'name.py": True,
    }
    backend = LocalBackend()
    try:
        sandbox = backend.acquire(SandboxSpec(read_only=True, memory_mb=2000))
        base = ["unit/checks/__init__.py", "unit/checks/test_it.py", "src/pkg/__init__.py", "csv.py"]
        sandbox.write_files(dict.fromkeys(base, "x = 1\n"))
        assert (
            sandbox.run(
                "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm Base"
            ).exit_code
            == 0
        )
        patch = "".join(
            "".join(difflib.unified_diff([], ["x = 2\n"], "/dev/null", f"b/{path}")) for path in added
        )
        patch += "".join(difflib.unified_diff(["x = 1\n"], ["x = 2\n"], "a/csv.py", "b/csv.py"))
        problem, restored = apply_agent_patch(sandbox, patch, ["unit/checks/test_it.py"])
        assert problem is None
        assert set(restored) == {path for path, kept in added.items() if not kept}
        there = sandbox.run("git ls-files --others; git diff --name-only").output.splitlines()
        assert set(there) == {*(path for path, kept in added.items() if kept), "csv.py"}
    finally:
        backend.close()
