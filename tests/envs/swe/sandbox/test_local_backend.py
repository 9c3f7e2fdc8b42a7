"""Sandboxes that isolate nothing, for machines without an engine."""

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.sandbox import CommandResult, Sandbox, SandboxBackend, SandboxSpec, open_backend
from agentenv_envs.swe.sandbox import local_backend as module
from agentenv_envs.swe.sandbox.local_backend import LocalBackend, LocalSandbox

SPEC = SandboxSpec(read_only=True)


@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    backend = LocalBackend()
    yield backend
    backend.close()


@pytest.fixture
def sandbox(backend: LocalBackend) -> LocalSandbox:
    return backend.acquire(SPEC)


def ends(text: str) -> bool:
    """Whether no process has the text in its command, or soon none has: what was killed ends in its own time."""
    deadline = time.monotonic() + 20
    while subprocess.run(["pgrep", "-f", text], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_it_offers_what_the_protocols_ask_for(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    assert isinstance(backend, SandboxBackend)
    assert isinstance(sandbox, Sandbox)
    assert sandbox.kind == backend.kind == "local-unisolated"


def test_it_says_loudly_and_once_that_it_isolates_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module._warned.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            LocalBackend().close()
    assert [record.message.count("ISOLATES NOTHING") for record in caplog.records] == [1]


def test_a_command_runs_in_a_private_folder_with_a_clean_environment(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    result = sandbox.run("pwd; echo oops >&2; read -r x; env | grep -c SECRET; exit 3")
    assert (result.output, result.exit_code) == (f"{sandbox.workdir}\noops\n0\n", 3)
    assert sandbox.run("python -c 'import sys; print(sys.version_info >= (3, 11))'").output == "True\n"


def test_files_below_the_workdir_are_mapped_and_others_refused(sandbox: LocalSandbox) -> None:
    sandbox.write_files({"a/b.txt": "1", "/work/c": b"\0\xff", "/tmp/d": "4"})
    assert sandbox.run("cat a/b.txt; cat $TMPDIR/d").output == "14"
    assert sandbox.read_file("/work/c") == b"\0\xff"
    assert sandbox.read_file("c", max_bytes=1) == b"\0"
    with pytest.raises(FileNotFoundError):
        sandbox.read_file("nothing")
    for path in ("/etc/passwd", "../../etc/passwd"):
        with pytest.raises(OSError, match="the only paths"):
            sandbox.read_file(path)


def test_a_link_does_not_lead_what_is_written_out_of_the_sandbox(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    sandbox.run(
        f"ln -s {outside} file; ln -s {tmp_path} folder; mkdir inner; ln -s inner linked", timeout_s=20
    )
    for path in ("file", "folder/outside"):
        with pytest.raises(OSError, match="leads out of the sandbox"):
            sandbox.write_files({path: "changed"})
    assert outside.read_text() == "as it was"
    sandbox.write_files({"linked/new": "inside"})
    assert sandbox.read_file("inner/new") == b"inside"


def test_long_output_comes_back_as_head_and_tail(sandbox: LocalSandbox) -> None:
    result = sandbox.run("seq 1 10000", half_bytes=10)
    assert result.total_bytes == 48894
    assert result.output == "1\n2\n3\n4\n5\n\n[... 48874 bytes left out ...]\n999\n10000\n"
    endless = sandbox.run("yes", timeout_s=30, half_bytes=10)
    assert endless.exit_code != 0
    assert endless.total_bytes <= 64 << 20


def test_a_time_limit_ends_all_that_the_command_started(
    sandbox: LocalSandbox, run_cut: Callable[..., CommandResult]
) -> None:
    started = time.monotonic()
    command = "setsid sleep 98761 & sleep 98761 & trap '' TERM; echo a; sleep 98761; sleep 98761"
    result = run_cut(sandbox, command)
    assert (result.output, result.exit_code, result.timed_out) == ("a\n", 124, True)
    assert time.monotonic() - started < 100
    assert ends("sleep 98761")


def test_memory_and_file_size_are_limited(backend: LocalBackend) -> None:
    sandbox = backend.acquire(SandboxSpec(read_only=True, memory_mb=256, writable_mb=40))
    assert "MemoryError" in sandbox.run("python -c 'x = bytearray(10**9)'").output
    assert sandbox.run("head -c 100M /dev/zero > x").exit_code != 0


def test_a_reset_leaves_neither_files_nor_processes(sandbox: LocalSandbox) -> None:
    sandbox.run(
        "setsid sleep 98762 & mkdir -p a/b; touch .c a/b/d; chmod 0 a/b a; cp .c $HOME; cp .c $TMPDIR"
    )
    sandbox.reset({"new": "1"})
    assert sandbox.run("ls -A . $HOME $TMPDIR | grep -v :").output.split() == ["new"]
    assert ends("sleep 98762")
    with pytest.raises(SandboxError, match="read_only=True"):
        LocalBackend().acquire(SandboxSpec()).reset()


def test_signals_are_reported_as_a_shell_does(sandbox: LocalSandbox) -> None:
    assert sandbox.run("kill -9 $$").exit_code == 137
    assert sandbox.run("x=" + "a" * 200_000 + "; echo ${#x}").output == "200000\n"
    assert sandbox.run("echo a\0b").exit_code == 126


def test_closing_removes_every_folder_and_process(backend: LocalBackend) -> None:
    sandbox = backend.acquire(SPEC)
    sandbox.run("setsid sleep 98763 &")
    folder: Path = sandbox.workdir.parent
    assert backend.left() == 1
    backend.release(sandbox)
    assert backend.left() == 0
    assert not folder.exists()
    assert ends("sleep 98763")
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("true")
    backend.close()
    with pytest.raises(SandboxError, match="closed"):
        backend.acquire(SPEC)


def test_a_command_that_starts_while_another_thread_closes_its_sandbox_is_killed(
    backend: LocalBackend,
) -> None:
    def run(sandbox: LocalSandbox) -> None:
        with suppress(SandboxError, OSError):
            sandbox.run("sleep 150", timeout_s=150.0)

    for number in range(20):  # the moment is a matter of a few milliseconds
        sandbox = backend.acquire(SandboxSpec())
        thread = threading.Thread(target=run, args=(sandbox,))
        thread.start()
        time.sleep(number / 5000)
        sandbox.close()
        thread.join(60.0)
        assert not thread.is_alive()


def test_folders_of_dead_owners_are_reaped(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"agentenv-local-{dead.pid}-x").mkdir()
    (tmp_path / "agentenv-local-1-x").mkdir()
    assert backend.reap() == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["agentenv-local-1-x"]


def test_an_image_cannot_be_had_without_an_engine(backend: LocalBackend) -> None:
    with pytest.raises(UsageError, match="has no images"):
        backend.acquire(SandboxSpec(image="python:3.12"))


def test_without_an_engine_auto_falls_back_with_a_warning_and_docker_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with caplog.at_level(logging.WARNING):
        handle = open_backend("auto")
    assert handle.kind == "local-unisolated"
    assert "without isolation" in caplog.text
    handle.close()
    pytest.importorskip("docker")
    with pytest.raises(UsageError, match="no Docker engine answers"):
        open_backend("docker")


def test_an_unknown_kind_is_the_user_s_mistake() -> None:
    with pytest.raises(UsageError, match="sandbox='podman': one of auto, docker, local-unisolated"):
        open_backend("podman")
