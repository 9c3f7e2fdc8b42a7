"""`agentenv proxy`: bad input is one line before a model is loaded; what it serves is kept."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli import main
from agentenv.trajectory import Trajectory

_TOKEN = "a-token-of-some-length"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--model"),
        (["--model", "m"], "--token-file"),
        (["--model", "m", "--token-file", "none"], "--token-file none"),
        (["--model", "m", "--token-file", "token", "--port", "70000"], "--port 70000"),
        (["--model", "m", "--token-file", "token", "--max-batch", "0"], "--max-batch 0"),
        (["--model", "m", "--token-file", "token", "--max-turns", "0"], "--max-turns 0"),
        (["--model", "m", "--token-file", "token", "--temperature", "-1"], "temperature"),
        (["--model", "m", "--token-file", "token", "--output", "no/such/file"], "--output no/such/file"),
        (["--model", "m", "--token-file", "token", "--output", "."], "--output .: cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text(_TOKEN)
    try:
        code = main(["proxy", *options])
    except SystemExit as ended:  # argparse's own
        code = int(str(ended.code))
    assert code == 2 and named in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_is_served_and_its_episodes_are_kept(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    policy = repository / "envs" / "agentenv_envs" / "text" / "policy"
    (tmp_path / "token").write_text(_TOKEN)
    output = tmp_path / "episodes.jsonl"
    command = [sys.executable, "-m", "agentenv", "proxy", "--model", str(policy), "--port", "0"]
    command += ["--token-file", str(tmp_path / "token"), "--output", str(output), "--max-tokens", "8"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        try:
            url = ""
            for line in service.stderr:
                if found := re.search(r"http://\S+", line):
                    url = found.group()
                    break
            opened = _post(f"{url}/episodes", _TOKEN, {"id": "one"})
            messages = [{"role": "user", "content": "hi"}]
            answer = _post(
                f"{opened['base_url']}/chat/completions", opened["api_key"], {"messages": messages}
            )
            assert 1 <= answer["usage"]["completion_tokens"] <= 8
            _post(f"{url}/episodes/one/end", _TOKEN, {"reward": 1.0})
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait(60.0) == 0
    trajectory = Trajectory.from_json(output.read_text())
    trajectory.validate()
    assert trajectory.reward == 1.0 and trajectory.num_action_tokens == answer["usage"]["completion_tokens"]


def _post(url: str, token: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {token}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)
