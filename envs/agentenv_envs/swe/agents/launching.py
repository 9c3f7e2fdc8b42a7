"""How agent programs are started on a task."""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.agents.program import AgentCall
from agentenv.errors import UsageError

__all__ = ["Job", "Launch", "Launcher", "command_line", "mini_swe_agent", "openhands"]

PLACEHOLDERS = ("docker", "folder", "issue", "issue_file", "model", "workdir")
"""What stands in braces in the words of :func:`command_line`."""


@dataclass(frozen=True)
class Job:
    """A task for a program."""

    call: AgentCall
    """Names endpoint, key and model."""
    issue: str
    """What is to be done."""
    workdir: str
    """Of the repository, as seen in the sandbox."""
    executable: Path
    """To be called as ``docker`` is: it runs commands in the task's sandbox (`container_cli`)."""
    folder: Path
    """The program starts here, beside the sandbox, and may keep files here; removed after it."""


@dataclass(frozen=True)
class Launch:
    """How a program is started."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Besides those that name endpoint and sandbox."""


Launcher = Callable[[Job], Launch]


def mini_swe_agent(
    program: str = "mini", *, config: str = "mini.yaml", options: Sequence[str] = ()
) -> Launcher:
    """mini-swe-agent 2 as it is released, beside the sandbox: it takes the door for Docker.

    Args:
        program: its command, by name or path.
        config: its configuration; ``mini_textbased.yaml`` for models without tools.
        options: more of its ``-c`` options, such as ``agent.step_limit=20``.

    Raises:
        UsageError: there is no such program.
    """
    found = _find(program, "pip install mini-swe-agent, or name its command `mini` by its path")
    model_class = "litellm_textbased" if "textbased" in config else "litellm"

    def launch(job: Job) -> Launch:
        settings = (
            "environment.environment_class=docker",
            f"environment.executable={job.executable}",
            "environment.image=task",
            f"environment.cwd={job.workdir}",
            f"model.model_class={model_class}",
            *options,
        )
        argv = [found, "--yolo", "--exit-immediately", "--cost-limit", "0"]
        argv += ["--model", f"openai/{job.call.model}", "--output", str(job.folder / "trajectory.json")]
        argv += ["--config", config, *(part for setting in settings for part in ("--config", setting))]
        argv += ["--task", job.issue]
        return Launch(
            argv,
            {
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": str(job.folder),
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
                "MSWEA_SILENT_STARTUP": "1",
            },
        )

    return launch


def openhands(python: str, *, condense_after: int | None = None) -> Launcher:
    """OpenHands as it is released, beside the sandbox, with its terminal and its editor in it: `openhands_program`.

    Args:
        python: of an environment with `openhands-sdk` and `openhands-tools`, by name or path.
        condense_after: events that a history may have until it is summed up, 8 at least; None: OpenHands' preset.

    Raises:
        UsageError: there is no such program, or ``condense_after`` is too low.
    """
    if condense_after is not None and condense_after < 8:
        raise UsageError(f"condense_after is {condense_after}; it has to be at least 8")
    found = _find(
        python,
        "pip install openhands-sdk openhands-tools into an environment, and name its python by its path",
    )
    program = Path(__file__).with_name("openhands_program.py")
    options = [] if condense_after is None else ["--condense_after", str(condense_after)]

    def launch(job: Job) -> Launch:
        argv = [found, "-I", str(program), str(_issue_file(job)), job.workdir, job.call.model, *options]
        return Launch(
            argv,
            {
                "DOCKER": str(job.executable),
                "HOME": str(job.folder),  # its settings, and the user's skills, are looked for there
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENHANDS_SUPPRESS_BANNER": "1",
            },
        )

    return launch


def command_line(command: str) -> Launcher:
    """Any program, by a command line.

    Each word may hold ``{issue}`` (what is to be done), ``{issue_file}`` (a file with it), ``{workdir}`` (of the
    repository, as seen in the sandbox), ``{docker}`` (to be called as ``docker`` is, for commands in the sandbox; also
    in the environment variable DOCKER), ``{model}`` and ``{folder}`` (where the program starts); ``{{`` is a brace.

    Args:
        command: split into words as a shell does it; no shell reads it.

    Raises:
        UsageError: it cannot be read, names another placeholder, or there is no such program.
    """
    try:
        words = shlex.split(command)
        used = {
            name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None
        }
    except ValueError as error:
        raise UsageError(f"the agent's command {command!r}: {error}") from None
    if not words:
        raise UsageError("the agent's command is empty")
    if unknown := sorted(used.difference(PLACEHOLDERS)):
        allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise UsageError(f"the agent's command: {{{unknown[0]}}} is unknown; {allowed} are filled in")
    program = _find(words[0], "name it by its path, or install it")

    def launch(job: Job) -> Launch:
        values = {
            "docker": str(job.executable),
            "folder": str(job.folder),
            "issue": job.issue,
            "issue_file": str(_issue_file(job)),
            "model": job.call.model,
            "workdir": job.workdir,
        }
        argv = [program, *(word.format(**values) for word in words[1:])]
        return Launch(argv, {"DOCKER": str(job.executable)})

    return launch


def _issue_file(job: Job) -> Path:
    """A file with what is to be done."""
    path = job.folder / "issue.txt"
    path.write_text(job.issue, encoding="utf-8")
    return path


def _find(program: str, advice: str) -> str:
    """Its path, that of a relative one included: programs start in a folder of their own."""
    found = shutil.which(program)
    if found is None:
        raise UsageError(f"no program {program!r}: {advice}")
    return str(Path(found).absolute())
