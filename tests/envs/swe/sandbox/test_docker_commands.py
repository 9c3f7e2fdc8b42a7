"""Commands and files in a Docker sandbox, over the driver channel."""

import random
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import CommandResult, SandboxSpec, driver
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox

pytestmark = pytest.mark.docker


def test_a_command_runs_in_the_workdir_with_its_exit_code_and_both_streams(sandbox: DockerSandbox) -> None:
    result = sandbox.run("pwd; echo oops >&2; exit 3")
    assert (result.output, result.exit_code, result.total_bytes) == ("/work\noops\n", 3, 11)
    assert not result.timed_out


def test_a_command_has_no_stdin_and_sees_only_three_descriptors(sandbox: DockerSandbox) -> None:
    assert sandbox.run("read -r line; echo $?; ls /proc/$$/fd; :").output == "1\n0\n1\n2\n"


def test_every_byte_comes_back_as_it_was_written(sandbox: DockerSandbox) -> None:
    every = bytes(range(256))
    sandbox.write_files({"every": every})
    assert sandbox.read_file("every") == every
    # bash handles bytes 1 and 127 apart from the others; the output has them, and no NUL.
    printable = "".join(map(chr, range(1, 128)))
    sandbox.write_files({"ascii": printable})
    assert sandbox.run("cat ascii").output == printable
    assert sandbox.run("cat every").output == every.decode("utf-8", "replace")


def test_every_character_of_a_command_reaches_bash(sandbox: DockerSandbox) -> None:
    text = "".join(map(chr, range(1, 128))).replace("'", "") + "ü€\\n\\0041%s%b"
    assert sandbox.run(f"printf %s '{text}'").output == text


def test_a_long_output_comes_back_as_head_and_tail_with_its_size(sandbox: DockerSandbox) -> None:
    result = sandbox.run("seq 1 100000", half_bytes=100)
    whole = "".join(f"{i}\n" for i in range(1, 100001))
    assert result.total_bytes == len(whole)
    assert result.output.startswith(whole[:100])
    assert result.output.endswith(whole[-100:])
    assert f"{len(whole) - 200} bytes left out" in result.output


def test_endless_output_is_bounded_and_the_channel_goes_on(sandbox: DockerSandbox) -> None:
    for command in ("yes", "head -c 300000000 /dev/zero", "yes & sleep 0.1"):
        result = sandbox.run(command, timeout_s=5, half_bytes=50)
        assert len(result.output) < 200
        assert 0 < result.total_bytes <= 34 << 20
    assert sandbox.run("echo on").exit_code in (
        0,
        1,
    )  # the last `yes` may still fill the output's file system
    sandbox.reset()
    assert sandbox.run("echo on").output == "on\n"


def test_a_time_limit_ends_the_command_and_all_that_it_started(
    sandbox: DockerSandbox, run_cut: Callable[..., CommandResult]
) -> None:
    sandbox.run("sleep 1111 &")
    started = time.monotonic()
    result = run_cut(sandbox, "setsid sleep 222 & trap '' TERM; echo before; sleep 333; sleep 333")
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", 124, True)
    assert time.monotonic() - started < 100
    alive = sandbox.run("ps -eo args").output
    assert "sleep 1111" in alive, "what an earlier command left running is not its business"
    assert "sleep 222" not in alive
    assert "sleep 333" not in alive


def test_a_background_process_does_not_hold_a_command_up(sandbox: DockerSandbox) -> None:
    result = sandbox.run("(sleep 300; echo late) & echo now", timeout_s=200)
    assert result.output == "now\n"
    assert result.duration_s < 60
    assert sandbox.run("echo next").output == "next\n"


def test_a_stopped_command_is_not_waited_for(sandbox: DockerSandbox) -> None:
    assert sandbox.run("kill -STOP $$", timeout_s=200).duration_s < 60
    assert "T" not in sandbox.run("ps -eo stat=").output


def test_an_interrupted_command_reports_its_signal(sandbox: DockerSandbox) -> None:
    assert sandbox.run("kill -INT $$").exit_code == 130
    assert sandbox.run("python -c 'import os; os.kill(os.getpid(), 2)'").output.endswith(
        "KeyboardInterrupt\n"
    )


@pytest.mark.parametrize("command", ["kill -9 $PPID", "kill -9 -1", "pkill -9 driver"])
def test_a_command_that_kills_the_driver_is_a_result(sandbox: DockerSandbox, command: str) -> None:
    result = sandbox.run(f"echo before; {command}; sleep 5", timeout_s=20)
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", 137, False)
    assert sandbox.run("echo after").output == "after\n"


def test_a_command_that_stops_the_driver_is_a_time_out(
    sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch, run_cut: Callable[..., CommandResult]
) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 2.0)
    result = run_cut(sandbox, "echo before; kill -STOP $PPID")
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", 124, True)
    assert sandbox.run("echo after").output == "after\n"


def test_a_command_of_any_length_and_shape_is_accepted(sandbox: DockerSandbox) -> None:
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=300_000))
    assert sandbox.run(f"x={noise}; echo ${{#x}}").output == "300000\n"
    assert sandbox.run("cat <<'END'\nunterminated").output.endswith("unterminated\n")
    assert sandbox.run("").exit_code == 0
    assert sandbox.run("echo a\0b").exit_code == 126
    assert sandbox.run("if").exit_code == 2


def test_an_answer_can_not_be_forged(sandbox: DockerSandbox) -> None:
    forged = sandbox.run(r"printf '\1%s ok 0 0\1\1%s\1' 0123456789abcdef 0123456789abcdef; exit 7")
    assert forged.exit_code == 7
    # The tag is in the driver's memory alone, and nobody can read that, nor write to its stream.
    for file in ("mem", "environ", "fd/1", "maps", "stack"):
        assert sandbox.run(f"cat /proc/$PPID/{file} >/dev/null").exit_code != 0, file
    assert sandbox.run("echo forged >/proc/$PPID/fd/1").exit_code != 0
    assert "driver" in sandbox.run("tr '\\0' ' ' </proc/$PPID/cmdline").output
    attach = "import ctypes, os; print(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))"
    assert sandbox.run(f"exec python -c '{attach}'").output == "-1\n"
    assert sandbox.run("cat /proc/1/mem >/dev/null").exit_code != 0


def test_the_image_s_locale_and_the_specification_s_variables_reach_commands(
    docker_backend: DockerBackend,
) -> None:
    spec = SandboxSpec(read_only=True, environment={"LC_ALL": "C.UTF-8", "NAME": "a b"})
    sandbox = docker_backend.acquire(spec)
    try:
        assert sandbox.run('echo "$LC_ALL $NAME"; x=ü; echo ${#x}').output == "C.UTF-8 a b\n1\n"
        assert "ae_" not in sandbox.run("env; declare -p").output
    finally:
        docker_backend.release(sandbox)


def test_files_go_anywhere_and_missing_ones_are_reported(sandbox: DockerSandbox) -> None:
    sandbox.write_files({"a/b c/d.txt": "text ü", "/tmp/x": b"", "../work/-rf": "y"})
    assert sandbox.run("cat 'a/b c/d.txt'; stat -c %s /tmp/x; cat ./-rf").output == "text ü0\ny"
    assert sandbox.read_file("a/b c/d.txt", max_bytes=4) == b"text"
    for path in ("nothing", "a", "/dev/zero"):
        with pytest.raises(FileNotFoundError):
            sandbox.read_file(path)
    with pytest.raises(OSError, match="/usr/x"):
        sandbox.write_files({"/usr/x": "", "fine": "1"})
    assert sandbox.read_file("fine") == b"1"


def test_files_of_megabytes_arrive_whole(sandbox: DockerSandbox) -> None:
    content = random.Random(1).randbytes(3_000_000)
    sandbox.write_files({"big": content})
    assert sandbox.read_file("big", max_bytes=5_000_000) == content


def test_a_sandbox_has_no_network_no_capabilities_and_its_limits(sandbox: DockerSandbox) -> None:
    status = sandbox.run("grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status").output.split()
    assert status[1::2] == ["0000000000000000", "0000000000000000", "1"]
    assert sandbox.run("cat /proc/net/dev | grep -c :").output == "1\n"  # lo
    assert sandbox.run("python -c 'x = bytearray(10**9)'").exit_code != 0
    assert (
        sandbox.run(
            "for i in $(seq 200); do sleep 3 & done 2>&1 | grep -q unavailable", timeout_s=30
        ).exit_code
        == 0
    )
    sandbox.reset()
    for path in ("/etc/x", "/dev/x", "/sys/fs/cgroup/x", "/root/x", "/var/tmp/x", "/run/x", "/etc/hosts"):
        assert sandbox.run(f"echo x >> {path}").exit_code == 1, path


def test_a_container_that_vanishes_is_a_sandbox_error_at_once(docker_backend: DockerBackend) -> None:
    def remove(sandbox: DockerSandbox) -> None:
        subprocess.run(["docker", "rm", "-f", sandbox.container_id], stdout=subprocess.DEVNULL, check=True)

    sandbox = docker_backend.acquire(SandboxSpec(read_only=True, memory_mb=256))
    timer = threading.Timer(0.5, remove, [sandbox])
    timer.start()
    started = time.monotonic()
    with pytest.raises(SandboxError):
        sandbox.run("sleep 300", timeout_s=600)
    assert time.monotonic() - started < 60
    timer.join()
    with pytest.raises(SandboxError, match="broken"):
        sandbox.run("true")
    docker_backend.release(sandbox)


def test_bad_limits_of_a_command_are_refused(sandbox: DockerSandbox) -> None:
    with pytest.raises(ValueError, match="timeout_s=0"):
        sandbox.run("true", timeout_s=0)
    with pytest.raises(ValueError, match="path ''"):
        sandbox.write_files({"": "x"})


def test_kills_from_outside_again_and_again_cost_commands_and_never_the_sandbox(
    docker_backend: DockerBackend,
) -> None:
    sandbox = docker_backend.acquire(SandboxSpec(read_only=True))
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.02):
            sandbox.kill_all()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        codes = [sandbox.run("sleep 30", timeout_s=60).exit_code for _ in range(3)]
    finally:
        ended.set()
        killer.join()
    assert codes == [137] * 3
    assert sandbox.run("echo on").output == "on\n"
    sandbox.close()


def test_a_sandbox_that_is_given_back_while_a_command_runs_is_removed_and_the_command_ends_at_once(
    docker_backend: DockerBackend,
) -> None:
    sandbox = docker_backend.acquire(SandboxSpec(read_only=True))
    errors: list[Exception] = []
    runs = threading.Event()

    def run() -> None:
        try:
            sandbox.run("echo on; sleep 60", timeout_s=90, on_output=lambda text: runs.set())
        except SandboxError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert runs.wait(60)
    docker_backend.release(sandbox)
    thread.join(50)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert not sandbox.reusable
