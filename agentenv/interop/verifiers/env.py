"""`Verifiers-v0`: its data set's rows are the tasks, its rubric the reward.

Invariants:
- `reset(seed=s)` plays row `s` modulo the number of rows.
- The reward comes with the last step. One that can't be computed is a `RewardError`, not 0.
- All rollouts of a process run in one event loop, as in verifiers; it is a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.env import BaseEnv
from agentenv.errors import EnvError, InfrastructureError, RewardError, RolloutError, UsageError

if TYPE_CHECKING:
    from agentenv.interop.verifiers.episode import Ended, Episode
    from agentenv.rollout.loop_thread import LoopThread

__all__ = ["VerifiersEnv"]

_Result = TypeVar("_Result")

_CUT_OFF = frozenset({"timeout_reached", "prompt_too_long", "max_total_completion_tokens_reached"})
"""Stop conditions of verifiers that cut a rollout; `max_turns_reached` does where more than one turn is allowed."""


class VerifiersEnv(BaseEnv):
    """An environment that `verifiers.load_environment` finds.

    Args:
        env_id: its id, which is the name of an installed module with a function `load_environment`.
        env_kwargs: arguments of that function.
        split: "train", or "heldout": the evaluation data set.

    Raises:
        UsageError: there is no such environment or data set, or it is of a kind that can't be stepped.
        MissingExtraError: verifiers is not installed.
    """

    worker = "thread"

    def __init__(
        self, env_id: str, *, env_kwargs: Mapping[str, Any] | None = None, split: str = "train"
    ) -> None:
        from agentenv.interop.verifiers.loading import load

        if split not in ("train", "heldout"):
            raise UsageError(f"split must be train or heldout, got {split!r}")
        env = load(env_id, env_kwargs or {})
        sources = (env.dataset_source, env.dataset)
        if split == "heldout":
            sources = (env.eval_dataset_source, env.eval_dataset)
        if sources == (None, None):
            raise UsageError(f"env_id {env_id!r} has no data set for split {split!r}")
        self._rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
        if not len(self._rows):
            raise UsageError(f"env_id {env_id!r}: the data set for split {split!r} is empty")
        self.env_id = env_id
        self.split = split
        self.max_turns = env.max_turns if env.max_turns > 0 else None
        self._env = env
        self._episode: Episode | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the rollout of a row.

        Raises:
            EnvError: it failed, or ended before it asked for a turn.
            InfrastructureError: what it needs failed.
        """
        from agentenv.interop.verifiers.episode import Ended, Episode

        super().reset(seed=seed)
        self.close()
        number = seed if seed is not None else int(self.np_random.integers(2**40))
        row = self._rows[number % len(self._rows)]
        self._episode = Episode(self._env, row)
        begun = self._call(self._episode.begin())
        if isinstance(begun, Ended):
            self._episode = None
            self._check(begun)
            raise EnvError(f"{self.env_id} ended before the first turn: {begun.state.get('stop_condition')}")
        task = f"{self.env_id}-{self.split}-{row.get('example_id', number % len(self._rows))}"
        return begun.observation, {"task_id": task, "family": self.env_id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give the policy's turn.

        Raises:
            RuntimeError: called before `reset` or after the end.
            EnvError: the environment failed.
            InfrastructureError: what it needs failed.
            RewardError: a reward function raised.
        """
        if self._episode is None:
            raise RuntimeError("VerifiersEnv.step needs a running episode: call reset first")
        from agentenv.interop.verifiers.episode import Ended

        went = self._call(self._episode.answer(action))
        if not isinstance(went, Ended):
            return went.observation, 0.0, False, False, {}
        self._episode = None
        self._check(went)
        state = went.state
        stopped = state.get("stop_condition")
        truncated = stopped in _CUT_OFF or (stopped == "max_turns_reached" and self.max_turns != 1)
        reward = float(state["reward"])
        info = {
            "success": reward >= self._env.pass_threshold,
            "metrics": {name: float(value) for name, value in (state["metrics"] or {}).items()},
            "stop_condition": stopped,
        }
        return went.observation, reward, not truncated, truncated, info

    def close(self) -> None:
        """End the rollout; idempotent."""
        episode, self._episode = self._episode, None
        if episode is not None:
            with suppress(RolloutError):
                _loop(os.getpid()).call(episode.leave())

    def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return _loop(os.getpid()).call(work)
        except RolloutError as error:
            self._episode = None
            raise InfrastructureError(f"the event loop of verifiers' rollouts: {error}") from error
        except BaseException:
            self.close()
            raise

    def _check(self, ended: Ended) -> None:
        """Raise what the rollout failed with: verifiers itself scores it all the same."""
        from verifiers.errors import InfraError, ToolError

        error = ended.state.get("error")
        # A tool's error ends a rollout where the environment says so: that is for the call that the policy wrote.
        if error is not None and not isinstance(error, ToolError):
            kind = InfrastructureError if isinstance(error, InfraError) else EnvError
            raise kind(f"{self.env_id}: {type(error).__name__}: {error}") from error
        for failed in ended.grading_errors:
            raise RewardError(f"{self.env_id}: a reward function raised {failed!r}") from failed


@cache
def _loop(pid: int) -> LoopThread:
    """The process's own: a forked one has no thread of its parent's."""
    from agentenv.rollout.loop_thread import LoopThread

    return LoopThread("agentenv-verifiers")
