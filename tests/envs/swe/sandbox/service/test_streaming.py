"""Output that is seen while its command runs: the same from each kind of sandbox."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import Sandbox, SandboxSpec, driver
from agentenv_envs.swe.sandbox.base import STREAM_BYTES, OutputStream
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
from agentenv_envs.swe.sandbox.local_backend import LocalBackend

SPEC = SandboxSpec(read_only=True)


@pytest.fixture(params=["local", "service", pytest.param("docker", marks=pytest.mark.docker)])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "docker":
        backend = request.getfixturevalue("docker_backend")
        sandbox = backend.acquire(SPEC)
        yield sandbox
        backend.release(sandbox)
        return
    backend = LocalBackend() if request.param == "local" else request.getfixturevalue("serve")().client()
    yield backend.acquire(SPEC)
    backend.close()


@pytest.fixture
def docker_sandbox(docker_backend: DockerBackend) -> Iterator[Sandbox]:
    sandbox = docker_backend.acquire(SPEC)
    yield sandbox
    docker_backend.release(sandbox)


def test_pieces_come_while_the_command_runs_and_make_up_its_output(sandbox: Sandbox) -> None:
    for pause_s in (2, 20):  # longer where the machine was slow, or stood still
        pieces: list[tuple[float, str]] = []
        started = time.monotonic()
        result = sandbox.run(
            f"echo first; echo second >&2; sleep {pause_s}; printf 'th\\303'; sleep 0.5; printf '\\274rd'; exit 3",
            on_output=lambda text: pieces.append((time.monotonic() - started, text)),  # noqa: B023
        )
        assert (result.exit_code, result.timed_out) == (3, False)
        assert "".join(text for _, text in pieces) == result.output == "first\nsecond\nthürd"
        assert pieces[0][1].startswith("first")
        assert not any("�" in text for _, text in pieces)
        if soon := pieces[0][0] < result.duration_s - 0.75 * pause_s:
            break
    assert soon, "it came long before the end"


def test_a_command_without_output_and_the_next_one_are_as_ever(sandbox: Sandbox) -> None:
    pieces: list[str] = []
    assert sandbox.run(":", on_output=pieces.append).exit_code == 0
    assert pieces == []
    assert sandbox.run("echo now", on_output=pieces.append).output == "now\n"
    assert pieces == ["now\n"]
    assert sandbox.run("echo then").output == "then\n"
    assert pieces == ["now\n"]


def test_what_was_written_before_a_time_out_is_seen(sandbox: Sandbox, run_cut: Callable[..., Any]) -> None:
    pieces: list[str] = []
    result = run_cut(sandbox, "echo early; sleep 60", on_output=pieces.append)
    assert result.timed_out
    assert "".join(pieces) == result.output == "early\n"


def test_an_endless_output_is_shown_up_to_its_limit(sandbox: Sandbox) -> None:
    pieces: list[str] = []
    command = f"head -c {3 * STREAM_BYTES} /dev/zero | tr '\\0' x; echo end"
    result = sandbox.run(command, half_bytes=100, on_output=pieces.append)
    assert sum(map(len, pieces)) == STREAM_BYTES
    assert result.total_bytes == 3 * STREAM_BYTES + 4
    assert result.output.endswith("xend\n")


def test_an_error_of_who_looks_on_comes_after_the_command_and_harms_nothing(sandbox: Sandbox) -> None:
    calls: list[str] = []

    def look(text: str) -> None:
        calls.append(text)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sandbox.run("echo a; sleep 0.7; echo b; sleep 0.7; touch done", on_output=look)
    assert len(calls) == 1
    assert sandbox.run("ls").output == "done\n"


def test_a_stopped_command_is_not_waited_for(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 200.0)
    started = time.monotonic()
    sandbox.run("echo before; kill -STOP $$", timeout_s=2.0, on_output=lambda text: None)
    assert time.monotonic() - started < 60.0
    assert sandbox.run("echo on").output == "on\n"


TAKES_ALL_PROCESSES = """python3 - <<'END'
import sys, threading, time
print("before", flush=True)
try:
    while True: threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
except RuntimeError: print("all", flush=True)
time.sleep(2)
sys.exit(4)
END"""


@pytest.mark.docker
def test_a_command_that_takes_all_processes_is_shown_and_not_harmed(docker_sandbox: Sandbox) -> None:
    pieces: list[str] = []
    result = docker_sandbox.run(TAKES_ALL_PROCESSES, timeout_s=60, on_output=pieces.append)
    assert (result.exit_code, result.output) == (4, "before\nall\n")
    assert "".join(pieces) == "before\nall\n"


@pytest.mark.docker
def test_nul_bytes_few_or_many_are_shown_as_they_are(docker_sandbox: Sandbox) -> None:
    pieces: list[str] = []
    docker_sandbox.run(
        "printf 'a\\0\\0b'; sleep 0.5; printf '\\0'; head -c 300 /dev/zero; echo c", on_output=pieces.append
    )
    assert "".join(pieces) == "a\0\0b" + 301 * "\0" + "c\n"


@pytest.mark.docker
def test_a_sandbox_is_not_used_again_after_an_interruption_in_mid_command(docker_sandbox: Sandbox) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        docker_sandbox.run("echo a; sleep 300", timeout_s=600, on_output=interrupt)
    started = time.monotonic()
    with pytest.raises(SandboxError, match="broken"):
        docker_sandbox.run("echo on")
    assert time.monotonic() - started < 60


def test_a_repeated_request_sees_what_it_has_not_seen(serve: Callable[..., Any]) -> None:
    service = serve()
    with service.http() as http:
        lease = "/v1/sandboxes/lease-12345678"
        http.put(lease, json={"spec": {"read_only": True}})
        command = "echo a; while [ ! -e go ]; do sleep 0.02; done; echo b"
        body: dict[str, Any] = {"command": command, "seen": 0, "wait_s": 20}
        first = http.put(f"{lease}/commands/0", json=body)
        again = http.put(f"{lease}/commands/0", json=body)
        assert first.status_code == again.status_code == 202
        assert first.json()["shown"] == again.json()["shown"] == "a\n"
        (service.leases.get("alice", "lease-12345678").made.result().get().workdir / "go").touch()
        end = http.put(f"{lease}/commands/0", json={**body, "seen": first.json()["seen"]}).json()
        assert (end["shown"], end["output"]) == ("b\n", "a\nb\n")
        refused = http.put(f"{lease}/commands/1", json={**body, "seen": -1})
        assert refused.status_code == 422
        assert "seen=-1" in refused.json()["error"]["message"]


class Growing(list[str]):
    """Gets another piece whenever one has looked."""

    def __getitem__(self, at: Any) -> Any:
        pieces = super().__getitem__(at)
        self.append("late")
        return pieces


def test_a_piece_that_comes_while_an_answer_is_made_is_in_the_next_one(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    command = service.leases.command

    def with_growing(lease: Any, *arguments: Any, **settings: Any) -> Any:
        future = command(lease, *arguments, **settings)
        lease.shown = Growing(["a"])
        return future

    monkeypatch.setattr(service.leases, "command", with_growing)
    with service.http() as http:
        lease = "/v1/sandboxes/lease-12345678"
        http.put(lease, json={"spec": {"read_only": True}})
        answer = http.put(f"{lease}/commands/0", json={"command": "true", "seen": 0}).json()
    assert (answer["shown"], answer["seen"]) == ("a", 1)


def test_bytes_that_are_no_text_are_replaced_and_a_cut_character_waits_for_its_end() -> None:
    pieces: list[str] = []
    stream = OutputStream(pieces.append)
    for part in (b"\xe2\x82", b"\xac\xff", b"\xe2"):
        stream.feed(part)
    stream.end()
    assert pieces == ["€�", "�"]
