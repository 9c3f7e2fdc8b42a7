"""Images of package rows: names, editable wheels, and (with Docker) what a built image holds."""

import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.data import SWETask, load_tasks
from agentenv_envs.swe.package_image import ensure_task_image, package_image_tag
from agentenv_envs.swe.package_wheels import TargetPython, editable_wheel, fetch_package, requirements
from agentenv_envs.swe.sandbox import SandboxBackend, SandboxSpec, open_backend

FIXTURE = Path(__file__).parent / "fixtures" / "package_rows.jsonl"


@pytest.fixture(scope="module")
def task() -> SWETask:
    return load_tasks(FIXTURE)[0]


@pytest.fixture(scope="module")
def docker_backend() -> Iterator[SandboxBackend]:
    backend = open_backend("docker")
    yield backend
    backend.close()


def test_equal_recipes_have_equal_tags_and_others_have_others(task: SWETask) -> None:
    tag = package_image_tag(task, "base")
    assert tag.startswith("agentenv/swe-inflection:0.5.1-")
    assert package_image_tag(replace(task, instance_id="x", patch="p", test_patch="t"), "base") == tag
    for change in ({"package": "inflection==0.5.0"}, {"install": ("pytest<7",)}, {"source_root": "src"}):
        assert package_image_tag(replace(task, **change), "base") != tag
    assert package_image_tag(task, "another base") != tag


def test_pytest_is_installed_where_a_row_forgot_it(task: SWETask) -> None:
    assert requirements(replace(task, install=("pytz", "pytest-mock>3"))) == [
        "pytz",
        "pytest-mock>3",
        "pytest",
    ]
    assert requirements(replace(task, install=("PyTest<8",))) == ["PyTest<8"]


def test_an_editable_wheel_keeps_metadata_and_leads_to_the_source(tmp_path: Path) -> None:
    real = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(real, "w") as archive:
        archive.writestr("pkg/__init__.py", "")
        archive.writestr("pkg-1.0.dist-info/METADATA", "Name: pkg\n")
        archive.writestr("pkg-1.0.dist-info/entry_points.txt", "[console_scripts]\n")
        archive.writestr("pkg-1.0.data/scripts/run", "#!python\n")
        archive.writestr("pkg-1.0.dist-info/RECORD", "pkg/__init__.py,,\n")
    (tmp_path / "out").mkdir()
    path = editable_wheel(real, tmp_path / "out", "/testbed/src")
    assert path.name == real.name
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == [
            "__editable__.pkg-1.0.pth",
            "pkg-1.0.data/scripts/run",
            "pkg-1.0.dist-info/METADATA",
            "pkg-1.0.dist-info/RECORD",
            "pkg-1.0.dist-info/entry_points.txt",
        ]
        assert archive.read("__editable__.pkg-1.0.pth") == b"/testbed/src\n"
        record = archive.read("pkg-1.0.dist-info/RECORD").decode().splitlines()
    assert len(record) == 5
    assert record[-1] == "pkg-1.0.dist-info/RECORD,,"
    # sha256 of "/testbed/src\n", urlsafe base64 without padding, and its length
    assert "__editable__.pkg-1.0.pth,sha256=" in record[-2]
    assert record[-2].endswith(",13")


def test_wheels_for_another_python_are_asked_for_by_name() -> None:
    target = TargetPython((3, 9), "x86_64", (2, 28))
    assert not target.is_host
    options = target.pip_options()
    assert options[options.index("--python-version") + 1] == "3.9"
    platforms = [options[at + 1] for at, option in enumerate(options) if option == "--platform"]
    assert platforms[0] == "manylinux_2_28_x86_64"
    assert "manylinux2014_x86_64" in platforms
    assert "manylinux_2_29_x86_64" not in platforms


def test_the_host_is_its_own_target() -> None:
    assert TargetPython.of_host().is_host is (sys.platform == "linux")


def fake_pip(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_failure_of_pip_is_a_sandbox_error_with_the_tail_of_its_output(
    task: SWETask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, "seq 100; echo 'ERROR: no such release'; exit 1", monkeypatch)
    with pytest.raises(SandboxError) as caught:
        fetch_package(task, TargetPython((3, 12), "x86_64", (2, 36)), tmp_path / "out")
    message = str(caught.value)
    assert "inflection-0.5.1__camelize-empty: pip download for inflection==0.5.1 failed" in message
    assert message.endswith("ERROR: no such release")
    assert "| 80 |" not in message


def release(folder: Path, wheel_name: str) -> str:
    """Files of a release, and a script that hands them out as pip would."""
    with zipfile.ZipFile(folder / wheel_name, "w") as archive:
        archive.writestr("inflection/__init__.py", "")
        archive.writestr("inflection-0.5.1.dist-info/RECORD", "")
    with zipfile.ZipFile(folder / "inflection-0.5.1.zip", "w") as archive:
        archive.writestr("inflection-0.5.1/src/inflection/__init__.py", "")
    return f"""command=$5
while [ $# -gt 1 ]; do
  case $1 in --dest | --wheel-dir) folder=$2 ;; esac
  shift
done
mkdir -p "$folder"
case $command in
  download) cp {folder}/*.zip "$folder" ;;
  wheel) cp {folder}/*.whl "$folder" ;;
esac"""


def test_fetching_gives_the_source_and_an_editable_wheel(
    task: SWETask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, release(tmp_path, "inflection-0.5.1-py3-none-any.whl"), monkeypatch)
    fetched = fetch_package(replace(task, source_root="src"), TargetPython.of_host(), tmp_path / "out")
    assert fetched.sdist == tmp_path / "out" / "sdist" / "inflection-0.5.1.zip"
    (wheel,) = fetched.wheels
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("__editable__.inflection-0.5.1.pth") == b"/testbed/src\n"


@pytest.mark.parametrize("source_root", [".", "lib"])
def test_a_source_root_without_the_package_is_refused(
    task: SWETask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_root: str
) -> None:
    fake_pip(tmp_path, release(tmp_path, "inflection-0.5.1-py3-none-any.whl"), monkeypatch)
    message = rf"field 'source_root': '{source_root}' does not hold inflection/__init__.py"
    with pytest.raises(UsageError, match=message):
        fetch_package(replace(task, source_root=source_root), TargetPython.of_host(), tmp_path / "out")


def test_a_package_with_compiled_parts_is_refused(
    task: SWETask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, release(tmp_path, "inflection-0.5.1-cp311-cp311-linux_x86_64.whl"), monkeypatch)
    with pytest.raises(SandboxError, match="builds compiled code; package rows must be pure Python"):
        fetch_package(replace(task, source_root="src"), TargetPython.of_host(), tmp_path / "out")


def test_a_back_end_without_images_is_refused(task: SWETask) -> None:
    backend: Any = SimpleNamespace(kind="local-unisolated")
    with pytest.raises(UsageError, match="needs the docker sandbox, got 'local-unisolated'"):
        ensure_task_image(task, backend)


@pytest.mark.docker
def test_a_built_image_holds_the_repository_with_one_commit_and_no_hidden_test(
    task: SWETask, docker_backend: SandboxBackend
) -> None:
    tag = ensure_task_image(task, docker_backend)
    sandbox = docker_backend.acquire(SandboxSpec(image=tag, workdir=task.workdir))
    try:
        assert sandbox.run("git rev-list --all --count").output == "1\n"
        assert sandbox.run("git status --porcelain --ignored").output == ""
        assert sandbox.run("ls / /testbed | grep -c 'build$\\|issue'").output == "0\n"
        imported = sandbox.run("cd / && python -c 'import inflection; print(inflection.__file__)'").output
        assert imported == "/testbed/inflection/__init__.py\n"
        version = "from importlib.metadata import version; print(version('inflection'))"
        assert sandbox.run(f'python -c "{version}"').output == "0.5.1\n"
        assert sandbox.run("python -m pytest --version").output.startswith("pytest 7.")
        assert sandbox.run("python -m pytest -q -p no:cacheprovider | tail -1").output.split()[1] == "passed"
    finally:
        docker_backend.release(sandbox)


@pytest.mark.docker
def test_an_image_that_is_there_is_used_again(
    task: SWETask, docker_backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tag = ensure_task_image(task, docker_backend)
    fake_pip(tmp_path, "exit 1", monkeypatch)
    steps: list[str] = []
    assert ensure_task_image(replace(task, instance_id="x"), docker_backend, progress=steps.append) == tag
    assert steps == []


@pytest.mark.docker
def test_an_image_that_can_not_be_pulled_is_a_sandbox_error(
    task: SWETask, docker_backend: SandboxBackend
) -> None:
    row = replace(task, package=None, image="localhost:1/none:latest")
    with pytest.raises(SandboxError, match=r"localhost:1/none:latest can't be pulled"):
        ensure_task_image(row, docker_backend)
