"""Servers on the nodes of a Ray cluster: placed, found, started again, ended; and what is refused."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli import main
from agentenv.cluster import services
from agentenv.cluster.services import find, resolve_urls, serve, stop
from agentenv.errors import MissingExtraError, UsageError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Tells its process id.
SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
COMMAND = [sys.executable, "-c", SERVER, "{host}", "{port}"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that takes no servers, and two nodes that take one or two each."""
    import ray
    from ray.cluster_utils import Cluster

    memory = 80 * 2**20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": memory})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, resources={"docker": 1}, object_store_memory=memory)
        ray.init(address=cluster.address, namespace=services.NAMESPACE, logging_level="WARNING")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def nothing_left(cluster: Any) -> Iterator[None]:
    yield
    stop()
    assert find() == []


def answer(url: str) -> int:
    """Process id of the server."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return int(response.read())


def until(holds: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 180
    while True:
        try:
            found = holds()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("nothing_left")
def test_servers_are_spread_found_started_again_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cluster", "serve", "--kind", "sandbox", "--resources", "docker=1", "--", *COMMAND]
    assert main(command) == 0
    assert main(command) == 0, "one more, beside the one that runs"
    states = find("sandbox")
    assert [state.name for state in states] == ["sandbox-0", "sandbox-1"]
    told = [f"{state.name}: {state.url} on {state.host}" for state in states]
    assert capsys.readouterr().out.splitlines() == told
    urls = [state.url for state in states]
    assert resolve_urls("ray", "sandbox") == ",".join(urls)
    pids = [answer(url) for url in urls]
    os.kill(pids[0], signal.SIGKILL)
    again = until(
        lambda: (pid := answer(urls[0])) != pids[0] and pid, "it is not started again at its address"
    )
    assert again != pids[0] and answer(urls[1]) == pids[1]
    first, second = find("sandbox")
    assert (first.starts, second.starts) == (2, 1)
    assert first.problem.startswith("ended with 9") and not second.problem
    (third,) = serve("engine", COMMAND, number=1, resources={"CPU": 1})
    assert resolve_urls("ray", "engine") == third.url
    assert stop("sandbox") == 2
    until(lambda: is_gone(again) and is_gone(pids[1]), "a server outlives its end")
    assert [state.name for state in find()] == ["engine-0"]
    assert main(["cluster", "list"]) == 0
    with pytest.raises(UsageError, match=r"^ray: no server of the kind sandbox .*agentenv cluster serve"):
        resolve_urls("ray", "sandbox")


@pytest.mark.usefixtures("nothing_left")
def test_a_server_ends_with_its_actor_and_comes_back_elsewhere() -> None:
    import ray

    (state,) = serve("engine", COMMAND, number=1, resources={"CPU": 1})
    pid = answer(state.url)
    ray.kill(ray.get_actor(state.name, namespace=services.NAMESPACE), no_restart=False)
    until(lambda: is_gone(pid), "the server outlives its actor")
    url = until(lambda: [found.url for found in find("engine") if found.listens], "it does not come back")[0]
    assert answer(url) != pid


@pytest.mark.usefixtures("nothing_left")
def test_a_server_whose_node_is_lost_comes_back_on_another_and_is_found_there(cluster: Any) -> None:
    added = cluster.add_node(num_cpus=1, resources={"spare": 1}, object_store_memory=80 * 2**20)
    (state,) = serve("engine", COMMAND, number=1, resources={"spare": 1})
    pid = answer(state.url)
    cluster.add_node(num_cpus=1, resources={"spare": 1}, object_store_memory=80 * 2**20)
    cluster.remove_node(added, allow_graceful=False)
    until(lambda: is_gone(pid), "the server outlives its node")
    (url,) = until(lambda: [found.url for found in find("engine") if found.listens], "it does not come back")
    assert answer(url) != pid and resolve_urls("ray", "engine") == url


@pytest.mark.usefixtures("nothing_left")
def test_a_command_that_ends_at_once_is_bad_input_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no such model')", "{port}"]
    assert main(["cluster", "serve", "--kind", "engine", "--number", "2", "--", *broken]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("agentenv: error: engine-0: the command on ")
    assert message.endswith("ended with 1: no such model")
    assert find() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "engine", "--", "true"], "the command needs {port}"),
        (["--kind", "engine"], "a command is needed, after --"),
        (["--kind", "engine", "--number", "0", "--", *COMMAND], "--number 0: at least 1 is needed"),
        (
            ["--kind", "engine", "--resources", "TPU=4", "--", *COMMAND],
            "needs TPU=4 on one node, which no node",
        ),
        (["--kind", "engine", "--resources", "docker", "--", *COMMAND], "'docker' must be like docker=1"),
        (["--kind", "trainer", "--", *COMMAND], "invalid choice: 'trainer'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    cluster: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["cluster", "serve", *options])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.usefixtures("nothing_left")
def test_a_server_that_no_node_has_room_for_is_told_of_and_not_left(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray

    serve("sandbox", COMMAND, number=2, resources={"docker": 1})
    monkeypatch.setattr(services, "_PLACE_PATIENCE_S", 0.5)
    caplog.clear()
    with pytest.raises(UsageError, match=r"^sandbox-2: not within 2 s: no node has room for it$"):
        serve("sandbox", COMMAND, number=1, resources={"docker": 1}, start_timeout_s=2.0)
    assert caplog.text.count("sandbox-2: no node of the Ray cluster has room so far for docker=1") == 1
    assert [state.name for state in find()] == ["sandbox-0", "sandbox-1"]
    services._start(ray, "sandbox-2", COMMAND, {"docker": 1})
    monkeypatch.setattr(services, "_ANSWER_TIMEOUT_S", 5.0)
    monkeypatch.setattr(services, "_STOP_TIMEOUT_S", 300.0)
    assert main(["cluster", "list"]) == 0
    first, second, waiting = capsys.readouterr().out.splitlines()
    assert first.endswith("starts 1") and second.endswith("starts 1")
    assert waiting == "sandbox-2: waits for a node with room, or its node does not answer"
    began = time.monotonic()
    assert stop("sandbox") == 3
    assert time.monotonic() - began < 200, "what runs nowhere is not waited for"


def test_urls_are_left_as_they_are() -> None:
    assert resolve_urls("http://a:1,http://b:2", "sandbox") == "http://a:1,http://b:2"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"agentenv-rl\[ray\]"):
        resolve_urls("ray", "engine")


@pytest.mark.docker
@pytest.mark.usefixtures("nothing_left")
def test_sandboxes_are_taken_from_services_that_ray_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    from agentenv_envs.swe.sandbox import SandboxSpec, open_backend
    from agentenv_envs.swe.sandbox.service import client

    tokens = tmp_path / "tokens"
    tokens.write_text("trainer trainer-0123456789abcdef\n")
    monkeypatch.setenv("AGENTENV_SANDBOX_TOKEN_FILE", str(tokens))
    command = [sys.executable, "-m", "agentenv", "sandbox", "serve", "--host", "{host}", "--port", "{port}"]
    command += ["--token-file", str(tokens)]
    monkeypatch.setattr(client, "LOOK_AGAIN_S", 0.2)
    states = serve("sandbox", command, number=1, resources={"docker": 1})
    held = open_backend("docker", url="ray")
    try:
        states += serve("sandbox", command, number=1, resources={"docker": 1})
        until(lambda: len(held.backend._endpoints) == 2, "a service that joins is not used")  # type: ignore[attr-defined]
        sandboxes = [held.acquire(SandboxSpec(read_only=True)) for _ in range(2)]
        assert {sandbox.endpoint.url for sandbox in sandboxes} == {state.url for state in states}  # type: ignore[attr-defined]
        assert [sandbox.run("echo fine").output for sandbox in sandboxes] == ["fine\n"] * 2
        for sandbox in sandboxes:
            held.release(sandbox)
    finally:
        held.close()
