"""The HTTP interface, as any client meets it."""

import base64
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from agentenv_envs.swe.sandbox.local_backend import LocalBackend
from agentenv_envs.swe.sandbox.service import app

LEASE = "/v1/sandboxes/lease-0001"


@pytest.fixture
def http(service: Any) -> Iterator[httpx.Client]:
    with service.http() as client:
        assert client.put(LEASE, json={"spec": {"read_only": True}}).status_code == 201
        yield client


def error(answer: httpx.Response) -> tuple[int, str, str]:
    fields = answer.json()["error"]
    assert "\n" not in fields["message"]
    return answer.status_code, fields["type"], fields["message"]


def test_a_sandbox_is_taken_used_and_given_back(http: httpx.Client, service: Any) -> None:
    files = {"a.txt": base64.b64encode(b"\xff\0\n").decode()}
    assert http.put(f"{LEASE}/files", json={"files": files}).status_code == 200
    answer = http.put(f"{LEASE}/commands/0", json={"command": "wc -c < a.txt; exit 3"})
    assert (answer.json()["output"].strip(), answer.json()["exit_code"]) == ("3", 3)
    assert http.post(f"{LEASE}/read", json={"path": "a.txt"}).content == b"\xff\0\n"
    assert answer.headers["x-agentenv-load"] == "1/32"
    assert http.post(f"{LEASE}/reset", json={"files": {}}).status_code == 200
    assert error(http.post(f"{LEASE}/read", json={"path": "a.txt"}))[:2] == (404, "no_file")
    assert http.get("/v1/sandboxes").json() == {"ids": ["lease-0001"]}
    assert http.delete(LEASE).json() == {"state": "ended"}
    assert error(http.delete(LEASE))[:2] == (404, "gone")
    assert service.leases.backend.left() == 0


def test_without_a_known_token_nothing_is_told(service: Any) -> None:
    with service.http(None) as http:
        for headers in ({}, {"authorization": "Bearer nobody"}, {"authorization": "Basic YTpi"}):
            for method, path in (
                ("GET", "/v1/info"),
                ("GET", "/v1/sandboxes"),
                ("GET", "/metrics"),
                ("PUT", LEASE),
                ("DELETE", LEASE),
                ("PUT", f"{LEASE}/commands/0"),
                ("PUT", f"{LEASE}/files"),
                ("POST", f"{LEASE}/read"),
                ("POST", f"{LEASE}/reset"),
                ("POST", "/v1/renew"),
                ("PUT", "/v1/images"),
            ):
                answer = http.request(method, path, headers=headers)
                assert error(answer)[:2] == (401, "unauthorized")
                assert "x-agentenv-load" not in answer.headers
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.get("/readyz").json() == {"status": "ok"}
    assert service.leases.count() == 0


def test_another_clients_sandbox_does_not_exist(http: httpx.Client, service: Any) -> None:
    with service.http("bob") as bob:
        absent = error(bob.delete("/v1/sandboxes/lease-none"))
        for method, path, body in (
            ("PUT", f"{LEASE}/commands/0", {"command": "true"}),
            ("PUT", f"{LEASE}/files", {"files": {}}),
            ("POST", f"{LEASE}/read", {"path": "x"}),
            ("POST", f"{LEASE}/reset", {}),
            ("DELETE", LEASE, None),
        ):
            answer = error(bob.request(method, path, json=body))
            assert answer == (404, "gone", absent[2].replace("lease-none", "lease-0001"))
        assert bob.get("/v1/sandboxes").json() == {"ids": []}
        assert bob.post("/v1/renew", json={"ids": ["lease-0001"]}).json() == {"lost": ["lease-0001"]}
        assert bob.put(LEASE, json={}).status_code == 201, "the name is free for Bob"
        bob.put(f"{LEASE}/files", json={"files": {"bobs": ""}})
    assert error(http.post(f"{LEASE}/read", json={"path": "bobs"}))[:2] == (404, "no_file")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("commands/0", b"{", "the body is not JSON"),
        ("commands/0", b"[" * 100_000, "the body is not JSON"),
        ("commands/0", b"[]", "the body: a JSON object is needed"),
        ("commands/0", b"{}", "command=None: a string is needed"),
        ("commands/0", b'{"command": "true", "timeout_s": -1}', "timeout_s=-1: 0.001 to 7200 is allowed"),
        ("commands/0", b'{"command": "true", "timeout_s": NaN}', "timeout_s=nan: a number is needed"),
        ("commands/0", b'{"command": "true", "timeout_s": 1' + b"0" * 400 + b"}", "0.001 to 7200 is allowed"),
        ("commands/0", b'{"command": "true", "half_bytes": 1e9}', "half_bytes=1000000000.0: 1 to"),
        ("commands/0", b'{"command": "true", "user": "root"}', "user: no such field"),
        ("commands/-1", b'{"command": "true"}', "number of the command '-1'"),
        ("commands/x", b'{"command": "true"}', "number of the command 'x'"),
        ("files", b'{"files": {"a": "*"}}', "the content of 'a' is not base64"),
        ("files", b'{"files": {"a": 1}}', "the content of 'a' is not base64"),
        ("files", b'{"files": []}', "files: an object is needed"),
        ("files", b'{"files": {"../../../etc/passwd": ""}}', "lies outside of /work"),
        ("files", b'{"files": {"a\\u0000b": ""}}', "a path without NUL characters is needed"),
    ],
)
def test_a_malformed_request_is_one_message_and_harms_nothing(
    http: httpx.Client, path: str, body: bytes, message: str
) -> None:
    status, _, text = error(http.put(f"{LEASE}/{path}", content=body))
    assert status == 422
    assert message in text
    assert http.put(f"{LEASE}/commands/7", json={"command": "echo fine"}).json()["output"] == "fine\n"


def test_an_unknown_path_or_method_is_an_error_in_the_same_form(http: httpx.Client) -> None:
    assert error(http.get("/v1/containers"))[0] == 404
    assert error(http.post(LEASE))[0] == 405
    assert error(http.put("/v1/sandboxes/UPPER_CASE", json={}))[0] == 422


def test_a_body_is_read_up_to_its_limit(serve: Callable[..., Any]) -> None:
    service = serve(body_bytes=1000)
    with service.http() as http:
        http.put(LEASE, json={})
        assert error(http.put(f"{LEASE}/files", content=b" " * 1001))[:2] == (413, "too_large")

        def endless() -> Iterator[bytes]:
            for _ in range(10_000):
                yield b" " * 1000

        with suppress(httpx.TransportError):  # the connection may be closed while it still sends
            assert http.put(f"{LEASE}/files", content=endless()).status_code == 413
        assert http.get("/v1/sandboxes").json() == {"ids": ["lease-0001"]}


def test_a_body_that_is_cut_off_or_does_not_come_is_no_fault_of_the_service(
    service: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    until: Callable[..., None],
) -> None:
    head = (
        b"POST /v1/renew HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        b"Authorization: Bearer alice-0123456789abcdef\r\n\r\n{"
    )
    refused = service.leases.metrics.refused.labels("usage")._value
    with socket.create_connection(("127.0.0.1", service.port)) as near:
        near.sendall(head)
    until(lambda: refused.get() == 1)
    assert not [record for record in caplog.records if record.exc_info]
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.2)
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as near:
        near.sendall(head)
        assert near.recv(1000).startswith(b"HTTP/1.1 504 ")


def test_only_so_many_leases_are_renewed_at_once(http: httpx.Client) -> None:
    assert error(http.post("/v1/renew", json={"ids": ["x"] * 10_001}))[:2] == (422, "usage")


def test_a_long_command_is_waited_for_in_pieces_and_runs_once(http: httpx.Client) -> None:
    body = {"command": "echo x >> log; sleep 1; cat log", "wait_s": 0.3}
    answers = []
    while not answers or answers[-1].status_code == 202:
        answers.append(http.put(f"{LEASE}/commands/0", json=body))
    assert answers[0].json() == {"state": "running"}
    assert len(answers) >= 3
    assert answers[-1].json()["output"] == "x\n"
    assert http.put(f"{LEASE}/commands/0", json=body).json()["output"] == "x\n", (
        "a lost answer can be asked for again"
    )


def test_quotas_are_told_apart(serve: Callable[..., Any]) -> None:
    service = serve(max_sandboxes=2, per_client=1)
    with service.http() as alice, service.http("bob") as bob:
        assert alice.put(LEASE, json={}).status_code == 201
        answer = alice.put("/v1/sandboxes/lease-0002", json={})
        assert error(answer)[:2] == (429, "quota")
        assert answer.headers["retry-after"] == "1"
        assert bob.put(LEASE, json={}).status_code == 201
        alice.delete(LEASE)
        assert alice.put("/v1/sandboxes/lease-0003", json={}).status_code == 201


def test_what_cant_be_made_takes_no_place(serve: Callable[..., Any], until: Callable[..., None]) -> None:
    service = serve(images=("*",))
    with service.http() as http:
        assert error(http.put(LEASE, json={"spec": {"image": "missing"}}))[:2] == (422, "usage")
        until(lambda: service.leases.count() == 0)
        assert http.put(LEASE, json={}).status_code == 201


def test_package_rows_are_built_only_where_the_service_allows_it(
    serve: Callable[..., Any], http: httpx.Client
) -> None:
    row = {"instance_id": "a-1", "package": "six==1.16.0", "install": ["pytest<8"]}
    status, kind, message = error(http.put("/v1/images", json={"task": row}))
    assert (status, kind) == (403, "forbidden")
    assert "--allow-packages" in message
    with serve(packages=True).http() as allowed:
        for changes, text in (
            ({"package": "six"}, "task.package='six'"),
            ({"package": "git+https://example.org/x"}, "task.package="),
            ({"install": ["--index-url=x"]}, "task.install="),
            ({"install": ["x @ file:///etc"]}, "task.install="),
            ({"source_root": "../.."}, "task.source_root="),
            ({"workdir": "/testbed\nRUN id"}, "task.workdir="),
            ({"instance_id": "a\nRUN id"}, "task.instance_id="),
            ({"dockerfile": "FROM x"}, "task.dockerfile: no such field"),
        ):
            status, kind, message = error(allowed.put("/v1/images", json={"task": row | changes}))
            assert (status, kind) == (422, "usage")
            assert text in message


def test_metrics_tell_of_all_clients_and_of_none(http: httpx.Client) -> None:
    http.put(f"{LEASE}/commands/0", json={"command": "true"})
    text = http.get("/metrics").text
    assert "agentenv_sandbox_leases 1.0" in text
    assert 'agentenv_sandbox_commands_total{how="ended"} 1.0' in text
    assert "alice" not in text


def test_a_drain_lets_leases_go_on_until_they_are_given_back(
    serve: Callable[..., Any], until: Callable[..., None]
) -> None:
    service = serve(drain_s=30.0)
    with service.http() as http:
        http.put(LEASE, json={})
        service.service.stop()
        until(lambda: service.leases.draining)
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == 200
        assert error(http.put("/v1/sandboxes/lease-0002", json={}))[:2] == (503, "draining")
        assert http.put(f"{LEASE}/commands/0", json={"command": "echo fine"}).json()["output"] == "fine\n"
        assert service.thread.is_alive()
        http.delete(LEASE)
    service.thread.join(60)
    assert not service.thread.is_alive()


def test_a_drain_cuts_at_its_deadline_what_still_runs(serve: Callable[..., Any]) -> None:
    backend = LocalBackend()
    service = serve(backend, drain_s=0.5)
    with service.http() as http:
        http.put(LEASE, json={})
        service.service.stop()
        started = time.monotonic()
        answer = http.put(f"{LEASE}/commands/0", json={"command": "sleep 300; true", "wait_s": 20})
        assert time.monotonic() - started < 60
        assert answer.status_code == 502 or answer.json()["exit_code"] != 0
    service.thread.join(60)
    assert not service.thread.is_alive()
    assert backend.left() == 0
