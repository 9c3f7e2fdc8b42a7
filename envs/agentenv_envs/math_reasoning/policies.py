r"""Baselines: an oracle, agents that guess, and one that computes with the tool.

Invariants:
- per episode `begin` once, then `act` for each turn;
- one seed, and the same tasks in the same order, give the same actions.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

import gymnasium

from agentenv.errors import UsageError

from .env import MathTaskEnv
from .python_env import MathPythonEnv
from .task import MathTask

__all__ = ["Oracle", "RandomAnswer", "RandomPython", "Scripted", "boxed"]

_NUMBER = re.compile(r"-?[0-9]{1,12}")


def boxed(answer: str) -> str:
    r"""The action that gives a final answer."""
    return rf"\boxed{{{answer}}}"


class Oracle:
    """Looks into the environment and gives the right answer in the first turn."""

    def __init__(self, env: gymnasium.Env[str, str], seed: int) -> None:
        self._env = env

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Nothing to remember."""

    def act(self, observation: str) -> str:
        """The right answer."""
        return boxed(_task(self._env).answer)


class RandomAnswer:
    """Answers with one of the numbers that the problem names."""

    def __init__(self, env: gymnasium.Env[str, str], seed: int) -> None:
        self._rng = random.Random(f"random:{seed}")

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Nothing to remember: the first observation is the problem."""

    def act(self, observation: str) -> str:
        """A number of the observation."""
        return boxed(self._number(observation))

    def _number(self, text: str) -> str:
        numbers: list[str] = _NUMBER.findall(text)
        return self._rng.choice(numbers or ["0"])


class RandomPython(RandomAnswer):
    """Runs an operation on two of the problem's numbers, or answers with a number that it has seen, evenly."""

    def __init__(self, env: gymnasium.Env[str, str], seed: int) -> None:
        super().__init__(env, seed)
        if not isinstance(env.unwrapped, MathPythonEnv):
            raise UsageError(f"policy 'random' with a tool is for MathPython-v0, got {env!r}")
        self._speech = env.unwrapped.speech
        self._problem = ""

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """Remembers the problem."""
        self._problem = observation

    def act(self, observation: str) -> str:
        """A program or an answer."""
        if self._rng.random() < 0.5:
            one, two = self._number(self._problem), self._number(self._problem)
            return self._speech.write(f"print({one} {self._rng.choice('+-*')} {two})")
        return boxed(self._number(observation))


class Scripted:
    """Writes the program that belongs to a generated problem, and answers with what it printed.

    It looks into the environment for the program, not for the answer: it shows that the way through the tool works.
    """

    def __init__(self, env: gymnasium.Env[str, str], seed: int) -> None:
        if not isinstance(env.unwrapped, MathPythonEnv):
            raise UsageError(f"policy 'scripted' is for MathPython-v0, got {env!r}")
        self._env = env.unwrapped
        self._ran = False

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """A new episode."""
        self._ran = False

    def act(self, observation: str) -> str:
        """The program, then its output as the answer.

        Raises:
            UsageError: the problem is a data set's and has no program.
        """
        if self._ran:
            text = observation.partition("<tool_response>")[2].partition("</tool_response>")[0] or observation
            return boxed(text.strip().split("\n")[0])
        program = self._env.task.program
        if program is None:
            raise UsageError("policy 'scripted' solves generated problems only; leave out dataset")
        self._ran = True
        return self._env.speech.write(program)


def _task(env: gymnasium.Env[str, str]) -> MathTask:
    base = env.unwrapped
    if not isinstance(base, MathTaskEnv):
        raise UsageError(f"policy 'oracle' is for Math-v0 and MathPython-v0, got {env!r}")
    return base.task
