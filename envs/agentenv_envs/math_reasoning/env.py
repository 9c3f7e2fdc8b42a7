r"""Math-v0: a problem, one answer, graded.

Invariants:
- the seed of `reset` chooses the problem;
- an episode has one turn: whatever is written ends it; reward is 1 for the right answer in the last `\boxed{}`, else 0;
- an answer that could not be graded is a `RewardError`, never a 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentenv.env import BaseEnv
from agentenv.errors import UsageError
from agentenv_envs.swe.protocols.base import after_thinking

from .arguments import check_text
from .boxed import last_boxed
from .grading import grade_answer
from .source import DataSetTasks, GeneratedTasks, TaskSource
from .task import MathTask
from .verifier import require_math_verify

__all__ = ["INSTRUCTION", "MathEnv", "MathTaskEnv"]

INSTRUCTION = r"Solve the problem and write the final answer in \boxed{}. Problem: "
NO_ANSWER = r"There is no final answer: it has to stand in \boxed{} at the end."
_SHOWN_CHARS = 200


class MathTaskEnv(BaseEnv):
    """What both environments share: problems by seed, an answer's grade, and what is told of an episode.

    Args:
        split: "train" (default) or "heldout" of the generated problems; of a data set an official split, by default
            "test" or the only one.
        levels: of the generated problems, 0 to 4.
        families: of the generated problems; all by default.
        dataset: a JSONL, JSON or Parquet file or the name of a data set on the hub; None for generated problems.
        dataset_config: of a hub data set that has several.
        fields: names of a data set's fields, where they are not known ones: {"problem": ..., "answer": ...}.
        heldout_share: share of a data set's problems that split "heldout" holds and "train" does not; by default 0:
            nothing is divided.
        instruction: stands before each problem, instead of the environment's own.

    Raises:
        UsageError: a bad argument or data set.
        MissingExtraError: a data set without what reads it or grades its answers.
    """

    worker = "thread"

    def __init__(
        self,
        *,
        split: str | None,
        levels: Sequence[int],
        families: Sequence[str] | None,
        dataset: str | None,
        dataset_config: str | None,
        fields: Mapping[str, str] | None,
        heldout_share: float,
        instruction: str,
    ) -> None:
        for name, text in (("split", split), ("dataset", dataset), ("dataset_config", dataset_config)):
            check_text(name, text)
        if not isinstance(instruction, str):
            raise UsageError(f"instruction is {instruction!r}; it has to be text, or None")
        self._source: TaskSource
        if dataset is None:
            for name, value in (("dataset_config", dataset_config), ("fields", fields)):
                if value is not None:
                    raise UsageError(f"{name}={value!r}: generated problems need none; name a dataset")
            if heldout_share:
                raise UsageError(
                    f"heldout_share={heldout_share!r}: one in five of the generated problems is held out"
                )
            self._source = GeneratedTasks("train" if split is None else split, levels, families)
        else:
            require_math_verify()
            self._source = DataSetTasks(
                dataset, split=split, config=dataset_config, fields=fields, heldout_share=heldout_share
            )
        self._instruction = instruction
        self._task: MathTask | None = None
        self._turn = 0
        self._invalid = 0

    @property
    def task(self) -> MathTask:
        """The running episode's.

        Raises:
            RuntimeError: none is running.
        """
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__} has no running episode: call reset first")
        return self._task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._leave()
        task = self._source.task(int(self.np_random.integers(2**40)) if seed is None else seed)
        self._task, self._turn, self._invalid = task, 0, 0
        info: dict[str, Any] = {"task_id": task.task_id, "family": task.family}
        if task.level is not None:
            info["level"] = task.level
        return self._instruction + task.problem, info

    def _finish(self, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grade the final answer and end the episode."""
        task = self.task
        try:
            grade = grade_answer(task, answer)
        finally:
            self._leave()
        reward = float(grade.correct)
        info: dict[str, Any] = {
            "malformed": False,
            "answer": answer[:_SHOWN_CHARS].encode("utf-8", "replace").decode("utf-8"),
            "expected": task.answer[:_SHOWN_CHARS],
            "decided_by": grade.decided_by,
        }
        stopped = float(grade.stopped is not None)
        info |= self._outcome(grade.correct, {"answered": 1.0, "verifier_stopped": stopped})
        return "", reward, True, False, info

    def _outcome(self, success: bool, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What `info` says of the whole episode at its end."""
        own = {"turns": float(self._turn), "invalid_actions": float(self._invalid)}
        return {"success": success, "metrics": {**own, **metrics}}

    def _leave(self) -> None:
        """The episode is over, whatever happened."""
        self._task = None

    def close(self) -> None:
        self._leave()


class MathEnv(MathTaskEnv):
    """One turn: the problem is told, and what the agent writes is graded; see `MathTaskEnv` for the arguments."""

    max_turns = 1
    policies: ClassVar[Mapping[str, str]] = {
        "oracle": "agentenv_envs.math_reasoning.policies:Oracle",
        "random": "agentenv_envs.math_reasoning.policies:RandomAnswer",
    }

    def __init__(
        self,
        *,
        split: str | None = None,
        levels: Sequence[int] = (0, 1, 2),
        families: Sequence[str] | None = None,
        dataset: str | None = None,
        dataset_config: str | None = None,
        fields: Mapping[str, str] | None = None,
        heldout_share: float = 0.0,
        instruction: str | None = None,
    ) -> None:
        super().__init__(
            split=split,
            levels=levels,
            families=families,
            dataset=dataset,
            dataset_config=dataset_config,
            fields=fields,
            heldout_share=heldout_share,
            instruction=INSTRUCTION if instruction is None else instruction,
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grade the answer.

        Raises:
            RuntimeError: called before `reset` or after the end.
            RewardError: the answer could not be graded.
        """
        task = self.task
        self._turn += 1
        found = last_boxed(after_thinking(action))
        if found is not None and found[1]:
            return self._finish(found[1])
        self._invalid += 1
        self._leave()
        info = {"malformed": True, "expected": task.answer[:_SHOWN_CHARS]}
        info |= self._outcome(False, {"answered": 0.0, "verifier_stopped": 0.0})
        return NO_ANSWER, 0.0, True, False, info
