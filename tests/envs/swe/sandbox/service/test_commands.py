"""`agentenv sandbox serve` with bad input, and how a row's image comes to be."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from agentenv.cli import main
from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.sandbox.service.client import RemoteBackend
from agentenv_envs.swe.sandbox.service.limits import ServiceLimits
from agentenv_envs.swe.sandbox.service.task_images import TaskImages
from agentenv_envs.swe.sandbox.service.wire import Refusal
from agentenv_envs.swe.task import SWETask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--token-file", "missing"], "--token-file missing"),
        (["--token-file", "short"], "at least 16 characters"),
        (["--token-file", "good", "--max-sandboxes", "0"], "max_sandboxes=0: more than 0 is needed"),
        (["--token-file", "good", "--per-client", "-1"], "per_client=-1: more than 0 is needed"),
        (["--token-file", "good", "--pull", "a b"], "--pull 'a b': not the name of an image"),
        (["--token-file", "good", "--port", "70000"], "--port 70000: 0 to 65535 is allowed"),
        (
            ["--token-file", "good", "--host", "203.0.113.1"],
            "--host 203.0.113.1 --port 8700: can't listen there",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("alice short\n")
    Path("good").write_text("alice 0123456789abcdef\n")
    assert main(["sandbox", "serve", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("agentenv: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_port_that_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").write_text("0123456789abcdef\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["sandbox", "serve", "--port", port, "--token-file", str(tmp_path / "tokens")]) == 2
    assert "can't listen there" in capsys.readouterr().err


def row(**fields: Any) -> SWETask:
    return SWETask("a-1", "", "", "", ("t.py::t",), (), ("t.py",), **fields)


def test_each_service_makes_a_rows_image_once_when_a_sandbox_of_it_is_wanted(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str | None, tuple[str, ...]]] = []

    def ensure(task: SWETask, backend: object) -> str:
        if task.package == "broken==1":
            raise SandboxError("pip failed")
        made.append((task.package, task.install))
        return f"agentenv/swe-six:{len(made)}"

    services = [serve(packages=True, images=("swebench/*",)) for _ in range(2)]
    for service in services:
        monkeypatch.setattr(service.service._images, "_ensure", ensure)
    backend = RemoteBackend([service.url for service in services], "alice-0123456789abcdef")
    task = row(package="six==1.16.0", install=("pytest<8", "attrs>=20.1,<24", "coverage[toml]"))
    spec = SandboxSpec(image=backend.task_image(task), read_only=True)
    assert made == [], "nothing is built before it is needed"
    sandboxes = [backend.acquire(spec) for _ in range(4)]
    assert made == [("six==1.16.0", task.install)] * 2, "one image for each service's engine"
    used = {lease.spec.image for service in services for lease in service.leases._table.values()}
    assert used == {"agentenv/swe-six:1", "agentenv/swe-six:2"}
    assert {sandbox.spec.image for sandbox in sandboxes} == {spec.image}
    image = backend.task_image(row(image="swebench/x:1"))
    assert image == "swebench/x:1"
    with pytest.raises(SandboxError, match="pip failed"):
        backend._acquire_at(
            backend._endpoints[0],
            SandboxSpec(image=backend.task_image(row(package="broken==1")), read_only=True),
        )
    backend.close()


def test_rows_that_a_service_cant_serve_are_usage_errors(service: Any, remote: RemoteBackend) -> None:
    with pytest.raises(UsageError, match="source_archive needs an engine on this machine"):
        remote.task_image(row(package="six==1.16.0", source_archive="six.tar.gz"))
    packaged = SandboxSpec(image=remote.task_image(row(package="six==1.16.0")))
    with pytest.raises(UsageError, match="--allow-packages"):
        remote.acquire(packaged)
    pulled = SandboxSpec(image=remote.task_image(row(image="ubuntu:24.04")))
    with pytest.raises(UsageError, match="this service allows base"):
        remote.acquire(pulled)
    assert service.leases.count() == 0


def test_equal_requests_share_one_build_and_a_failed_one_is_tried_again() -> None:
    tries: list[str] = []

    def ensure(task: SWETask, backend: object) -> str:
        tries.append(str(task.package))
        if len(tries) == 1:
            raise SandboxError("pip failed")
        return "agentenv/swe-six:1"

    backend = LocalBackend()
    images = TaskImages(backend, ServiceLimits(packages=True), ensure)
    request = {"instance_id": "a-1", "package": "six==1.16.0"}
    assert isinstance(images.request(request).result(60).error, SandboxError)
    assert images.request(request).result(60).get() == "agentenv/swe-six:1"
    assert images.request(request).result(60).get() == "agentenv/swe-six:1"
    assert len(tries) == 2
    held = threading.Event()
    images._ensure = lambda task, backend: str(held.wait(120))
    waiting = [images.request(request | {"package": f"six=={number}"}) for number in range(64)]
    with pytest.raises(Refusal, match="64 images are waiting to be made"):
        images.request(request | {"package": "six==64"})
    assert images.request(request | {"package": "six==63"}) is waiting[-1], "who asks again waits on"
    held.set()
    images.close()
    backend.close()
