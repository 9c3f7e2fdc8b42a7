"""SWE-v0: repair a bug in a repository, one bash command a turn, in a sandbox.

Invariants:
- the seed of `reset` chooses the task; everything the agent does happens in a sandbox of this environment;
- reward is 1 if the hidden checks pass after `submit`, else 0; there is no other reward;
- a sandbox that broke is a SandboxError (infrastructure), never a reward; the next `reset` has a new sandbox;
- a malformed action costs a turn and is answered by what is allowed.
"""

from collections.abc import Sequence
from typing import Any

from agentenv.env import BaseEnv
from agentenv.errors import UsageError

from .protocol import SUBMIT, Malformed, first_observation, format_observation, parse_action
from .sandbox import SandboxBackend, open_backend
from .workspace import EmbeddedTasks, RowTasks, Tasks, Workspace

__all__ = ["SWEEnv"]


class SWEEnv(BaseEnv):
    """Software-engineering tasks, embedded ones or those of a data set.

    Args:
        split: "train", "heldout" or (embedded tasks only) "heldout_families".
        dataset: a local JSONL, JSON or Parquet file or the name of a data set on the hub; None for embedded tasks.
        dataset_split: which of the hub data set's own splits to read; None for the one named test. `split` then
            divides its rows.
        levels: of the embedded tasks: 1 failing call named, 2 behaviour only, 3 two bugs, 4 function gone.
        families: of the embedded tasks; all of the split's by default.
        sandbox: "docker", "local-unisolated" or "auto" (Docker where an engine answers).
        allow_unisolated: run a data set's code without isolation too.
        max_turns: turns after which the episode is truncated.
        command_timeout_s: seconds a command may take.
        observation_chars: bytes of a command's output that come back, half from its head and half from its tail.

    Raises:
        UsageError: a bad argument or data set, no engine where Docker was asked for, or a data set without
            isolation and without `allow_unisolated`.
    """

    def __init__(
        self,
        *,
        split: str = "train",
        dataset: str | None = None,
        dataset_split: str | None = None,
        levels: Sequence[int] = (1, 2),
        families: Sequence[str] | None = None,
        sandbox: str = "auto",
        allow_unisolated: bool = False,
        max_turns: int = 50,
        command_timeout_s: float = 60.0,
        observation_chars: int = 8_000,
    ) -> None:
        for name, value in (
            ("max_turns", max_turns),
            ("command_timeout_s", command_timeout_s),
            ("observation_chars", observation_chars),
        ):
            if value <= 0:
                raise UsageError(f"{name} is {value}; it has to be above 0")
        self.tasks: Tasks = (
            RowTasks(dataset, split, dataset_split) if dataset else EmbeddedTasks(split, levels, families)
        )
        self.max_turns: int = max_turns
        self.command_timeout_s = command_timeout_s
        self.observation_chars = observation_chars
        self._workspace: Workspace | None = None
        self._turn = 0
        self._backend: SandboxBackend | None = open_backend(sandbox)
        if dataset and self._backend.kind == "local-unisolated" and not allow_unisolated:
            self.close()
            raise UsageError(
                f"data set {dataset!r} needs Docker: its code would run without isolation here; "
                "allow_unisolated=True runs it all the same"
            )

    @property
    def sandbox_kind(self) -> str:
        """ "docker" or "local-unisolated"."""
        return self._open_backend.kind

    @property
    def _open_backend(self) -> SandboxBackend:
        if self._backend is None:
            raise RuntimeError("the environment is closed")
        return self._backend

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._leave()
        chosen = seed if seed is not None else int(self.np_random.integers(2**40))
        workspace = self._workspace = self.tasks.open(chosen, self._open_backend)
        self._turn = 0
        observation = first_observation(
            workspace.issue, workdir=workspace.workdir, test_command=workspace.test_command
        )
        info = {"task_id": workspace.task_id, "family": workspace.family, "sandbox": self.sandbox_kind}
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        workspace = self._workspace
        if workspace is None:
            raise RuntimeError("step before reset, or after the end of the episode")
        self._turn += 1
        command = parse_action(action)
        try:
            if command == SUBMIT:
                outcome = workspace.grade()
                self._leave()
                solved = bool(outcome["resolved"])
                info = {"success": solved, "grade": outcome, "metrics": {"submitted": 1.0}}
                return "", float(solved), True, False, info
            observation = self._answer(workspace, command)
        except BaseException:
            self._leave()
            raise
        truncated = self._turn >= self.max_turns
        info = {"malformed": isinstance(command, Malformed)}
        if truncated:
            self._leave()
            info |= {"success": False, "metrics": {"submitted": 0.0}}
        return observation, 0.0, False, truncated, info

    def _answer(self, workspace: Workspace, command: str | Malformed) -> str:
        if isinstance(command, Malformed):
            return f"Not understood: {command.reason}"
        result = workspace.sandbox.run(
            command, timeout_s=self.command_timeout_s, half_bytes=self.observation_chars // 2
        )
        return format_observation(
            result.output, result.exit_code, timed_out=result.timed_out, timeout_s=self.command_timeout_s
        )

    def _leave(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    def close(self) -> None:
        self._leave()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
