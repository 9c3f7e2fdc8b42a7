"""The door to a sandbox: a command line like Docker's, for programs beside it."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.agents.door import SandboxDoor
from agentenv_envs.swe.sandbox import Sandbox, SandboxSpec
from agentenv_envs.swe.sandbox.local_backend import LocalBackend


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    backend = LocalBackend()
    lent = backend.acquire(SandboxSpec(workdir="/work", read_only=True))
    yield lent
    backend.close()


@pytest.fixture
def door(sandbox: Sandbox) -> Iterator[SandboxDoor]:
    opened = SandboxDoor(sandbox, command_timeout_s=60.0, deadline=time.monotonic() + 120.0)
    yield opened
    opened.close()


def _call(door: SandboxDoor, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [door.executable, *argv],
        env={**os.environ, **door.variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_container_that_is_run_is_the_sandbox(door: SandboxDoor) -> None:
    name = _call(
        door, "run", "-d", "--name", "x", "-w", "/work", "--rm", "image", "sleep", "2h"
    ).stdout.strip()
    done = _call(
        door, "exec", "-w", "/work", "-e", "A=b c", name, "bash", "-lc", "echo $A > f; cat f; exit 3"
    )
    assert (done.stdout, done.returncode) == ("b c\n", 3)
    assert _call(door, "exec", name, "cat", "f").stdout == "b c\n"
    assert _call(door, "stop", name).returncode == 0
    assert _call(door, "exec", name, "cat", "f").stdout == "b c\n"
    assert door.commands == 3


def test_what_the_agent_writes_is_in_the_sandbox(door: SandboxDoor, sandbox: Sandbox) -> None:
    _call(door, "exec", "-i", "x", "bash", "-c", "printf 'it''s' > app.py")
    assert sandbox.read_file("app.py") == b"its"


def test_arguments_are_taken_as_they_are(door: SandboxDoor) -> None:
    assert _call(door, "exec", "x", "printf", "%s|", "a b", "$HOME", "'").stdout == "a b|$HOME|'|"


def test_a_command_may_start_elsewhere(door: SandboxDoor) -> None:
    assert _call(door, "exec", "-w", "/", "x", "bash", "-c", "pwd").stdout == "/\n"
    assert _call(door, "exec", "-w", "/no/such", "x", "bash", "-c", "pwd").returncode == 126


def test_a_command_that_runs_too_long_is_a_result(sandbox: Sandbox) -> None:
    for limit_s in (0.5, 4.0, 30.0):  # longer where the command did not come to its first line
        door = SandboxDoor(sandbox, command_timeout_s=limit_s, deadline=time.monotonic() + 120.0)
        try:
            done = _call(door, "exec", "x", "bash", "-c", "echo before; sleep 60")
        finally:
            door.close()
        if "before" in done.stdout:
            break
    assert done.returncode == 124 and "before" in done.stdout and "timed out" in done.stdout


def test_no_command_runs_after_the_deadline(sandbox: Sandbox) -> None:
    door = SandboxDoor(sandbox, command_timeout_s=5.0, deadline=time.monotonic() - 1.0)
    try:
        assert "the time is over" in _call(door, "exec", "x", "touch", "f").stdout
        assert door.commands == 0
    finally:
        door.close()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), "is not supported"),
        (("build", "."), "'build' is not supported"),
        (("exec", "--privileged", "x", "id"), "--privileged"),
        (("exec", "x"), "a command are needed"),
    ],
)
def test_what_the_door_does_not_do_is_said(door: SandboxDoor, argv: tuple[str, ...], named: str) -> None:
    done = _call(door, *argv)
    assert done.returncode == 125 and named in done.stderr


def test_a_closed_door_leaves_nothing(sandbox: Sandbox) -> None:
    door = SandboxDoor(sandbox, command_timeout_s=60.0, deadline=time.monotonic() + 120.0)
    door.close()
    door.close()
    assert not door.folder.exists()


def test_a_sandbox_that_broke_is_kept_as_an_error(door: SandboxDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise SandboxError("gone")

    monkeypatch.setattr(type(door._sandbox), "run", run)
    assert _call(door, "exec", "x", "id").returncode == 125
    assert isinstance(door.error, SandboxError)


def test_the_folder_is_private(door: SandboxDoor) -> None:
    assert Path(door.folder).stat().st_mode & 0o077 == 0
