"""SWE-v0: repair a bug in a repository, in a sandbox, by bash commands or by tools.

Invariants:
- the seed of `reset` chooses the task; everything the agent does happens in a sandbox of this environment;
- reward is 1 if the hidden checks pass after `submit`, else 0; there is no other reward;
- a sandbox that broke is a SandboxError (infrastructure), never a reward; the next `reset` has a new sandbox;
- a malformed action costs a turn and is answered by what is allowed;
- a turn has the time of one command, an episode has `max_turns` and `episode_timeout_s`: what is over a budget is
  truncated, except that a submission is always graded.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentenv.env import BaseEnv
from agentenv.errors import UsageError

from .protocols import AgentProtocol, Call, Limits, Malformed, open_protocol
from .sandbox import SandboxBackend, open_backend
from .workspace import EmbeddedTasks, RowTasks, Tasks, Workspace

__all__ = ["SWEEnv"]


class SWEEnv(BaseEnv):
    """Software-engineering tasks, embedded ones or those of a data set.

    Args:
        split: "train", "heldout", "heldout_families" (embedded tasks only) or "all" (data sets only).
        dataset: a local JSONL, JSON or Parquet file or the name of a data set on the hub; None for embedded tasks.
        dataset_split: which of the hub data set's own splits to read; None for `test`, or for the only
            one that there is. `split` then divides its rows.
        keep: a file with the ids of the rows to use, one a line, as `agentenv swe calibrate --keep` writes it; None
            for all rows.
        levels: of the embedded tasks: 1 failing call named, 2 behaviour only, 3 two bugs, 4 function gone.
        families: of the embedded tasks; all of the split's by default.
        sandbox: "docker", "local-unisolated" or "auto" (Docker where an engine answers).
        sandbox_url: take the sandboxes from a service, or from several with commas between their URLs; the token is in
            AGENTENV_SANDBOX_TOKEN (docs/sandbox-service.md).
        allow_unisolated: run a data set's code without isolation too.
        protocol: how the agent speaks: "bash", "r2e" or "tools"; see `protocols`.
        max_turns: turns after which the episode is truncated.
        episode_timeout_s: seconds from the end of `reset` after which the episode is truncated, the agent's thinking
            included. A submission that comes later is still graded.
        command_timeout_s: seconds a command may take; the commands of one turn share them.
        observation_chars: bytes of a command's output that come back, half from its head and half from its tail; of
            what other tools answer, characters. The calls of one turn share them.

    Raises:
        UsageError: a bad argument, protocol or data set, no engine where Docker was asked for, or a data set without
            isolation and without `allow_unisolated`.
    """

    policies: ClassVar[Mapping[str, str]] = {
        "oracle": "agentenv_envs.swe.policies:Oracle",
        "random": "agentenv_envs.swe.policies:RandomEdit",
        "scripted": "agentenv_envs.swe.policies:Scripted",
    }

    def __init__(
        self,
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
        protocol: str = "bash",
        max_turns: int = 50,
        episode_timeout_s: float = 1800.0,
        command_timeout_s: float = 60.0,
        observation_chars: int = 8_000,
    ) -> None:
        for name, value in (
            ("max_turns", max_turns),
            ("episode_timeout_s", episode_timeout_s),
            ("command_timeout_s", command_timeout_s),
            ("observation_chars", observation_chars),
        ):
            if value <= 0:
                raise UsageError(f"{name} is {value}; it has to be above 0")
        if keep is not None and not dataset:
            raise UsageError(f"keep={keep!r}: embedded tasks need no list of rows; name a dataset")
        self.tasks: Tasks = (
            RowTasks(dataset, split, dataset_split, keep)
            if dataset
            else EmbeddedTasks(split, levels, families)
        )
        self.protocol: AgentProtocol = open_protocol(protocol)
        """Of the present episode."""
        self.max_turns: int = max_turns
        self.episode_timeout_s = episode_timeout_s
        self.command_timeout_s = command_timeout_s
        self.observation_chars = observation_chars
        self._workspace: Workspace | None = None
        self._turn = 0
        self._malformed = 0
        self._deadline = 0.0
        self._backend: SandboxBackend | None = open_backend(sandbox, url=sandbox_url)
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
    def workspace(self) -> Workspace | None:
        """Of the running episode; None where none is running."""
        return self._workspace

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
        self._turn = self._malformed = 0
        self.protocol = open_protocol(self.protocol.name)
        observation = self.protocol.first_observation(
            workspace.issue, workdir=workspace.workdir, test_command=workspace.test_command
        )
        info = {"task_id": workspace.task_id, "family": workspace.family, "sandbox": self.sandbox_kind}
        self._deadline = time.monotonic() + self.episode_timeout_s
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        workspace = self._workspace
        if workspace is None:
            raise RuntimeError("step before reset, or after the end of the episode")
        self._turn += 1
        calls = self.protocol.parse(action)
        self._malformed += isinstance(calls, Malformed)
        try:
            if isinstance(calls, Malformed):
                observation = self.protocol.refusal(calls)
            else:
                observation = self._act(workspace, calls)
                if calls[-1].ends:
                    return self._submit(workspace)
        except BaseException:
            self._leave()
            raise
        late = time.monotonic() >= self._deadline
        truncated = late or self._turn >= self.max_turns
        info: dict[str, Any] = {
            "malformed": isinstance(calls, Malformed),
            "invalid_actions": self._malformed,
        }
        if truncated:
            self._leave()
            cause = "episode_timeout_s" if late else "max_turns"
            info |= {"success": False, "truncated_by": cause, "metrics": {"submitted": 0.0}}
        return observation, 0.0, False, truncated, info

    def _act(self, workspace: Workspace, calls: Sequence[Call]) -> str:
        """Run a turn's calls, but for the one that ends the episode; what the agent hears of them."""
        started = time.monotonic()
        answers: list[tuple[Call, str]] = []
        for call in calls:
            if call.ends:
                break
            spent = time.monotonic() - started if answers else 0.0
            left = min(self.command_timeout_s - spent, round(self._deadline - started - spent, 1))
            if left <= 0:
                answers.append((call, "[not run: the time is over]"))
                continue
            limits = Limits(left, self.observation_chars // len(calls))
            answers.append((call, self.protocol.run(call, workspace.sandbox, limits)))
        return self.protocol.observation(answers)

    def _submit(self, workspace: Workspace) -> tuple[str, float, bool, bool, dict[str, Any]]:
        outcome = workspace.grade()
        self._leave()
        solved = bool(outcome["resolved"])
        info = {
            "success": solved,
            "grade": outcome,
            "patch": workspace.patch,
            "invalid_actions": self._malformed,
            "metrics": {"submitted": 1.0},
        }
        return "", float(solved), True, False, info

    def _leave(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    def close(self) -> None:
        self._leave()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
