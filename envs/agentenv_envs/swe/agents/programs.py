"""One episode of an agent program on a task of SWE-v0: lay the task out, run the program, grade what it left.

    programs = SWEAgentPrograms(mini_swe_agent(), split="train")
    runner = AgentRunner(programs, close=programs.close)

Invariants:

* Reward is 1 if the hidden checks pass on what is in the sandbox when the program has ended, else 0.
* A program that ran out of time, turns or context is truncated and not graded, as SWE-v0 does without a submission.
* A sandbox that broke is a SandboxError (infrastructure), never a reward. How a program exits is none of the reward's
  business: it may crash over what the policy wrote.
"""

import logging
from collections.abc import Sequence
from typing import Any

from agentenv.agents.program import AgentCall, AgentOutcome, run_program
from agentenv.errors import EnvError, UsageError
from agentenv_envs.swe.sandbox import SandboxBackend, open_backend
from agentenv_envs.swe.workspace import EmbeddedTasks, RowTasks, Tasks, Workspace

from .door import SandboxDoor
from .launching import Job, Launcher

__all__ = ["SWEAgentPrograms"]

logger = logging.getLogger(__name__)

_OUTPUT_CHARS = 4000


class SWEAgentPrograms:
    """Plays programs; called with an :class:`~agentenv.agents.AgentCall`, from many threads.

    Args:
        launcher: starts the program, such as :func:`~.launching.mini_swe_agent`.
        split, dataset, dataset_split, keep, levels, families, sandbox, sandbox_url, allow_unisolated: as of ``SWEEnv``.
        command_timeout_s: of one command in the sandbox.

    Raises:
        UsageError: as ``SWEEnv`` raises.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        split: str = "train",
        dataset: str | None = None,
        dataset_split: str | None = None,
        keep: str | None = None,
        levels: Sequence[int] = (1, 2),
        families: Sequence[str] | None = None,
        sandbox: str = "auto",
        sandbox_url: str | None = None,
        allow_unisolated: bool = False,
        command_timeout_s: float = 60.0,
    ) -> None:
        if command_timeout_s <= 0:
            raise UsageError(f"command_timeout_s is {command_timeout_s}; it has to be above 0")
        if keep is not None and not dataset:
            raise UsageError(f"keep={keep!r}: embedded tasks need no list of rows; name a dataset")
        self._launcher, self._command_timeout_s = launcher, command_timeout_s
        self.tasks: Tasks = (
            RowTasks(dataset, split, dataset_split, keep)
            if dataset
            else EmbeddedTasks(split, levels, families)
        )
        self._backend: SandboxBackend = open_backend(sandbox, url=sandbox_url)
        if dataset and self._backend.kind == "local-unisolated" and not allow_unisolated:
            self.close()
            raise UsageError(
                f"data set {dataset!r} needs Docker: its code would run without isolation here; "
                "allow_unisolated=True runs it all the same"
            )

    def __call__(self, call: AgentCall) -> AgentOutcome:
        """Play one episode.

        Raises:
            EnvError: the task cannot be laid out.
            SandboxError: the sandbox broke.
            UsageError: the program cannot be started.
        """
        try:
            workspace = self.tasks.open(call.seed, self._backend)
        except UsageError as error:  # one task's trouble, not the run's
            raise EnvError(f"the task of seed {call.seed} can't be laid out: {error}") from error
        try:
            return self._play(call, workspace)
        finally:
            workspace.close()

    def close(self) -> None:
        """Give up the sandboxes."""
        self._backend.close()

    def _play(self, call: AgentCall, workspace: Workspace) -> AgentOutcome:
        door = SandboxDoor(
            workspace.sandbox, command_timeout_s=self._command_timeout_s, deadline=call.deadline
        )
        try:
            job = Job(call, workspace.issue, workspace.workdir, door.executable, door.folder)
            launch = self._launcher(job)
            result = run_program(launch.argv, call, cwd=door.folder, env={**door.variables, **launch.env})
        finally:
            door.close()
        if door.error is not None:
            raise door.error
        info: dict[str, Any] = {
            "task_id": workspace.task_id,
            "family": workspace.family,
            "sandbox": self._backend.kind,
            "exit_code": result.exit_code,
            "commands": door.commands,
            "output": result.output[-_OUTPUT_CHARS:],
        }
        if result.timed_out or call.is_over:
            return AgentOutcome(0.0, truncated=True, info={**info, "success": False})
        outcome = workspace.grade()
        solved = bool(outcome["resolved"])
        return AgentOutcome(
            float(solved), info={**info, "success": solved, "grade": outcome, "patch": workspace.patch}
        )
