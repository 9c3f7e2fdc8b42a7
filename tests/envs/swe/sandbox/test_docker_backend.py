"""Pool, limits on starts, labels and clean-up of the Docker backend."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.sandbox import SandboxSpec, open_backend, reap_in_background
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
from agentenv_envs.swe.sandbox.labels import EXPIRES, OWNER, SANDBOX

pytestmark = pytest.mark.docker

# Starts two containers, tells their ids, and dies without a chance to clean up.
ABANDON = """
import os, signal
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
from agentenv_envs.swe.sandbox import SandboxSpec
backend = DockerBackend()
print(*(backend.acquire(SandboxSpec(read_only=True)).container_id for _ in range(2)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


# Ends with a sandbox in use and one in the pool, and closes nothing.
FORGET = """
from agentenv_envs.swe.sandbox import SandboxSpec, open_backend
backend = open_backend("docker")
first, second = (backend.acquire(SandboxSpec(read_only=True)) for _ in range(2))
backend.release(second)
print(first.container_id, second.container_id)
"""


def existing(backend: DockerBackend) -> set[str]:
    return {item["Id"] for item in backend.client.api.containers(all=True, filters={"label": SANDBOX})}


def test_a_released_read_only_sandbox_is_clean_when_it_comes_back(docker_backend: DockerBackend) -> None:
    spec = SandboxSpec(read_only=True, memory_mb=300)
    first = docker_backend.acquire(spec)
    first.run("touch x; sleep 50 &")
    docker_backend.release(first)
    second = docker_backend.acquire(spec)
    assert second is first
    assert second.run("ls -A; pgrep sleep").output == ""
    other = docker_backend.acquire(SandboxSpec(read_only=True, memory_mb=301))
    assert other is not first, "another specification is another pool"
    docker_backend.release(second)
    docker_backend.release(other)


def test_a_pooled_sandbox_whose_container_vanished_is_replaced(docker_backend: DockerBackend) -> None:
    spec = SandboxSpec(read_only=True, memory_mb=302)
    first = docker_backend.acquire(spec)
    docker_backend.release(first)
    docker_backend.client.api.remove_container(first.container_id, force=True)
    second = docker_backend.acquire(spec)
    assert second.id != first.id
    assert second.run("echo fine").output == "fine\n"
    docker_backend.release(second)


def test_many_threads_share_a_backend_and_few_containers_start_at_a_time() -> None:
    backend = DockerBackend(max_starting=2)
    spec = SandboxSpec(read_only=True, memory_mb=128)
    starting, most, lock = 0, 0, threading.Lock()
    start = backend._start

    def counted(spec: SandboxSpec):  # type: ignore[no-untyped-def]
        nonlocal starting, most
        with lock:
            starting += 1
            most = max(most, starting)
        try:
            return start(spec)
        finally:
            with lock:
                starting -= 1

    backend._start = counted  # type: ignore[method-assign]
    # No episode ends before all have their sandbox, so that five are needed at a time.
    all_there = threading.Barrier(5)

    def episode(number: int) -> str:
        sandbox = backend.acquire(spec)
        all_there.wait(60)
        sandbox.run(f"echo {number} > own; sleep 0.05")
        text = sandbox.run("cat own; ls -A").output
        backend.release(sandbox)
        return text

    try:
        with ThreadPoolExecutor(5) as threads:
            texts = list(threads.map(episode, range(10)))
        assert texts == [f"{number}\nown\n" for number in range(10)]
        assert most == 2
        assert backend.left() == 5
    finally:
        backend.close()
    with pytest.raises(SandboxError, match="closed"):
        backend.acquire(spec)


def test_closing_removes_every_container_and_ends_running_commands() -> None:
    backend = DockerBackend()
    pooled, busy = (backend.acquire(SandboxSpec(read_only=True, memory_mb=128)) for _ in range(2))
    backend.release(pooled)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            busy.run("sleep 60", timeout_s=100)
        except SandboxError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    mine = {pooled.container_id, busy.container_id}
    backend.close()
    backend.close()
    thread.join(50)
    assert not thread.is_alive()
    assert len(failures) == 1
    other = DockerBackend()
    assert not mine & existing(other)
    other.close()


def abandon() -> set[str]:
    """Ids of two containers whose owner was killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", ABANDON], capture_output=True, text=True, env=environment, check=False
    )
    abandoned = set(process.stdout.split())
    assert len(abandoned) == 2, process.stderr
    return abandoned


def test_a_process_that_forgets_to_close_leaves_nothing(docker_backend: DockerBackend) -> None:
    process = subprocess.run([sys.executable, "-c", FORGET], capture_output=True, text=True, check=True)
    forgotten = set(process.stdout.split())
    assert len(forgotten) == 2
    assert process.stderr == ""
    assert not forgotten & existing(docker_backend)


def test_what_a_killed_process_left_is_removed_by_the_next_backend(docker_backend: DockerBackend) -> None:
    mine = docker_backend.acquire(SandboxSpec(read_only=True))
    for _ in range(5):  # tests in other processes begin with a look for what was left, too
        abandoned = abandon()
        there = abandoned <= existing(docker_backend)
        started = time.monotonic()
        reaped = docker_backend.reap()
        took_s = time.monotonic() - started
        assert not abandoned & existing(docker_backend)
        if there and reaped == 2:
            break
    assert there and reaped == 2
    assert took_s < 20, "two that were asked to stop would take longer"
    assert mine.run("echo alive").output == "alive\n"
    docker_backend.release(mine)


def test_a_program_that_opens_its_backend_late_can_reap_early(docker_backend: DockerBackend) -> None:
    abandoned = abandon()
    reap_in_background().join(60)
    assert not abandoned & existing(docker_backend)


def test_a_container_tells_its_owner_and_its_time_to_live(docker_backend: DockerBackend) -> None:
    sandbox = docker_backend.acquire(SandboxSpec(read_only=True))
    labels = docker_backend.client.api.inspect_container(sandbox.container_id)["Config"]["Labels"]
    assert labels[OWNER].split()[0] == str(os.getpid())
    assert int(labels[EXPIRES]) > time.time() + 3600
    docker_backend.release(sandbox)


def test_a_cgroup_parent_that_the_engine_refuses_is_given_up() -> None:
    backend = DockerBackend()
    backend._cgroup_parent = "not-a-slice:/\0"
    try:
        sandbox = backend.acquire(SandboxSpec(read_only=True))
        assert sandbox.run("echo on").output == "on\n"
        assert backend.left() == 1
    finally:
        backend.close()


def test_an_unknown_image_is_the_user_s_mistake(docker_backend: DockerBackend) -> None:
    with pytest.raises(UsageError, match="agentenv/no-such-image"):
        docker_backend.acquire(SandboxSpec(image="agentenv/no-such-image:1"))


def test_handles_share_one_backend_which_closes_with_the_last() -> None:
    first, second = open_backend("docker"), open_backend("auto")
    assert first.backend is second.backend
    assert first.kind == "docker"
    sandbox = second.acquire(SandboxSpec(read_only=True))
    first.close()
    first.close()
    assert sandbox.run("echo on").output == "on\n"
    second.release(sandbox)
    second.close()
    third = open_backend("docker")
    assert third.backend is not first.backend
    third.close()
