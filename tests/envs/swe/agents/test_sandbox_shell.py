"""A shell and copies of files in a sandbox: what goes on from command to command, and what cannot leave."""

from pathlib import Path

import pytest

from agentenv_envs.swe.agents import sandbox_shell
from agentenv_envs.swe.agents.sandbox_shell import Copies, Sandbox, Shell

WORKDIR = "/testbed"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of this machine that stands for the sandbox's workdir."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def sandbox(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Commands run in `home`, as an unisolated sandbox runs them."""
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\nfor last in "$@"; do :; done\ncd {home} && exec bash -c "$last"\n')
    docker.chmod(0o700)
    monkeypatch.setenv("DOCKER", str(docker))
    return Sandbox(WORKDIR)


@pytest.fixture
def copies(sandbox: Sandbox, tmp_path: Path) -> Copies:
    return Copies(sandbox, tmp_path / "copies")


def test_working_directory_and_exported_variables_go_on(sandbox: Sandbox, home: Path) -> None:
    (home / "inner").mkdir()
    shell = Shell(sandbox)
    first = shell.run("cd inner; export COLOUR=\"dark 'red'\"; plain=1; echo out; echo err >&2; exit 3")
    assert (first.exit_code, first.output, first.cwd) == (3, "out\nerr", "/testbed/inner")
    second = shell.run('echo "$COLOUR,$plain"; pwd')
    assert second.output == f"dark 'red',\n{home}/inner"
    shell.reset()
    assert shell.run('echo "$COLOUR"').output == "" and shell.cwd == WORKDIR


def test_a_command_that_says_nothing_of_its_end_leaves_the_shell_as_it_was(sandbox: Sandbox) -> None:
    shell = Shell(sandbox)
    shell.run("export KEPT=1")
    killed = shell.run("export KEPT=2; echo so far; kill -9 $$")
    assert killed.exit_code != 0 and killed.output == "so far\n" and killed.cwd == WORKDIR
    assert shell.run("trap - EXIT; echo own").output == "own\n"
    assert shell.run("if").exit_code == 2
    assert shell.run("echo $KEPT").output == "1"


def test_a_folder_that_is_gone_is_said(sandbox: Sandbox, home: Path) -> None:
    shell = Shell(sandbox)
    shell.run("mkdir gone && cd gone && rmdir ../gone")
    lost = shell.run("ls")
    assert lost.exit_code == 126 and "No such file" in lost.output


def test_a_file_is_copied_and_written_back(
    sandbox: Sandbox, home: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_shell, "CHUNK", 8)
    (home / "a b.py").write_bytes(b"x = '\xff'\n")
    place = copies.fetch("/testbed/./c/../a b.py")
    assert place.read_bytes() == b"x = '\xff'\n" and str(place) == f"{copies.folder}/testbed/a b.py"
    copies.store("/testbed/a b.py", b"first\nand second line\n")
    assert (home / "a b.py").read_bytes() == b"first\nand second line\n"
    copies.store("/testbed/a b.py", b"")
    assert (home / "a b.py").read_bytes() == b""


def test_a_folder_is_copied_by_its_names(home: Path, copies: Copies) -> None:
    (home / "one" / "two" / "three").mkdir(parents=True)
    (home / "one" / "file").write_text("long")
    place = copies.fetch(WORKDIR)
    names = sorted(str(item.relative_to(place)) for item in place.rglob("*"))
    assert names == ["one", "one/file", "one/two"] and (place / "one" / "file").read_text() == ""


def test_what_is_not_there_can_be_made_where_its_folder_is(copies: Copies) -> None:
    assert copies.fetch("/testbed/new").parent.is_dir() and not copies.fetch("/testbed/new").exists()
    assert not copies.fetch("/testbed/no/new").parent.exists()


def test_no_path_leads_out_of_the_folder_of_the_copies(home: Path, copies: Copies, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for path in (f"/../../..{tmp_path}/secret", f"/testbed/../..{tmp_path}/secret", f"//{tmp_path}/secret"):
        place = copies.fetch(path)
        assert place.is_relative_to(copies.folder) and ".." not in place.parts
    # What a link in the sandbox leads to is read there; the copy is no link.
    (home / "link").symlink_to("/etc")
    place = copies.fetch("/testbed/link")
    assert place.is_dir() and not place.is_symlink()
    assert not any(item.is_symlink() for item in copies.folder.rglob("*"))


def test_what_cannot_be_edited_is_named(home: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_shell, "MAX_FILE_BYTES", 3)
    (home / "large").write_text("four")
    (home / "dir").mkdir()
    with pytest.raises(ValueError, match="Maybe you meant /testbed/app"):
        copies.fetch("app")
    with pytest.raises(ValueError, match="too large"):
        copies.fetch("/testbed/large")
    with pytest.raises(ValueError, match="cannot be written"):
        copies.store("/testbed/dir", b"x")


def test_names_of_files_are_not_read_by_the_shell(home: Path, copies: Copies) -> None:
    name = "$(touch made)`touch made`'\"; touch made"
    (home / name).write_text("text")
    assert copies.fetch(f"/testbed/{name}").read_text() == "text"
    copies.store(f"/testbed/{name}", b"other")
    assert (home / name).read_text() == "other" and not (home / "made").exists()
