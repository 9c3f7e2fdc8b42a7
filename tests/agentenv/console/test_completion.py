"""`agentenv completion`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv import cli
from agentenv.console.table import COMMANDS

pytest.importorskip("shtab")

_COMPLETE = """
source "$1"
complete_line() {
  COMP_LINE="$1"; read -ra COMP_WORDS <<< "$1"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_POINT=${#1}
  COMPREPLY=(); _shtab_agentenv; echo "${COMPREPLY[@]}"
}
for line in "agentenv pl" "agentenv swe cal" "agentenv play KeyDoor-v0 --pol" "agentenv completion z" \
  "agentenv info Key"
do complete_line "$line"; done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_choices_and_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "agentenv"
    script.write_text(capsys.readouterr().out)
    program = tmp_path / "bin" / "agentenv"  # what completes environments: the command as it is installed
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m agentenv "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", _COMPLETE, "bash", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["play plan", "calibrate", "--policy", "zsh", "KeyDoor-v0"], (
        done.stderr
    )


def test_the_script_of_zsh_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#compdef agentenv\n")
    for group in COMMANDS.values():
        for found in group:
            assert f"\n    {found.name}:'" in out
