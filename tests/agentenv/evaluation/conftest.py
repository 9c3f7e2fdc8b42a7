"""A real chat server on this machine that answers, and fails, as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, Any, dict[str, str]] | str | None
"""Status, body and headers; a text that the model says; None: the connection is cut."""


@dataclass
class FakeServer:
    """What a test sets and reads."""

    url: str = ""
    answer: Callable[[dict[str, Any]], Answer] = lambda request: "word"
    models: list[str] = field(default_factory=lambda: ["tiny"])
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    counts: bool = True
    """Says how many tokens a turn took."""
    pause_s: float = 0.0
    """After each byte of an answer."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            fake.keys.append(self.headers.get("Authorization"))
            if self.path == "/v1/models":
                self.reply(200, {"data": [{"id": name} for name in fake.models]})
            else:
                self.reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(request)
            fake.keys.append(self.headers.get("Authorization"))
            if self.path != "/v1/chat/completions":
                self.reply(404, {"detail": "Not Found"})
                return
            answer = fake.answer(request)
            if answer is None:
                self.connection.close()
            elif isinstance(answer, tuple):
                self.reply(*answer)
            else:
                body: dict[str, Any] = {
                    "choices": [
                        {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
                    ]
                }
                if fake.counts:
                    body["usage"] = {"prompt_tokens": 10, "completion_tokens": 2}
                self.reply(200, body)

        def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if not fake.pause_s:
                    self.wfile.write(data)
                else:
                    for byte in data:
                        self.wfile.write(bytes([byte]))
                        time.sleep(fake.pause_s)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has given up

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            pass

    http = Quiet(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield fake
    http.shutdown()
    http.server_close()
    thread.join(60)
