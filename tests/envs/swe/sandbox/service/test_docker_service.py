"""The service over Docker: the same rewards as locally, and nothing left however it ends."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from agentenv.errors import SandboxError
from agentenv_envs.swe.embedded.tasks import MODULE
from agentenv_envs.swe.sandbox import SandboxBackend, SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
from agentenv_envs.swe.sandbox.labels import OWNER, SANDBOX
from agentenv_envs.swe.sandbox.service.client import RemoteBackend
from agentenv_envs.swe.workspace import EmbeddedTasks

pytestmark = pytest.mark.docker

TOKEN = "trainer-0123456789abcdef"


class Process:
    """`agentenv sandbox serve` as a process on a free port."""

    def __init__(self, folder: Path, *options: str) -> None:
        tokens = folder / "tokens"
        tokens.write_text(f"trainer {TOKEN}\n")
        command = [sys.executable, "-m", "agentenv.cli", "sandbox", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--token-file", str(tokens), *options], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            if line.startswith("sandbox service: "):
                self.url = line.split()[-1]
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def containers(self, backend: DockerBackend) -> list[str]:
        """Names of the containers that it owns."""
        found = backend.client.api.containers(all=True, filters={"label": SANDBOX})
        owner = f"{self.process.pid} "
        return [item["Names"][0] for item in found if item["Labels"].get(OWNER, "").startswith(owner)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*options: str) -> Process:
        started.append(Process(tmp_path, *options))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.process.wait(60)
        assert process.process.stderr is not None
        process.process.stderr.close()


def rewards(backend: SandboxBackend, seeds: range) -> list[tuple[Any, ...]]:
    """Of the gold module, of the buggy one and of a broken one, task by task, with what the grader says."""
    found = []
    tasks = EmbeddedTasks("train", (1, 2), None)
    for seed in seeds:
        task = tasks.task(seed)
        for name, module in (("gold", task.gold), ("as it was", None), ("broken", "def f(:\n")):
            workspace = tasks.open(seed, backend)
            if module is not None:
                workspace.sandbox.write_files({MODULE: module})
            grade = workspace.grade()
            workspace.close()
            found.append((task.task_id, name, grade["resolved"], grade["passed"], grade["reason"]))
    return found


def test_embedded_tasks_earn_through_the_service_what_they_earn_locally(
    docker_backend: DockerBackend, start: Callable[..., Process]
) -> None:
    service = start()
    remote = RemoteBackend([service.url], TOKEN)
    assert remote.kind == "docker"
    seeds = range(5)
    through = rewards(remote, seeds)
    assert through == rewards(docker_backend, seeds)
    assert [resolved for _, _, resolved, _, _ in through] == [True, False, False] * len(seeds)
    assert remote.left() == 0
    remote.close()
    assert len(service.containers(docker_backend)) == 1, (
        "one container served all of them, one after the other"
    )
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 0
    assert service.containers(docker_backend) == []


def test_sigterm_cuts_what_runs_at_the_deadline_and_removes_all_containers(
    docker_backend: DockerBackend, start: Callable[..., Process]
) -> None:
    service = start("--drain-s", "0.5")
    remote = RemoteBackend([service.url], TOKEN)
    sandbox = remote.acquire(SandboxSpec(read_only=True))
    with pytest.raises(SandboxError):
        sandbox.run(
            "echo on; sleep 60",
            timeout_s=120,
            on_output=lambda text: service.process.send_signal(signal.SIGTERM),
        )
    assert service.process.wait(60) == 0
    assert service.containers(docker_backend) == []
    remote.close()


def test_what_a_killed_service_leaves_the_next_one_removes(
    docker_backend: DockerBackend, start: Callable[..., Process]
) -> None:
    first = start()
    remote = RemoteBackend([first.url], TOKEN)
    remote.acquire(SandboxSpec())
    assert len(first.containers(docker_backend)) == 1
    first.process.kill()
    first.process.wait(60)
    second = start()
    assert first.containers(docker_backend) == []
    remote.close()
    again = RemoteBackend([second.url], TOKEN)
    assert again.acquire(SandboxSpec()).run("pwd").output == "/work\n"
    again.close()
    assert second.containers(docker_backend) == []
