"""One Docker backend for the tests of this folder, with warm read-only sandboxes."""

from collections.abc import Iterator

import pytest

from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox

READ_ONLY = SandboxSpec(read_only=True)


@pytest.fixture(scope="session")
def docker_backend() -> Iterator[DockerBackend]:
    backend = DockerBackend()
    yield backend
    backend.close()


@pytest.fixture
def sandbox(docker_backend: DockerBackend) -> Iterator[DockerSandbox]:
    sandbox = docker_backend.acquire(READ_ONLY)
    yield sandbox
    docker_backend.release(sandbox)
