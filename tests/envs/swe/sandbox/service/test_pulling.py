"""`agentenv sandbox serve --pull`: images are there before leases are given, from a registry of this machine."""

import gzip
import hashlib
import io
import json
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from agentenv.cli import main
from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import SandboxSpec, images
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend
from agentenv_envs.swe.sandbox.service.client import RemoteBackend

TOKEN = "trainer-0123456789abcdef"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Registry:
    """As much of a registry as a pull of one image needs: the manifest of `tiny:1`, its configuration, one layer."""

    def __init__(self) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo("hello")
            member.size = 5
            archive.addfile(member, io.BytesIO(b"hello"))
        layer = gzip.compress(packed.getvalue(), mtime=0)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [digest(packed.getvalue())]},
            }
        ).encode()
        kind = "application/vnd.docker"
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": f"{kind}.distribution.manifest.v2+json",
                "config": {
                    "mediaType": f"{kind}.container.image.v1+json",
                    "size": len(config),
                    "digest": digest(config),
                },
                "layers": [
                    {
                        "mediaType": f"{kind}.image.rootfs.diff.tar.gzip",
                        "size": len(layer),
                        "digest": digest(layer),
                    }
                ],
            }
        ).encode()
        answers = {"/v2/": b"{}", "/v2/tiny/manifests/1": manifest}
        answers[f"/v2/tiny/manifests/{digest(manifest)}"] = manifest
        answers |= {f"/v2/tiny/blobs/{digest(blob)}": blob for blob in (config, layer)}
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                body = answers.get(self.path)
                self.send_response(404 if body is None else 200)
                body = b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}' if body is None else body
                manifests = "/manifests/" in self.path
                self.send_header(
                    "content-type",
                    f"{kind}.distribution.manifest.v2+json" if manifests else "application/octet-stream",
                )
                self.send_header("content-length", str(len(body)))
                self.send_header("docker-content-digest", digest(body))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.image = f"127.0.0.1:{self.server.server_address[1]}/tiny:1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def registry(docker_backend: DockerBackend) -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.close()
    if images.has_image(docker_backend.client, registry.image):
        docker_backend.client.images.remove(registry.image, force=True)


@pytest.mark.docker
def test_an_image_is_pulled_once_with_progress(docker_backend: DockerBackend, registry: Registry) -> None:
    said: list[str] = []
    images.ensure_pulled(docker_backend.client, registry.image, progress=said.append)
    assert images.has_image(docker_backend.client, registry.image)
    assert said[0] == f"pulling {registry.image}"
    assert said[-1].startswith(f"pulled {registry.image} in ")
    assert any("/blobs/" in path for path in registry.asked)
    registry.asked.clear()
    images.ensure_pulled(docker_backend.client, registry.image, progress=said.append)
    assert registry.asked == []


@pytest.mark.docker
def test_an_image_that_a_registry_lacks_is_one_error(
    docker_backend: DockerBackend, registry: Registry
) -> None:
    missing = registry.image.replace("tiny:1", "missing:1")
    with pytest.raises(SandboxError, match=f"the image {missing} can't be pulled: .*"):
        images.ensure_pulled(docker_backend.client, missing, progress=lambda line: None)


@pytest.mark.docker
def test_a_service_listens_when_its_images_are_there_and_lets_clients_use_them(
    docker_backend: DockerBackend, registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"trainer {TOKEN}\n")
    command = [sys.executable, "-m", "agentenv.cli", "sandbox", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--token-file", str(tmp_path / "tokens"), "--pull", registry.image],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line.strip())
            if line.startswith("sandbox service: "):
                break
        assert f"pulling {registry.image}" in lines and lines[-1].startswith("sandbox service: "), lines
        assert images.has_image(docker_backend.client, registry.image)
        remote = RemoteBackend([lines[-1].split()[-1]], TOKEN)
        # It is allowed, though nothing runs in it: it has no shell.
        with pytest.raises(SandboxError) as caught:
            remote.acquire(SandboxSpec(image=registry.image))
        assert "this service allows" not in str(caught.value)
        remote.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()


@pytest.mark.docker
def test_an_image_that_can_not_be_pulled_ends_the_service_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text(f"trainer {TOKEN}\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    image = f"127.0.0.1:{port}/tiny:1"
    options = ["--port", "0", "--token-file", str(tmp_path / "tokens"), "--pull", image]
    assert main(["sandbox", "serve", *options]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("agentenv: error: ")]
    assert len(errors) == 1 and f"the image {image} can't be pulled: " in errors[0]
