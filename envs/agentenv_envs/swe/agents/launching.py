"""How agent programs are started on a task."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.agents.program import AgentCall
from agentenv.errors import UsageError

__all__ = ["Job", "Launch", "Launcher", "mini_swe_agent"]


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
    found = shutil.which(program)
    if found is None:
        raise UsageError(f"no program {program!r}: pip install mini-swe-agent")
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
