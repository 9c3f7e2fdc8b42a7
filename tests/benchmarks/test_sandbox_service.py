"""The benchmark of the sandbox service at a small size."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fastapi")

pytestmark = pytest.mark.docker


def run(repository: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        str(repository / "benchmarks" / "sandbox_service.py"),
        "--rounds",
        "3",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_service_grades_as_the_engine_does_and_a_difference_is_seen(
    repository: Path,
    tmp_path: Path,
    load_program: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    benchmark = load_program("benchmarks/sandbox_service.py")
    monkeypatch.setattr(benchmark, "COMMAND_MS", 5000.0)  # three commands beside other tests tell no speed
    file = tmp_path / "figures" / "service.json"
    status = benchmark.main(["--rounds", "3", "--tasks", "6", "--json", str(file), "--check"])
    assert status == 0, capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert (figures["tasks"], figures["same"], figures["resolved"], figures["left"]) == (6, 6, 2, 0)
    done = run(repository, "--tasks", "3", "--break_gold", "--check")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISSED  tasks graded as locally: 2 (bar: == 3)" in done.stdout


def test_bad_input_is_told_before_anything_starts(repository: Path) -> None:
    for options, message in (
        (("--tasks", "0"), "--tasks is 0, must be at least 1"),
        (("--url", "ftp://x"), "AGENTENV_SANDBOX_TOKEN"),
    ):
        done = run(repository, *options)
        assert done.returncode == 2
        assert message in done.stderr
