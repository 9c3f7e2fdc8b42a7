"""Environments that only take time, and the tokenizer that goes with them.

The observation is a number: how many tokens the policy's next reply has. The tokenizer makes that number the prompt's
last id, where :func:`reply_tokens` finds it; so an engine knows what to decode without a look-up, and a turn costs
microseconds.

Invariants:

* An environment that is planned to fail fails as planned, whatever its slot does about it.
* The k-th reset of a task plays the task's k-th member, whichever environment is reset: arms that start their episodes
  in another order still play the same episodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import agentenv
from agentenv.inference.protocol import GenerationRequest
from agentenv.simulation.workload import EpisodePlan, Workload


class CrashError(RuntimeError):
    """A simulated environment failed, as its plan says."""


class SimulatedTasks:
    """The episodes of a workload, handed out as environments are reset; one for all environments of a run.

    Args:
        workload: what episodes are like.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._members: Counter[int] = Counter()
        self.resets = self.steps = 0
        """Calls of all environments, those that failed included."""

    def next_member(self, task_seed: int) -> EpisodePlan:
        """The next episode of a task."""
        member = self._members[task_seed]
        self._members[task_seed] += 1
        return self.workload.episode(task_seed, member)


class SimulatedEnv(agentenv.AsyncEnv):
    """Steps that take the planned time and say nothing but the length of the next reply.

    Args:
        tasks: shared by all environments of a run.
    """

    def __init__(self, tasks: SimulatedTasks) -> None:
        self.max_turns = tasks.workload.turns
        self._tasks = tasks
        self._plan: EpisodePlan | None = None
        self._turn = 0

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the next episode of the task ``seed``; takes no time.

        ``info`` has the plan's sums: ``latency_s`` of all steps, ``tokens`` of all replies.
        """
        self._tasks.resets += 1
        self._plan = self._tasks.next_member(seed or 0)
        self._turn = 0
        if self._plan.failure is not None and self._plan.failure.turn < 0:
            raise CrashError("the sandbox did not start")
        info = {"latency_s": self._plan.latency_s, "tokens": sum(self._plan.tokens)}
        return str(self._plan.tokens[0]), info

    async def step(  # type: ignore[override]
        self, action: str
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the planned time; the last step has the reward.

        Raises:
            CrashError: as planned; so does :meth:`reset`.
        """
        plan = self._plan
        if plan is None:
            raise RuntimeError("step before reset")
        self._tasks.steps += 1
        latency_s = plan.step_s[self._turn]
        if plan.failure is not None and plan.failure.turn == self._turn:
            if plan.failure.hangs:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(latency_s)
            raise CrashError("the sandbox is gone")
        if latency_s > 0.0:
            await asyncio.sleep(latency_s)
        self._turn += 1
        if self._turn == len(plan.step_s):
            return "", plan.reward, True, False, {}
        return str(plan.tokens[self._turn]), 0.0, False, False, {}


def reply_tokens(request: GenerationRequest) -> int:
    """Length of the reply that the environment planned."""
    return request.prompt_ids[-1]


class SimulatedTokenizer:
    """A number is its own id, any other text is the id 0, and the template only joins.

    Fits :class:`agentenv.conversation.Tokenizer`.
    """

    chat_template = "contents, one a line"
    eos_token_id: int | None = None

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **_: Any) -> str:
        """The contents, one a line."""
        return "\n".join([message["content"] for message in conversation])

    def encode(self, text: str, **_: Any) -> list[int]:
        """One id per line that isn't empty."""
        return [int(line) if line.isdecimal() else 0 for line in text.split("\n") if line]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """What the policy wrote is of no interest."""
        return "-"
