"""One Docker backend for the tests of this folder, with warm read-only sandboxes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentenv_envs.swe.sandbox import CommandResult, Sandbox, SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox

READ_ONLY = SandboxSpec(read_only=True)


@pytest.fixture(scope="session")
def docker_backend() -> Iterator[DockerBackend]:
    backend = DockerBackend()
    yield backend
    backend.close()


@pytest.fixture
def run_cut() -> Callable[..., CommandResult]:
    """Runs a command that writes something and does not end; its limit is longer where it did not come to that."""

    def run(sandbox: Sandbox, command: str, **settings: Any) -> CommandResult:
        for limit_s in (0.5, 4.0):
            result = sandbox.run(command, timeout_s=limit_s, **settings)
            if result.output:
                return result
        return sandbox.run(command, timeout_s=30.0, **settings)

    return run


@pytest.fixture
def sandbox(docker_backend: DockerBackend) -> Iterator[DockerSandbox]:
    sandbox = docker_backend.acquire(READ_ONLY)
    yield sandbox
    docker_backend.release(sandbox)
