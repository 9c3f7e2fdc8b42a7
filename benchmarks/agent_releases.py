"""Agent programs as they are released: where each is installed from, how it is started, and what is dictated to it.

Part of `agent_programs.py`. What is dictated solves the task of :data:`SEED`, with a look at the sandbox's network on
the way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv_envs.swe.agents import Launcher, mini_swe_agent, openhands
from agentenv_envs.swe.embedded.tasks import EMBEDDED_WORKDIR, MODULE
from agentenv_envs.swe.workspace import EmbeddedTasks

SEED = 3
"""Of the dictated episodes' task."""
CONDENSE_AFTER = 10
"""Events of a history, for OpenHands' condenser: it has to sum one up before the fifth answer."""
_LOOK = "echo interfaces: $(tail -n +3 /proc/net/dev | cut -d: -f1)"


@dataclass(frozen=True)
class Release:
    """A program."""

    packages: tuple[str, ...]
    """With the version that was run; the first one tells it."""
    python: tuple[int, int]
    """The lowest one that they take."""
    command: str
    """What is started, in its environment's `bin`."""
    answers: Callable[[], list[str]]
    """Dictated."""
    commands: int
    """That the answers make run in the sandbox, those of the editor's copies included."""
    forks: int
    """Histories that it rewrites meanwhile."""
    agents: int
    """The main one, and who sums up."""


def tool_calls(*calls: tuple[str, dict[str, Any]]) -> str:
    """An answer that reasons and calls tools, in the form of Qwen3's template."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "<think>\nWhat now?\n</think>\n\nI go on." + "".join(
        f"\n<tool_call>\n{call}\n</tool_call>" for call in written
    )


def mini_answers() -> list[str]:
    """All of it by mini-swe-agent's only tool."""
    edits = [
        f"sed -i '{edit.line}s/{edit.old}/{edit.new}/' {MODULE}"
        for edit in EmbeddedTasks("train", (1,), None).task(SEED).gold_edits
    ]
    commands = [f"ls; head -3 {MODULE}", _LOOK, *edits, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    return [tool_calls(("bash", {"command": command})) for command in commands]


def openhands_answers() -> list[str]:
    """By terminal and editor, two calls at once, a thought and a mistake, after which the history is summed up."""
    task = EmbeddedTasks("train", (1,), None).task(SEED)
    path = f"{EMBEDDED_WORKDIR}/{MODULE}"
    (edit,) = task.gold_edits
    lines = task.files[MODULE].splitlines(keepends=True)
    old = "".join(lines[edit.line - 2 : edit.line + 1])
    new = old.replace(lines[edit.line - 1], lines[edit.line - 1].replace(edit.old, edit.new, 1))
    change = {"command": "str_replace", "path": path, "old_str": old, "new_str": new}
    return [
        tool_calls(
            ("terminal", {"command": "ls; export SEEN=yes; cd /"}),
            ("file_editor", {"command": "view", "path": path}),
        ),
        tool_calls(("think", {"thought": "I look where I am."})),
        tool_calls(("terminal", {"command": "echo before the summary"})),
        tool_calls(("file_editor", {"command": "view", "path": MODULE})),  # not a whole path
        tool_calls(("terminal", {"command": f'{_LOOK}; echo "seen: $SEEN in $PWD"'})),
        tool_calls(("file_editor", change)),
        tool_calls(("finish", {"message": "It is mended."})),
    ]


RELEASES = {
    "mini-swe-agent": Release(("mini-swe-agent==2.4.6",), (3, 10), "mini", mini_answers, 4, 0, 1),
    "openhands": Release(
        ("openhands-sdk==1.58.2", "openhands-tools==1.58.2"), (3, 12), "python", openhands_answers, 7, 1, 2
    ),
}
"""By the name that `--agent` takes."""


def launcher(agent: str, command: str, config: str = "mini.yaml") -> Launcher:
    """Starts it."""
    if agent == "openhands":
        return openhands(command, condense_after=CONDENSE_AFTER)
    return mini_swe_agent(command, config=config)


def find_program(agent: str, command: str | None, work_dir: Path) -> tuple[str, str]:
    """The command of a program and the version of its package; installs it where no command is named.

    Raises:
        UsageError: it can't be had.
    """
    release = RELEASES[agent]
    if command is None:
        venv = work_dir / agent
        program = venv / "bin" / release.command
        if not (venv / "installed").exists():
            if sys.version_info < release.python:
                needed = ".".join(map(str, release.python))
                raise UsageError(
                    f"{agent} needs Python {needed} or newer: make an environment of one with "
                    f"{' '.join(release.packages)}, and name its {release.command} by --command"
                )
            print(f"installing {' '.join(release.packages)} into {venv}", flush=True)
            _run([sys.executable, "-m", "venv", "--clear", str(venv)])
            # -I: what PYTHONPATH names is not there when the program runs.
            pip = [str(venv / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check"]
            _run([*pip, "install", "-qq", *release.packages])
            (venv / "installed").touch()
    else:
        program = Path(command)
    python = program.parent / "python"  # its environment's
    if not (program.exists() and python.exists()):
        raise UsageError(f"--command {program}: no command of an environment that has {agent}")
    package = release.packages[0].partition("==")[0]
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return str(program.absolute()), _run([str(python), "-I", "-c", ask]).strip()


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise UsageError(f"{' '.join(command)}: {last}")
    return done.stdout
