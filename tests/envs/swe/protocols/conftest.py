"""A small repository in a sandbox: without isolation, and in Docker where it makes a difference."""

from collections.abc import Iterator

import pytest

from agentenv_envs.swe.protocols.base import Limits
from agentenv_envs.swe.sandbox import Sandbox, SandboxSpec, open_backend

FILES = {
    "app.py": "import os\n\n\ndef one():\n    return 1\n\n\ndef two():\n    return 1\n",
    "pkg/deep/er.py": "one = 1\n",
    "pkg/data.bin": b"\x00\x01one\xff",
    "pkg/latin.txt": b"caf\xe9\n",
    "dos.txt": "one\r\ntwo\r\n",
    "it's here.txt": "one\none more\n",
    ".hidden/x.py": "one = 1\n",
    "empty.py": "",
}


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[object]:
    backend = open_backend("local-unisolated")
    yield backend
    backend.close()


@pytest.fixture
def sandbox(sandboxes: object) -> Iterator[Sandbox]:
    made = sandboxes.acquire(SandboxSpec(read_only=True))  # type: ignore[attr-defined]
    made.write_files(FILES)
    yield made
    sandboxes.release(made)  # type: ignore[attr-defined]


@pytest.fixture
def limits() -> Limits:
    return Limits(timeout_s=20.0, chars=8_000)
