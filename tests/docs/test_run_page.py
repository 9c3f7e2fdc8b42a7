"""A page's commands are run as typed: in one shell, to the first failure, servers until they answer."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "_site" / "run_page.py"


def run(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    (folder / "page.md").write_text(page)
    command = [sys.executable, str(PROGRAM), "page.md"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_blocks_share_a_shell(tmp_path: Path) -> None:
    done = run(tmp_path, "```bash\nvalue=7\n```\ntext\n```bash\necho $value > out\n```\n")
    assert done.returncode == 0
    assert (tmp_path / "out").read_text() == "7\n"
    assert "$ value=7" in done.stderr


def test_the_first_failure_ends_it(tmp_path: Path) -> None:
    done = run(tmp_path, "```bash\n(exit 3)\ntouch out\n```\n")
    assert done.returncode == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("url", "code"), [("http://127.0.0.1:PORT/page.md", 0), ("http://127.0.0.1:1/", 1)])
def test_a_server_is_ended_once_it_answers_and_one_that_ends_before_fails(
    tmp_path: Path, url: str, code: int
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    url = url.replace("PORT", str(number))
    port = number if code == 0 else "none"
    (tmp_path / "serve.py").write_text(
        "import http.server, sys\n"
        "server = http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)\n"
        "try: server.serve_forever()\nexcept KeyboardInterrupt: pass\n"
    )
    done = run(tmp_path, f"<!-- until: {url} -->\n```bash\npython3 serve.py {port}\n```\n")
    assert done.returncode == code, done.stderr
