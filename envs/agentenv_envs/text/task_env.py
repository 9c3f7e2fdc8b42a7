"""What the text environments share: tasks drawn from a seed, disjoint splits, turns, and a demonstrator.

Invariants:
- the seed of `reset` chooses the task, on every machine; without a seed `np_random` chooses the seed;
- a hash of the task's content says which split it belongs to: no held-out task is a training task under another seed;
- reward comes with the last step; `terminated` where the task decided the end, `truncated` where the turns ran out;
- an action that is none of the environment's is answered by one line, costs a turn and is counted in `info`.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

from agentenv.env import BaseEnv
from agentenv.errors import UsageError

__all__ = ["SPLITS", "Answer", "TextTaskEnv", "text_policies", "whole_number", "word"]

SPLITS: Final = ("train", "heldout")
_HELD_OUT_SHARE = 5  # one task in five is held out

Task = TypeVar("Task")


@dataclass(frozen=True, slots=True)
class Answer:
    """What an action leads to.

    Args:
        text: the observation.
        reward: of the episode, where it ends here; None where it goes on.
        malformed: the action was none of the environment's.
        info: more to report.
    """

    text: str
    reward: float | None = None
    malformed: bool = False
    info: dict[str, Any] | None = None


class TextTaskEnv(BaseEnv, Generic[Task]):
    """Base of the text environments. Subclasses write `_draw`, `_open`, `_answer`, `solutions` and `mistakes`.

    Args:
        split: "train" or "heldout".
        max_turns: actions after which the episode is truncated.

    Raises:
        UsageError: one of them is out of its range.
    """

    worker = "inline"
    family: ClassVar[str]
    """Reported as `info["family"]`, and the head of task ids."""

    def __init__(self, *, split: str, max_turns: int) -> None:
        if split not in SPLITS:
            raise UsageError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self.split = split
        self.max_turns: int = whole_number("max_turns", max_turns, 1, 10_000)
        self._task: Task | None = None
        self._turn = 0
        self._malformed = 0

    @property
    def task(self) -> Task:
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
        rng = random.Random(f"{self.family}:{seed if seed is not None else self.np_random.integers(2**40)}")
        wanted = self.split == "heldout"
        while True:
            task = self._draw(rng)
            digest = hashlib.blake2b(repr(task).encode(), digest_size=6).digest()
            if (int.from_bytes(digest) % _HELD_OUT_SHARE == 0) == wanted:
                break
        self._task, self._turn, self._malformed = task, 0, 0
        return self._open(task), {"task_id": f"{self.family}-{digest.hex()}", "family": self.family}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action; white space around it does not matter.

        Raises:
            RuntimeError: called before `reset` or after the end.
        """
        task = self.task
        self._turn += 1
        answer = self._answer(task, action.strip())
        self._malformed += answer.malformed
        terminated = answer.reward is not None
        truncated = not terminated and self._turn >= self.max_turns
        reward = answer.reward or 0.0
        info: dict[str, Any] = {"malformed": answer.malformed, "malformed_actions": self._malformed}
        info |= answer.info or {}
        if terminated or truncated:
            self._task = None
            info["success"] = reward > 0.0
            metrics = {"turns": self._turn, "malformed_actions": self._malformed}
            info["metrics"] = {**metrics, **info.get("metrics", {})}
        return answer.text, reward, terminated, truncated, info

    def demonstrate(self, skill: float, rng: random.Random) -> str:
        """An action of a demonstrator for the present state.

        Args:
            skill: probability that it is one of `solutions`, evenly; otherwise it is one of `mistakes`. 1 is an oracle.
            rng: where chance comes from.
        """
        if rng.random() < skill:
            return rng.choice(self.solutions())
        return rng.choice(self.mistakes())

    def solutions(self) -> Sequence[str]:
        """The actions that lead on to reward, in the present state."""
        raise NotImplementedError

    def mistakes(self) -> Sequence[str]:
        """The well-formed actions that a careless agent may take instead."""
        raise NotImplementedError

    def _draw(self, rng: random.Random) -> Task:
        """A task of any split; its `repr` is what the split is decided by."""
        raise NotImplementedError

    def _open(self, task: Task) -> str:
        """Begin a task: set up its state and give the first observation."""
        raise NotImplementedError

    def _answer(self, task: Task, action: str) -> Answer:
        """Carry out an action."""
        raise NotImplementedError


def text_policies(random: str, *, oracle: str = "Oracle") -> dict[str, str]:
    """The `policies` of a text environment, by the names of their classes."""
    classes = {"oracle": oracle, "random": random, "scripted": "Scripted"}
    return {name: f"agentenv_envs.text.policies:{attribute}" for name, attribute in classes.items()}


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """`value`, if it is a whole number between `low` and `high`.

    Raises:
        UsageError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    return value


def word(action: str) -> str:
    """An action of one word as it is looked up: without a final full stop, in lower case."""
    return action.removesuffix(".").rstrip().lower()
