"""Services on a free port of this machine, each in a thread, with sandboxes that isolate nothing."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx

from agentenv.listening import listen
from agentenv_envs.swe.sandbox import SandboxBackend
from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.sandbox.service.client import RemoteBackend
from agentenv_envs.swe.sandbox.service.limits import ServiceLimits, Tokens
from agentenv_envs.swe.sandbox.service.serving import Service

TOKENS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}


class Running:
    """A service that runs in a thread."""

    def __init__(self, backend: SandboxBackend, port: int = 0, drain_s: float = 5.0, **limits: Any) -> None:
        self.listener = listen("127.0.0.1", port)
        self.listener.listen(64)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.service = Service(backend, Tokens(TOKENS), ServiceLimits(**limits), drain_s=drain_s)
        self.leases = self.service.leases
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.run(self.service.serve(self.listener))

    def stop(self, *, now: bool = True) -> None:
        self.service.stop(now=now)
        self.thread.join(60)
        assert not self.thread.is_alive()

    def client(self, name: str = "alice", **settings: Any) -> RemoteBackend:
        return RemoteBackend([self.url], TOKENS[name], **settings)

    def http(self, name: str | None = "alice") -> httpx.Client:
        headers = {} if name is None else {"authorization": f"Bearer {TOKENS[name]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts services; stops them in the end, and checks that nothing is left."""
    running: list[Running] = []

    def start(backend: SandboxBackend | None = None, **settings: Any) -> Running:
        running.append(Running(backend or LocalBackend(), **settings))
        return running[-1]

    yield start
    for service in running:
        if service.thread.is_alive():
            service.stop()
        assert service.leases.count() == 0


@pytest.fixture
def service(serve: Callable[..., Running]) -> Running:
    return serve()


@pytest.fixture
def remote(service: Running) -> Iterator[RemoteBackend]:
    backend = service.client()
    yield backend
    backend.close()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits until something holds."""

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "it does not come to hold"
            time.sleep(0.02)

    return wait
