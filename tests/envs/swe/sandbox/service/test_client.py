"""`RemoteBackend` against services that come, go and fill up."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import SandboxError, SandboxLostError, UsageError
from agentenv_envs.swe.env import SWEEnv
from agentenv_envs.swe.sandbox import Sandbox, SandboxBackend, SandboxSpec, open_backend
from agentenv_envs.swe.sandbox.service import client, endpoint, remote_sandbox
from agentenv_envs.swe.sandbox.service.addresses import service_urls, token_from_environment
from agentenv_envs.swe.sandbox.service.client import RemoteBackend
from agentenv_envs.swe.sandbox.service.endpoint import Endpoint

SPEC = SandboxSpec(read_only=True)
TOKEN = "alice-0123456789abcdef"


def test_it_offers_what_the_protocols_ask_for(remote: RemoteBackend) -> None:
    sandbox = remote.acquire(SPEC)
    assert isinstance(remote, SandboxBackend)
    assert isinstance(sandbox, Sandbox)
    assert sandbox.kind == remote.kind == "local-unisolated"


def test_a_sandbox_behaves_as_a_local_one(remote: RemoteBackend, run_cut: Callable[..., Any]) -> None:
    sandbox = remote.acquire(SPEC)
    sandbox.write_files({"a/b.txt": "text", "c": b"\xff\0", "d\udcff": "e"})
    assert sandbox.read_file("c") == b"\xff\0"
    assert sandbox.read_file("a/b.txt", max_bytes=2) == b"te"
    assert sandbox.read_file("d\udcff") == b"e"
    result = sandbox.run("cat a/b.txt; exit 3")
    assert (result.output, result.exit_code, result.timed_out) == ("text", 3, False)
    late = run_cut(sandbox, "echo early; sleep 60")
    assert (late.output, late.exit_code, late.timed_out) == ("early\n", 124, True)
    long = sandbox.run("head -c 100000 /dev/zero | tr '\\0' x", half_bytes=10)
    assert long.total_bytes == 100000
    assert long.output.startswith("x" * 10 + "\n[... 99980 bytes left out")
    assert "NUL" in sandbox.run("a\0b").output
    assert sandbox.run("printf '\\377'").output == "�"
    with pytest.raises(FileNotFoundError):
        sandbox.read_file("missing")
    with pytest.raises(OSError, match="lies outside"):
        sandbox.write_files({"/etc/x": ""})
    with pytest.raises(ValueError, match="both must be positive"):
        sandbox.run("true", timeout_s=0)
    with pytest.raises(ValueError, match="NUL"):
        sandbox.read_file("a\0b")
    sandbox.reset({"fresh": "f"})
    assert sandbox.run("ls").output == "fresh\n"
    with pytest.raises(SandboxError, match="read_only=True"):
        remote.acquire(SandboxSpec()).reset()
    assert remote.left() == 2
    remote.release(sandbox)
    assert remote.left() == 1
    with pytest.raises(SandboxError, match="is closed"):
        sandbox.run("true")
    remote.release(sandbox)


def test_many_files_go_in_several_requests(remote: RemoteBackend, serve: Callable[..., Any]) -> None:
    sandbox = remote.acquire(SandboxSpec(memory_mb=4000, read_only=True))
    sandbox.write_files({f"f{number}": bytes(5 << 20) for number in range(4)})
    assert sandbox.run("cat f* | wc -c").output.strip() == str(20 << 20)
    sandbox.reset({f"g{number}": bytes(5 << 20) for number in range(2)})
    assert sandbox.run("cat * | wc -c").output.strip() == str(10 << 20)
    small = serve(body_bytes=1000).client()
    with pytest.raises(OSError, match="over 1000 bytes"):
        small.acquire(SPEC).write_files({"x": bytes(2000)})
    small.close()


def test_a_long_command_outlives_what_one_request_may_take(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = serve(wait_s=20.0).client()
    sandbox = backend.acquire(SPEC)
    monkeypatch.setattr(remote_sandbox, "WAIT_S", 0.2)
    result = sandbox.run("echo x >> log; sleep 1; cat log")
    assert result.output == "x\n"
    assert result.duration_s >= 1
    backend.close()


def test_leases_are_renewed_while_the_client_lives_and_end_when_it_is_gone(
    serve: Callable[..., Any], until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, renewals = 0.0, 0
    service = serve()
    renew = service.leases.renew

    def counted(*arguments: Any) -> Any:
        nonlocal renewals
        lost = renew(*arguments)
        renewals += 1
        return lost

    def later() -> bool:
        nonlocal now
        now += 1.0
        return bool(service.leases.count() == 0)

    monkeypatch.setattr(service.leases, "renew", counted)
    monkeypatch.setattr(service.leases, "_clock", lambda: now)
    backend = service.client(ttl_s=1.0)
    sandbox = backend.acquire(SPEC)
    for _ in range(4):
        now += 0.8
        enough = renewals + 2  # the first may have been on its way
        until(lambda enough=enough: renewals >= enough)
    assert sandbox.run("echo fine").output == "fine\n"
    backend._ended.set()  # as if it had been killed: it renews no more, and gives nothing back
    until(later)
    assert service.leases.backend.left() == 0


def test_closing_gives_back_what_is_held(serve: Callable[..., Any]) -> None:
    service = serve()
    backend = service.client()
    sandboxes = [backend.acquire(SPEC) for _ in range(3)]
    assert service.leases.count() == 3
    backend.close()
    assert service.leases.count() == 0
    assert backend.left() == 0
    with pytest.raises(SandboxError):
        sandboxes[0].run("true")
    with pytest.raises(SandboxError, match="closed"):
        backend.acquire(SPEC)
    backend.close()


def test_a_forked_child_gives_back_nothing_of_its_parents(remote: RemoteBackend) -> None:
    sandbox = remote.acquire(SPEC)
    child = os.fork()
    if child == 0:
        try:
            remote.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox.run("echo fine").output == "fine\n"


def test_a_bad_url_token_or_service_is_an_error_at_once(
    service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a token is needed"):
        RemoteBackend([service.url], "wrong-0123456789abcdef")
    for url in ("ftp://x", "not a url", "http://", "http://user:secret@host"):
        with pytest.raises(UsageError, match="sandbox_url="):
            RemoteBackend([url], TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(UsageError, match="no sandbox service answers"):
            RemoteBackend([f"http://127.0.0.1:{free.getsockname()[1]}"], TOKEN)
    for name in ("AGENTENV_SANDBOX_TOKEN", "AGENTENV_SANDBOX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="AGENTENV_SANDBOX_TOKEN"):
        RemoteBackend([service.url])
    monkeypatch.setenv("AGENTENV_SANDBOX_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(UsageError, match="AGENTENV_SANDBOX_TOKEN_FILE="):
        token_from_environment()
    (tmp_path / "token").write_text(f"alice {TOKEN}\n")
    assert token_from_environment() == TOKEN
    (tmp_path / "token").write_text(f"alice {TOKEN}\nbob bob-0123456789abcdef\n")
    with pytest.raises(UsageError, match="one token is needed, not 2"):
        token_from_environment()
    with pytest.raises(UsageError, match="at least one URL"):
        service_urls(" , ")
    assert service_urls("http://a:1/, http://b:2") == ("http://a:1", "http://b:2")


def test_what_no_service_allows_is_a_usage_error_and_holds_nothing(
    remote: RemoteBackend, service: Any
) -> None:
    with pytest.raises(UsageError, match="this service allows base"):
        remote.acquire(SandboxSpec(image="ubuntu"))
    with pytest.raises(UsageError, match="memory_mb"):
        remote.acquire(SandboxSpec(memory_mb=100_000))
    assert remote.left() == 0


def test_new_sandboxes_come_from_the_service_with_the_least_load(serve: Callable[..., Any]) -> None:
    small, large = serve(max_sandboxes=2), serve(max_sandboxes=6)
    backend = RemoteBackend([small.url, large.url], TOKEN)
    with ThreadPoolExecutor(8) as threads:
        sandboxes = list(threads.map(backend.acquire, [SPEC] * 8))
    assert (small.leases.count(), large.leases.count()) == (2, 6)
    assert backend.left() == 8
    for sandbox in sandboxes:
        assert sandbox.run("echo fine").output == "fine\n"
        backend.release(sandbox)
    for _ in range(4):
        backend.acquire(SPEC)
    assert (small.leases.count(), large.leases.count()) == (1, 3)
    backend.close()


def test_a_service_that_is_down_costs_its_own_sandboxes_and_no_others(serve: Callable[..., Any]) -> None:
    first, second = serve(), serve()
    backend = RemoteBackend([first.url, second.url], TOKEN)
    lost, kept = (backend.acquire(SPEC) for _ in range(2))
    assert first.leases.count() == second.leases.count() == 1
    first.stop()
    with pytest.raises(SandboxLostError):
        lost.run("true")
    assert kept.run("echo fine").output == "fine\n"
    new = backend.acquire(SPEC)
    assert new.endpoint.url == second.url
    backend.release(lost)
    backend.close()
    assert second.leases.count() == 0


def test_a_restarted_service_does_not_know_old_sandboxes_and_gives_new_ones(
    serve: Callable[..., Any],
) -> None:
    service = serve()
    backend = service.client()
    old = backend.acquire(SPEC)
    service.stop()
    again = serve(port=service.port)
    with pytest.raises(SandboxLostError, match="there is none"):
        old.run("true")
    backend.release(old)
    new = backend.acquire(SPEC)
    assert new.run("echo fine").output == "fine\n"
    backend.close()
    assert again.leases.count() == 0


def test_a_service_that_came_back_has_none_of_the_load_that_it_had(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "DOWN_S", 0.0)
    monkeypatch.setattr(endpoint, "PAUSES_S", (0.0, 0.0, 0.0))
    first, second = serve(), serve()
    backend = RemoteBackend([first.url, second.url], TOKEN)
    sandboxes = [backend.acquire(SPEC) for _ in range(6)]
    first.stop()
    for sandbox in sandboxes:
        backend.release(sandbox)
    serve(port=first.port)
    assert backend.acquire(SPEC).endpoint.url == first.url
    backend.close()


def test_services_that_join_are_used_and_those_that_have_gone_are_forgotten(
    serve: Callable[..., Any], until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOOK_AGAIN_S", 0.05)
    first, second = serve(), serve()
    there = [first.url]

    def look_again() -> list[str]:
        if not there:
            raise OSError("the cluster does not answer")
        return list(there)

    backend = RemoteBackend([first.url], TOKEN, look_again=look_again)
    lost = backend.acquire(SPEC)
    there.append(second.url)
    until(lambda: len(backend._endpoints) == 2)
    new = backend.acquire(SPEC)
    assert new.endpoint.url == second.url
    there.remove(first.url)
    first.stop()
    with pytest.raises(SandboxLostError):
        lost.run("true")
    assert len(backend._endpoints) == 2, "it lends"
    backend.release(lost)
    until(lambda: [endpoint.url for endpoint in backend._endpoints] == [second.url])
    there.clear()
    assert new.run("sleep 0.3; echo fine").output == "fine\n"
    assert [endpoint.url for endpoint in backend._endpoints] == [second.url], "nothing is known: all stay"
    backend.close()
    assert second.leases.count() == 0


def test_a_full_service_is_waited_for_and_an_end_comes(serve: Callable[..., Any]) -> None:
    service = serve(max_sandboxes=1)
    backend = service.client(acquire_timeout_s=60.0)
    held = backend.acquire(SPEC)
    threading.Timer(0.5, backend.release, [held]).start()
    second = backend.acquire(SPEC)
    assert second.id != held.id
    backend._acquire_timeout_s = 0.2
    with pytest.raises(SandboxError, match=r"no sandbox within 0\.2 s: .*all 1 sandboxes are taken"):
        backend.acquire(SPEC)
    backend.close()


class Breaking:
    """A proxy that breaks every second connection after it has handed the request on."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target, self.count = self.listener.getsockname()[1], port, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            threading.Thread(target=self._serve, args=(near, self.count % 2 == 0), daemon=True).start()

    def _serve(self, near: socket.socket, breaks: bool) -> None:
        with near, socket.create_connection(("127.0.0.1", self.target)) as far:
            request = b""
            while True:
                head, _, body = request.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                if head != request and len(body) >= (int(length[1]) if length else 0):
                    break
                if not (data := near.recv(1 << 16)):
                    return
                request += data
            far.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            while data := far.recv(1 << 16):
                if breaks:
                    return
                near.sendall(data)


def test_an_answer_that_is_lost_runs_no_command_twice(serve: Callable[..., Any]) -> None:
    service = serve()
    proxy = Breaking(service.port)
    backend = RemoteBackend([f"http://127.0.0.1:{proxy.port}"], TOKEN)
    sandbox = backend.acquire(SPEC)
    for number in range(1, 4):
        assert sandbox.run("echo x >> log; cat log").output == "x\n" * number
    assert proxy.count > 5, "some connections were broken"
    backend.close()
    proxy.listener.close()
    assert service.leases.count() == 0


def test_a_gateways_error_is_repeated_and_then_a_sandbox_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentenv_envs.swe.sandbox.service import endpoint as module

    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0, 0.0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = []

        def answer() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                with near:
                    asked.append(near.recv(1 << 16))
                    near.sendall(
                        b"HTTP/1.1 301 Moved\r\nLocation: https://there\r\n"
                        b"Content-Length: 4\r\nConnection: close\r\n\r\noops"
                    )

        threading.Thread(target=answer, daemon=True).start()
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN)
        with pytest.raises(SandboxError, match="HTTP 301, see https://there"):
            endpoint.ask("GET", "/v1/info")
        assert len(asked) == 4
        assert endpoint.rank[0], "it is asked last for a while"
        listener.shutdown(socket.SHUT_RDWR)
        endpoint.close()


def test_the_environment_takes_its_sandboxes_from_a_url(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTENV_SANDBOX_TOKEN", TOKEN)
    env = SWEEnv(sandbox_url=service.url)
    other = SWEEnv(sandbox_url=service.url)
    _, info = env.reset(seed=3)
    assert info["sandbox"] == "local-unisolated"
    assert service.leases.count() == 1
    assert env._backend.backend is other._backend.backend  # type: ignore[union-attr]
    env.close()
    other.close()
    assert service.leases.count() == 0
    with pytest.raises(UsageError, match=r"the sandbox service http://.* has 'local-unisolated'"):
        SWEEnv(sandbox="docker", sandbox_url=service.url)
    handle = open_backend(url=f"{service.url},{service.url}/")
    assert handle.kind == "local-unisolated"
    handle.close()


def test_a_process_that_forgets_to_close_gives_its_sandboxes_back(service: Any) -> None:
    forget = (
        "import sys\n"
        "from agentenv_envs.swe.sandbox import SandboxSpec, open_backend\n"
        "backend = open_backend(url=sys.argv[1])\n"
        "print(len([backend.acquire(SandboxSpec(read_only=True)) for _ in range(2)]))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", forget, service.url],
        env={**os.environ, "AGENTENV_SANDBOX_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (process.stdout, process.stderr) == ("2\n", "")
    assert service.leases.count() == 0
