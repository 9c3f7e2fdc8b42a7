"""A reset read-only sandbox cannot be told from a new one."""

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox

pytestmark = pytest.mark.docker

# Everything that a command can look at: processes, files with modes and sizes, limits, shared objects, environment.
FINGERPRINT = r"""
ps -eo pid=,nice=,args= | awk -v self=$$ '$1 < self { $1 = ""; print }'
for folder in /work /tmp /run /dev /sys/fs/cgroup; do
  find $folder -printf '%p %y %m %U:%G %l\n' | grep -v '^/run/out/[0-9]' | sort
done
df --output=target,used /work /tmp /dev/shm
cat /proc/sysvipc/* /proc/self/limits /proc/self/oom_score_adj; nice; umask; env | sort; taskset -p $$ | cut -d: -f2
"""

CLEANED = {
    "background processes in sessions of their own": "setsid sleep 100 & (setsid setsid sleep 100 &) ; sleep 100 &",
    "files, dot files and odd names": "mkdir -p .a/b '/tmp/x y' /run/out/z; date | tee .a/.c '/tmp/x y/-rf' "
    "$'/tmp/\\n' /run/out/z/1 /dev/shm/s; ln -s / /tmp/root; ln -s /dev/zero loop; mkfifo pipe",
    "folders without permissions": "mkdir -p a/b/c; touch a/b/c/d; chmod 0 a/b/c/d a/b/c a/b a",
    "folders without permissions in a loop of links": "mkdir -p a/b; ln -s ../.. a/b/up; ln -s /usr a/usr; "
    "chmod 0 a/b; chmod 500 a",
    "mounts with other permissions": "chmod 0 /tmp; chmod 777 /work /run/out; chmod 1700 /dev/shm",
    "a workdir without permissions": "touch x; chmod 0 /work",
    "a fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 0.3",
    "a loop of forks that leave their session": "while :; do setsid sleep 50 & done >/dev/null 2>&1 & sleep 0.3",
    "a killed driver": "kill -9 $PPID",
    "a kill of everything": "touch a; sleep 50 & kill -9 -1",
    "a killed watchdog": "sleep 0.2; kill -9 $(pgrep -P $PPID driver)",
    "endless output": "yes",
    "endless output in the background": "yes & setsid yes > /tmp/yes & sleep 0.3",
    "an unterminated document": "cat <<'X'\nabc",
    "300 MB of output": "head -c 300000000 /dev/zero",
    "an interactive program": "python3; read -p name: x; cat",
    "signals to PID 1": "kill -9 1; kill -TERM 1; kill -HUP 1; kill -USR1 1; kill -STOP 1; kill -INT 1",
    "a time-out with a deaf process": "trap '' TERM; setsid bash -c 'trap \"\" TERM; sleep 60; sleep 60' & "
    "sleep 60; sleep 60",
    "a stopped process": "sleep 60 & kill -STOP $!; kill -STOP $$",
    "full file systems": "for file in x /tmp/x /dev/shm/x; do head -c 99M /dev/zero > $file; done",
}

DISCARDED = {
    "a driver of lower priority": "renice 10 -p $PPID",
    "a driver with other limits": "prlimit --pid $PPID --nofile=30",
    "a driver that is killed first": "echo 900 > /proc/$PPID/oom_score_adj",
    "a driver on one processor": "taskset -p 1 $PPID || renice 1 -p $PPID",
    "System V memory": "ipcmk -M 100",
    "System V semaphores": "ipcmk -S 2",
}


@pytest.fixture(scope="module")
def fingerprint(docker_backend: DockerBackend) -> str:
    """Of a container that has never run anything else."""
    sandbox = docker_backend.acquire(SandboxSpec(read_only=True, memory_mb=511))
    text = sandbox.run(FINGERPRINT, half_bytes=50_000).output
    docker_backend.release(sandbox)
    assert "/dev/null c 666" in text
    return text


@pytest.mark.parametrize("command", CLEANED.values(), ids=CLEANED.keys())
def test_after_a_hostile_command_a_reset_sandbox_is_as_new(
    sandbox: DockerSandbox, fingerprint: str, command: str
) -> None:
    sandbox.run(command, timeout_s=1)
    sandbox.reset()
    assert sandbox.run(FINGERPRINT, half_bytes=50_000).output == fingerprint


@pytest.mark.parametrize("command", DISCARDED.values(), ids=DISCARDED.keys())
def test_what_a_reset_cannot_undo_costs_the_container(
    docker_backend: DockerBackend, fingerprint: str, command: str
) -> None:
    sandbox = docker_backend.acquire(SandboxSpec(read_only=True))
    assert sandbox.run(command).exit_code == 0
    docker_backend.release(sandbox)
    following = docker_backend.acquire(SandboxSpec(read_only=True))
    assert following.id != sandbox.id
    assert following.run(FINGERPRINT, half_bytes=50_000).output == fingerprint
    docker_backend.release(following)


def test_message_queues_which_no_listing_shows_cannot_be_made(sandbox: DockerSandbox) -> None:
    code = "import ctypes, os; print(ctypes.CDLL(None).mq_open(b'/q', os.O_CREAT | os.O_RDWR, 0o600, None))"
    assert sandbox.run(f'python -c "{code}"').output == "-1\n"


def test_a_reset_writes_the_given_files(sandbox: DockerSandbox) -> None:
    sandbox.run("touch old")
    sandbox.reset({"a.py": "print(1)", "b/c.bin": b"\0\1\\", "/tmp/d": "d"})
    assert sandbox.run("python a.py; ls").output == "1\na.py\nb\n"
    assert sandbox.read_file("b/c.bin") == b"\0\1\\"
    assert sandbox.read_file("/tmp/d") == b"d"


def test_a_reset_after_many_commands_stays_clean(sandbox: DockerSandbox) -> None:
    for _ in range(20):
        for _ in range(5):
            sandbox.run("true")
        sandbox.reset()
    assert (
        sandbox.run("ps -e --no-headers | wc -l").output == "6\n"
    )  # PID 1, driver, watchdog, bash, ps and wc


def test_only_read_only_sandboxes_can_be_reset(docker_backend: DockerBackend) -> None:
    sandbox = docker_backend.acquire(SandboxSpec())
    with pytest.raises(SandboxError, match="read_only=True"):
        sandbox.reset()
    assert (
        sandbox.run("touch /etc/x; mkdir -p /testbed/a; python -c 'import pty; pty.openpty()'").exit_code == 0
    )
    docker_backend.release(sandbox)
    other = docker_backend.acquire(SandboxSpec())
    assert other.id != sandbox.id
    assert other.run("test -e /etc/x").exit_code == 1
    docker_backend.release(other)


def test_two_killed_commands_in_a_row_wear_a_container_out(docker_backend: DockerBackend) -> None:
    spec = SandboxSpec(read_only=True, memory_mb=510)
    sandbox = docker_backend.acquire(spec)
    for command in ("kill -9 $$", "true", "kill -9 $$"):
        sandbox.run(command)
    docker_backend.release(sandbox)
    again = docker_backend.acquire(spec)
    assert again.id == sandbox.id
    for _ in range(2):
        assert again.run("kill -9 $$").exit_code == 137
    docker_backend.release(again)
    following = docker_backend.acquire(spec)
    assert following.id != sandbox.id
    docker_backend.release(following)
