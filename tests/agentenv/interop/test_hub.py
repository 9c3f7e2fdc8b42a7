"""`agentenv push`, with huggingface_hub as it is released against a server that speaks the hub's HTTP."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli import main
from agentenv.errors import InfrastructureError, UsageError
from agentenv.interop.hub import push_run
from agentenv.report import RunDirectory

constants = pytest.importorskip("huggingface_hub.constants")


class FakeHub(BaseHTTPRequestHandler):
    """Makes repositories and takes commits; other requests are answered with 404."""

    repositories: dict[str, dict[str, Any]]
    tokens: set[str]
    refused: dict[str, int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if self.headers.get("Authorization") not in {f"Bearer {token}" for token in self.tokens}:
            return self._answer(401, {"error": "Invalid credentials"})
        for piece, status in self.refused.items():
            if piece in path:
                return self._answer(status, {"error": "out of order"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = self.repositories.setdefault(name, {"asked": asked, "files": {}})
            status = 409 if known["files"] else 200
            return self._answer(status, {"url": f"{constants.ENDPOINT}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":  # of the card's head
            errors = (
                []
                if json.loads(body)["content"].startswith("---\nlibrary_name: ")
                else [{"message": "no head"}]
            )
            return self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self._answer(200, {"files": [{"path": file["path"], **plain} for file in files]})
        if "/commit/" in path:
            name = path.removeprefix("/api/models/").split("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.repositories[name]["files"][line["value"]["path"]] = content
            commit = "0" * 40
            return self._answer(
                200, {"commitUrl": f"{constants.ENDPOINT}/{name}/commit/{commit}", "commitOid": commit}
            )
        return self._answer(404, {"error": f"no such thing: {path}"})

    def do_GET(self) -> None:
        self._answer(404, {"error": "no such thing"})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeHub]]:
    """A hub of its own, that huggingface_hub takes for the hub, with a token in the environment."""
    kind = type("Hub", (FakeHub,), {"repositories": {}, "tokens": {"hf_secret"}, "refused": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield kind
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run = RunDirectory.create(tmp_path / "run", {"name": "swe_sao", "env": "SWE-v0", "algorithm": "SAO"})
    run.log_metrics(1, {"success": 0.5})
    run.write_summary({"status": "finished", "steps": 1})
    run.close()
    run.model_path.mkdir()
    (run.model_path / "config.json").write_text('{"model_type": "qwen3"}')
    (run.model_path / "model.safetensors").write_bytes(bytes(range(256)))
    return run.path


def test_the_model_and_its_card_are_what_the_hub_gets(
    fake: type[FakeHub], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(finished), "me/agent", "--private"]) == 0
    assert capsys.readouterr().out == f"{constants.ENDPOINT}/me/agent\n"
    repository = fake.repositories["me/agent"]
    assert "private" in (repository["asked"].get("visibility"), *repository["asked"])
    sent = repository["files"]
    assert set(sent) == {"README.md", "config.json", "curve.svg", "model.safetensors"}
    assert sent["model.safetensors"] == bytes(range(256))
    assert b"# SWE\\-v0 by SAO" in sent["README.md"] and b'name = "me/agent"' in sent["README.md"]
    assert sent["curve.svg"].startswith(b"<svg")
    assert main(["push", str(finished), "me/agent"]) == 0, "once more, over what is there"


def test_no_token_a_wrong_one_and_a_malformed_name_are_one_clear_error(
    fake: type[FakeHub], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="can't push to 'a/b/c'"):
        push_run(finished, "a/b/c")
    with pytest.raises(UsageError, match=r"can't push to me/agent: .*401"):
        push_run(finished, "me/agent", token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="no token; set HF_TOKEN"):
        push_run(finished, "me/agent")
    assert fake.repositories == {}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        push_run(finished, "me/agent")


def test_a_hub_that_fails_or_cannot_be_reached_is_told_with_what_to_do(
    fake: type[FakeHub], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.refused["/commit/"] = 400
    with pytest.raises(InfrastructureError, match=rf"to try again: agentenv push {finished} me/agent"):
        push_run(finished, "me/agent")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InfrastructureError, match="can't be reached"):
        push_run(finished, "me/agent")
