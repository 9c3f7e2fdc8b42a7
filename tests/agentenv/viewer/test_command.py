"""`agentenv view`: starts, says where it is, ends cleanly, and names what is wrong."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from agentenv.cli import main

pytest.importorskip("fastapi")


def test_it_serves_until_ctrl_c_writes_nothing_and_ends_with_0(make_run):
    run = make_run(4)
    before = sorted(item.name for item in run.path.iterdir())
    command = [sys.executable, "-m", "agentenv", "view", "--no-browser", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert url, line
            with urllib.request.urlopen(f"{url[0]}/api/run", timeout=60) as answer:
                assert b'"lamps"' in answer.read()
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, errors) == (0, "", "")
    assert sorted(item.name for item in run.path.iterdir()) == before


def refused(capsys, *arguments):
    assert main(["view", "--no-browser", *map(str, arguments)]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert len(errors.splitlines()) == 1
    return errors


def test_a_port_in_use_is_one_clear_error(make_run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}: can't listen there" in refused(capsys, make_run(4).path, "--port", port)


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert "nothing: no such directory" in refused(capsys, tmp_path / "nothing")
    assert "no run there (run.json or trajectories.jsonl is needed)" in refused(capsys, tmp_path)


def test_without_its_extra_the_command_names_it(make_run, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "agentenv.serving", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "agentenv-rl[view]" in refused(capsys, make_run(4).path)
