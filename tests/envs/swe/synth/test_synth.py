"""The whole way on a tiny package: its tests are run, edits judged, rows written, read and graded."""

import argparse
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe import repository
from agentenv_envs.swe.data import load_tasks
from agentenv_envs.swe.grading import grade
from agentenv_envs.swe.package_folder import PackageFolder
from agentenv_envs.swe.sandbox import Sandbox, SandboxSpec, open_backend
from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.synth import release as release_module
from agentenv_envs.swe.synth.command import add_synth
from agentenv_envs.swe.synth.issue import leaks
from agentenv_envs.swe.synth.release import Release, find_release
from agentenv_envs.swe.synth.rows import RowFile
from agentenv_envs.swe.synth.search import search

SHOP = Release("shop==1.0", ("pytest",), ".")
HERE = ["--sandbox", "local-unisolated", "--allow-unisolated"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_synth(parser.add_subparsers())
    args = parser.parse_args(["synth", *arguments])
    return int(args.run(args))


@pytest.fixture
def synth(installed_shop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, on a release that needs no index."""
    monkeypatch.setattr(
        repository, "ensure_package_folder", lambda task, progress: PackageFolder(installed_shop)
    )
    monkeypatch.setattr(release_module, "find_release", lambda *arguments: SHOP)
    return lambda output, *options: run("shop==1.0", "--output", str(output), *HERE, *options)


def test_rows_are_tasks_and_the_same_ones_each_time(
    synth: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    assert synth(output, "--number", "2", "--workers", "1") == 0
    assert capsys.readouterr().out.startswith(f"{output}: 2 rows of shop==1.0, 2 of them new, in ")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    sources = [
        (tmp_path / "installed/repository" / name).read_text() for name in ("shop.py", "tests/test_shop.py")
    ]
    tests = {"test_total_of_prices[prices0-0]", "test_total_of_prices[prices1-3]", "TestSpin::test_end"}
    tests |= {"test_a_discount_is_never_more_than_the_total", "test_nothing"}
    backend = open_backend("local-unisolated")
    try:
        for row, task in zip(rows, load_tasks(output), strict=True):
            assert {i.partition("::")[2] for i in task.test_ids} == tests
            assert task.fail_to_pass
            assert any(i.endswith("test_nothing") for i in task.pass_to_pass)
            assert row["synth"]["function"] in ("total", "spin")
            assert leaks(task.problem_statement, sources) == []
            assert "shop.py" not in task.problem_statement
            assert "--- a/shop.py" in task.patch
            assert "shop.py" not in task.test_patch.replace("test_shop.py", "")
        task = load_tasks(output)[0]
        assert grade(task, task.patch, backend).status == "resolved"
        assert grade(task, "", backend).status == "failed"
        # The tests that find the bug are not in the agent's repository.
        sandbox = repository.open_workspace(task, backend)
        name = task.fail_to_pass[0].split("::")[-1].partition("[")[0]
        assert sandbox.run(f"grep -rn {name} .").exit_code == 1
        backend.release(sandbox)
    finally:
        backend.close()
    again = tmp_path / "again.jsonl"
    assert synth(again, "--number", "1", "--workers", "2") == 0
    assert synth(again, "--number", "2", "--workers", "2") == 0  # goes on
    assert "1 of them new" in capsys.readouterr().out.splitlines()[-1]
    assert [json.loads(line)["patch"] for line in again.read_text().splitlines()] == [
        r["patch"] for r in rows
    ]


def test_a_search_that_runs_out_of_edits_says_so(
    synth: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "installed/repository/shop.py").write_text(
        "def total(prices, discount=0):\n    return 0 * 1\n"
    )
    assert synth(tmp_path / "rows.jsonl") == 1
    assert "edits are judged" in capsys.readouterr().err


def test_a_release_without_a_stable_test_is_refused(synth: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "installed/repository/tests/test_shop.py").write_text("def test_a():\n    assert 0\n")
    with pytest.raises(UsageError, match="no test passes each time: 1 ran, 0 passed at first"):
        synth(tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shop"], "shop: neither a folder nor of the form name==version"),
        (["shop==1.0", "--number", "0"], "--number 0: at least 1 is needed"),
        (["shop==1.0", "--workers", "0"], "--workers 0: at least 1 is needed"),
        (["shop==1.0", "--install", "-r x"], "--install '-r x': must be a requirement"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments, "--output", str(tmp_path / "rows.jsonl"), *HERE)


@pytest.mark.parametrize("output", ["rows.json", "missing/rows.jsonl"])
def test_an_output_that_can_not_be_is_refused(tmp_path: Path, output: str) -> None:
    with pytest.raises(UsageError, match="--output"):
        run("shop==1.0", "--output", str(tmp_path / output), *HERE)


def test_code_runs_without_isolation_only_where_two_options_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--allow-unisolated does so all the same"):
        run("shop==1.0", "--output", str(tmp_path / "rows.jsonl"), "--sandbox", "local-unisolated")
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_folder_is_packed_the_same_way_each_time_and_left_as_it_is(shop: Path, tmp_path: Path) -> None:
    (shop / "__pycache__").mkdir()
    (shop / "__pycache__" / "x.pyc").write_bytes(b"x")
    (shop / "outside").symlink_to("/etc/passwd")
    before = sorted(shop.rglob("*"))
    first = find_release(str(shop), [], None, tmp_path)
    second = find_release(str(shop), ["pytest<8"], None, tmp_path)
    assert (first.package, first.source_root, first.install) == ("shop==1.0", ".", ("pytest<9",))
    assert second.install == ("pytest<8",)
    assert sorted(shop.rglob("*")) == before
    assert first.archive is not None
    assert first.archive == second.archive
    assert first.digest == second.digest
    with tarfile.open(first.archive) as archive:
        assert archive.getnames() == [
            f"source/{name}" for name in ("backend.py", "pyproject.toml", "shop.py", "tests/test_shop.py")
        ]
    (shop / "shop.py").write_text("changed = True\n")
    assert find_release(str(shop), [], None, tmp_path).digest != first.digest


def opener(backend: LocalBackend, installed: Path, opened: list[Sandbox]) -> Callable[[], Sandbox]:
    """Opens sandboxes with the package, and lists them."""
    folder = PackageFolder(installed)
    spec = SandboxSpec(workdir="/testbed", memory_mb=4096, environment=folder.variables(SHOP.task()))

    def open_sandbox() -> Sandbox:
        opened.append(backend.acquire(spec))
        opened[-1].run(f"cp -a {folder.repository}/. .")
        return opened[-1]

    return open_sandbox


def test_an_interrupted_search_leaves_whole_rows_and_no_sandbox_at_once(
    installed_shop: Path, tmp_path: Path
) -> None:
    backend = LocalBackend()
    opened: list[Sandbox] = []
    open_sandbox = opener(backend, installed_shop, opened)

    def say(text: str) -> None:
        if "kept" in text:
            raise KeyboardInterrupt

    with RowFile(tmp_path / "rows.jsonl") as output, pytest.raises(KeyboardInterrupt):
        search(SHOP, open_sandbox, output, number=50, seed=0, workers=2, say=say)
    assert len(opened) == 2
    assert backend.left() == 0
    with RowFile(tmp_path / "rows.jsonl") as output:
        assert len(output.verdicts) >= len(output.rows) >= 1
    backend.close()


def test_a_sandbox_that_breaks_is_replaced_and_its_edit_judged(installed_shop: Path, tmp_path: Path) -> None:
    backend = LocalBackend()
    opened: list[Sandbox] = []
    open_sandbox = opener(backend, installed_shop, opened)

    def say(text: str) -> None:
        if "stable tests" in text:
            opened[0].close()

    with RowFile(tmp_path / "rows.jsonl") as output:
        found = search(SHOP, open_sandbox, output, number=1, seed=0, workers=1, say=say)
        assert (found.kept, len(output.rows)) == (1, 1)
        assert "the sandbox failed" not in output.verdicts.values()
    assert len(opened) == 2
    assert backend.left() == 0
    backend.close()
