"""What agents, engines and trainers do to sandboxes, and what must hold then.

A command is a result in bounded time, whatever it does; the sandbox serves the next one; after a reset nothing tells of
it. Only a container or an engine that is gone is an exception, and a typed one. More of the same is in
test_docker_commands.py (killed drivers, forged answers, time-outs), test_docker_reset.py (what a reset undoes) and
test_docker_backend.py (killed owners).
"""

import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.protocols import SUBMIT, as_action
from agentenv_envs.swe.sandbox import SandboxSpec, disk, driver
from agentenv_envs.swe.sandbox.base import EXIT_KILLED, EXIT_TIMED_OUT
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox

pytestmark = pytest.mark.docker

ENGINE = "/var/run/docker.sock"

# Takes every process that may be had, and takes again what becomes free.
FILL = """
import os, time
while True:
    try: os.fork()
    except OSError:
        open("/tmp/full", "w").close()
        time.sleep(0.01)
"""

STALL_S = 30.0
"""That a machine may stand still or be slow while a command is answered."""

# Each with seconds after which it must have been answered; the limit of the command is 3 s.
COMMANDS = {
    "out of memory": ("python -c 'x = bytearray(4 * 10**9)'", 10),
    "out of memory by files": ("head -c 900M /dev/zero >/tmp/a; cat /dev/zero | tail", 20),
    "a fork bomb in the foreground": ("bomb() { bomb | bomb; }; bomb", 25),
    "a fork bomb of python": ("python -c 'import os\nwhile True: os.fork()'", 25),
    "300 MB of output": ("head -c 300000000 /dev/zero", 10),
    "300 MB of lines to both streams": ("(yes | head -c 150M) & yes no | head -c 150M >&2; wait", 15),
    "everything killed": ("kill -9 -1", 10),
    "everything stopped": ("kill -STOP -1", 25),
    "everything terminated": ("kill -TERM -1; kill -HUP -1; sleep 1", 10),
    "all files removed": ("rm -rf --no-preserve-root / 2>/dev/null", 10),
    "all files removed as an agent would": ("cd /; rm -rf * .[a-z]* 2>/dev/null", 10),
    "a background process with our stdout": ("sleep 100 & setsid sleep 100 & disown -a; echo done", 5),
    "an unterminated document": ("cat <<EOF\nabc", 5),
    "an unterminated quote": ("echo 'abc", 5),
    "an interactive python": ("python -i; python", 5),
    "an editor": ("vi x; ed x; nano x; emacs x; true", 5),
    "a pager": ("git log | less; man ls; more /etc/passwd; top; true", 10),
    "a question": ("read -p 'sure? ' answer; select x in a b; do echo $x; done; passwd; su -c true", 5),
    "a shell": ("bash -i; sh; exec bash", 5),
    "binary output": ("head -c 200000 /dev/urandom; printf '\\1\\0\\1ok 0 0\\1'", 5),
    "terminal controls": ("printf '\\033c\\033[2J\\033]0;x\\007'; stty -a; tput reset; clear; true", 5),
    "no input and much of it": ("cat; cat /dev/stdin; cat <&1", 10),
    "a tight loop": ("while :; do :; done", 10),
    "many open files": ("python -c 'f = [open(\"/dev/null\") for _ in range(10**6)]'", 10),
    "deep recursion": ("f() { f; }; f", 30),
    "a closed output": ("exec >&- 2>&-; echo x; sleep 0.1", 5),
    "its output deleted": ("rm -rf /run/out; echo x", 5),
    "the message channel filled": ("yes >/run/out/full; echo x", 15),
}


@pytest.mark.parametrize(("command", "limit_s"), COMMANDS.values(), ids=COMMANDS.keys())
def test_a_hostile_command_is_a_result_in_time_and_the_sandbox_serves_on(
    sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch, command: str, limit_s: float
) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 2.0)
    started = time.monotonic()
    result = sandbox.run(command, timeout_s=3, half_bytes=1000)
    assert time.monotonic() - started < limit_s + STALL_S
    assert len(result.output) <= 2200
    sandbox.reset()
    assert sandbox.run("echo on; ls -A", timeout_s=60).output == "on\n"


def test_a_command_of_a_megabyte_runs_whole(sandbox: DockerSandbox) -> None:
    lines = "\n".join(f"x{number}={'v' * 90}" for number in range(10_400))
    assert len(lines) > 1_000_000
    assert sandbox.run(f"{lines}\necho $x10399").output == "v" * 90 + "\n"


@pytest.mark.parametrize("what", ["a command", "a file"])
def test_where_no_process_can_start_any_more_the_sandbox_is_swept_and_goes_on(
    sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 1.0)
    monkeypatch.setattr(driver, "OPEN_TIMEOUT_S", 3.0)
    sandbox.write_files({"app.py": "x = 1\n"})
    sandbox.write_files({"/tmp/fill.py": FILL})
    sandbox.run("setsid python /tmp/fill.py >/dev/null 2>&1 & while [ ! -e /tmp/full ]; do :; done")
    if what == "a command":
        assert sandbox.run("echo on", timeout_s=1).exit_code in (EXIT_TIMED_OUT, EXIT_KILLED)
    assert sandbox.read_file("app.py") == b"x = 1\n"
    assert sandbox.run("echo on; pgrep -c python").output == "on\n0\n"


def test_memory_that_runs_out_twice_costs_the_container(docker_backend: DockerBackend) -> None:
    spec = SandboxSpec(read_only=True, memory_mb=120)
    sandbox = docker_backend.acquire(spec)
    for _ in range(2):
        assert sandbox.run("exec python -c 'x = bytearray(10**9)'").exit_code == 137
    docker_backend.release(sandbox)
    following = docker_backend.acquire(spec)
    assert following.id != sandbox.id
    docker_backend.release(following)


def test_a_full_disk_is_the_command_s_failure_and_ends_with_its_files(sandbox: DockerSandbox) -> None:
    full = sandbox.run("for part in a b c d; do head -c 20M /dev/zero >big.$part; done", timeout_s=60)
    assert "No space left on device" in full.output
    with pytest.raises(OSError, match="cannot write"):
        sandbox.write_files({"more": b"x" * 1_000_000})
    assert sandbox.run("rm big.* more; echo x >small; cat small").output == "x\n"


def test_a_writable_root_is_bounded_and_usable_again_once_files_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "LOOK_S", 0.3)
    backend = DockerBackend()
    try:
        sandbox = backend.acquire(SandboxSpec(disk_mb=50))
        assert sandbox.run("head -c 30M /dev/zero >/small; sleep 1; echo fine").output == "fine\n"
        result = sandbox.run("head -c 90M /dev/zero >/big; sleep 100", timeout_s=200)
        assert result.exit_code == 137
        assert "MiB, over the limit of 50: remove some" in result.output
        deadline = time.monotonic() + 60
        while "over the limit" in sandbox.run("rm -f /big; sleep 0.5").output:
            assert time.monotonic() < deadline
        assert sandbox.run("sleep 0.7; ls /small; echo on").output == "/small\non\n"
    finally:
        backend.close()


@pytest.mark.parametrize("limits", [{"read_only": True}, {}], ids=["read-only", "writable"])
def test_removing_everything_harms_one_container_only(
    docker_backend: DockerBackend, limits: dict[str, bool]
) -> None:
    sandbox = docker_backend.acquire(SandboxSpec(**limits))  # type: ignore[arg-type]
    result = sandbox.run("echo gone; rm -rf --no-preserve-root / 2>/dev/null", timeout_s=30)
    assert result.output.startswith("gone")
    after = sandbox.run("echo still")
    assert (after.output, after.exit_code) == ("still\n", 0) if limits else after.exit_code != 0
    docker_backend.release(sandbox)
    following = docker_backend.acquire(SandboxSpec(**limits))  # type: ignore[arg-type]
    assert following.run("cat /etc/hostname >/dev/null && echo whole").output == "whole\n"
    docker_backend.release(following)


SPOILT = {
    "no bash": "rm -f /usr/bin/bash /bin/bash; kill -9 $PPID; while :; do :; done",
    "a bash that can't be run": "chmod 0 /usr/bin/bash; kill -9 -1",
    "another program as bash": "cp /usr/bin/true /t; mv -f /t /usr/bin/bash; kill -9 $PPID; while :; do :; done",
    "no libraries": "rm -rf /lib/x86_64-linux-gnu /usr/lib/x86_64-linux-gnu /lib64 /usr/lib64; kill -9 -1",
    "nothing": "rm -rf --no-preserve-root / 2>/dev/null; kill -9 -1",
}


@pytest.mark.parametrize("command", SPOILT.values(), ids=SPOILT.keys())
def test_a_sandbox_without_a_shell_is_its_commands_doing_and_no_error(
    docker_backend: DockerBackend, command: str
) -> None:
    sandbox = docker_backend.acquire(SandboxSpec())
    try:
        assert sandbox.run(command, timeout_s=60).exit_code == 127
        assert sandbox.run("true").exit_code == 127
        with pytest.raises(FileNotFoundError):
            sandbox.read_file("/etc/passwd")
        with pytest.raises(OSError, match="no shell starts"):
            sandbox.write_files({"x": "x"})
        docker_backend.client.api.remove_container(sandbox.container_id, force=True)
    finally:
        docker_backend.release(sandbox)


def test_a_command_that_takes_the_places_of_outputs_is_no_error(sandbox: DockerSandbox) -> None:
    sandbox.run("mkdir -p /run/out/{1..50}")
    result = sandbox.run("echo on")
    assert (result.exit_code, result.output) == (127, "sandbox: commands can't write their output\n")
    sandbox.reset()
    assert sandbox.run("echo on").output == "on\n"


def test_a_pipe_where_a_file_is_written_is_an_error_of_the_path_alone(
    sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OPEN_TIMEOUT_S", 1.0)
    sandbox.run("mkfifo x /run/out/command")
    with pytest.raises(OSError, match="cannot write"):
        sandbox.write_files({"x": "x"})
    assert sandbox.run(f"echo on # {'x' * 100_000}").exit_code == 127
    assert sandbox.run("echo on").output == "on\n"


@pytest.mark.parametrize(
    "head",
    ["cat /dev/zero", "sleep 1000", "printf '\\1x\\1' & disown -a", "(sleep 0.3; printf '\\1x\\1') &"],
    ids=["endless", "silent", "odd", "later"],
)
def test_another_program_as_head_changes_its_own_answers_and_no_others(
    docker_backend: DockerBackend, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.setattr(driver, "OPEN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(driver, "GRACE_S", 1.0)
    sandbox = docker_backend.acquire(SandboxSpec())
    try:
        sandbox.run("rm /usr/bin/head")
        sandbox.write_files({"/usr/bin/head": f"#!/bin/bash\n{head}\n"})
        sandbox.run("chmod 755 /usr/bin/head")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert len(sandbox.run("seq 100000", timeout_s=2).output) < 10_000
        time.sleep(0.5)
        result = sandbox.run("echo on; exit 3")
        assert (result.exit_code, result.output) == (3, "on\n")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
        with suppress(FileNotFoundError):
            sandbox.read_file("/etc/passwd")
        assert sandbox.run("echo on").output == "on\n"
    finally:
        docker_backend.release(sandbox)


class BreakingEngine:
    """A socket before the engine's own that can break every connection and refuse new ones, as a restart does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.down = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.down:
                client.close()
                continue
            engine = socket.socket(socket.AF_UNIX)
            engine.connect(ENGINE)
            self._pairs.append((client, engine))
            for pair in ((client, engine), (engine, client)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def go_down(self) -> None:
        self.down = True
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._pairs.clear()

    def close(self) -> None:
        self.go_down()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BreakingEngine]:
    if not Path(ENGINE).exists():
        pytest.skip(f"no engine at {ENGINE}")
    engine = BreakingEngine(tmp_path / "e.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
    yield engine
    engine.close()


def test_an_engine_that_restarts_ends_the_command_as_a_sandbox_error_and_the_backend_goes_on(
    engine: BreakingEngine,
) -> None:
    backend = DockerBackend()
    try:
        spec = SandboxSpec(read_only=True)
        busy, idle = backend.acquire(spec), backend.acquire(spec)
        backend.release(idle)
        timer = threading.Timer(0.5, engine.go_down)
        timer.start()
        started = time.monotonic()
        with pytest.raises(SandboxError):
            busy.run("sleep 300", timeout_s=600)
        assert time.monotonic() - started < 60
        timer.join()
        backend.release(busy)
        with pytest.raises(SandboxError):
            backend.acquire(spec)
        engine.down = False
        again = backend.acquire(spec)
        assert again.id not in (busy.id, idle.id)
        assert again.run("echo on").output == "on\n"
    finally:
        backend.close()
    other = DockerBackend()
    left = other.client.api.containers(all=True)
    assert not {busy.container_id, idle.container_id, again.container_id} & {item["Id"] for item in left}
    other.close()


def test_a_container_removed_in_mid_episode_is_no_reward_and_the_next_episode_is_whole() -> None:
    env = SWEEnv(sandbox="docker")
    try:
        env.reset(seed=0)
        container = env._workspace.sandbox.container_id  # type: ignore[union-attr, attr-defined]
        remove = ["docker", "rm", "-f", container]
        timer = threading.Timer(0.3, lambda: subprocess.run(remove, capture_output=True, check=False))
        timer.start()
        with pytest.raises(SandboxError):
            env.step(as_action("sleep 30"))
        timer.join()
        with pytest.raises(RuntimeError, match="after the end of the episode"):
            env.step(as_action("true"))
        env.reset(seed=0)
        assert env.step(as_action("ls"))[0].split("\n")[-2:] == ["app.py", "test.py"]
        assert env.step(as_action(SUBMIT))[1] == 0.0
    finally:
        env.close()
