"""Our environments in TRL's own `GRPOTrainer`, by its argument `environment_factory`.

TRL makes one object per rollout and keeps it: `reset(**row)` begins an episode and returns text that is appended to the
prompt; public methods are tools that the model calls; `get_reward()` is asked once at the end. Here the one tool hands
the action to the environment.

Invariants:
- A row's `seed` chooses the task, so the rollouts of a group, which share a row, play the same one.
- The reward is the sum over the steps, as in our rollouts. After the end of an episode actions change nothing.
- An environment that raises makes its rollout count for nothing (reward None, which TRL leaves out), not as 0. TRL is
  stopped only where `MAX_FAILURES` episodes in a row failed.
- This module imports nothing of TRL.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from agentenv.environment_source import TextEnv, find_environment
from agentenv.errors import RolloutError, UsageError

__all__ = ["MAX_FAILURES", "EnvironmentFactory", "Rollout", "environment_factory"]

logger = logging.getLogger(__name__)

MAX_FAILURES = 16
"""Episodes in a row that may fail before the run stops."""

_OVER = "The episode is over; nothing you do counts any more."
_RESERVED = ("reset", "get_reward")
_DESCRIPTION = "Act in the environment. It answers with what happens next."
_ARGUMENT = "What to do, in the words the environment asks for."


def environment_factory(
    env: str | Callable[[], TextEnv],
    kwargs: Mapping[str, Any] | None = None,
    *,
    tool: str = "act",
    description: str = _DESCRIPTION,
    argument: str = _ARGUMENT,
    max_turns: int | None = None,
) -> EnvironmentFactory:
    """What `GRPOTrainer(environment_factory=...)` wants, for one of our environments.

        factory = environment_factory("GuessNumber-v0", {"numbers": 8})
        trainer = GRPOTrainer(
            model, args=args, train_dataset=Dataset.from_list(factory.tasks(64)), environment_factory=factory
        )

    Args:
        env: a registered id, "module:Class" or "file.py", as for `--env`; or what makes an environment.
        kwargs: arguments for each environment made of a name.
        tool: name of the tool that the model acts by.
        description: what the model is told of the tool.
        argument: what it is told of the tool's one argument, `action`.
        max_turns: actions after which an episode is cut; None: the environment's advice.

    Raises:
        UsageError: there is no such environment, its methods are coroutines, or an argument is out of its range.
    """
    if not tool.isidentifier() or tool.startswith("_") or tool in _RESERVED:
        raise UsageError(
            f"tool must be a public name in Python and none of {', '.join(_RESERVED)}, got {tool!r}"
        )
    if max_turns is not None and max_turns < 1:
        raise UsageError(f"max_turns must be at least 1, got {max_turns}")
    if isinstance(env, str):
        make: Callable[[], TextEnv] = find_environment(env, kwargs, option="environment")
    elif kwargs:
        raise UsageError("kwargs go with the name of an environment; give them to the function that makes it")
    else:
        make = env
    first = make()
    if inspect.iscoroutinefunction(first.step) or inspect.iscoroutinefunction(first.reset):
        first.close()
        raise UsageError(
            f"{type(first.unwrapped).__name__} is an AsyncEnv, and TRL calls `reset` in no event loop: "
            "train it with the trainers of agentenv"
        )
    spec = first.spec
    name = str(spec.id).rpartition("/")[2] if spec is not None else type(first.unwrapped).__name__
    return EnvironmentFactory(make, first, name, _tool(tool, description, argument), max_turns)


class EnvironmentFactory:
    """Makes the rollouts' environments, and closes them in the end: TRL itself closes none.

    Use it as a context manager around the training, or call `close`.
    """

    def __init__(
        self,
        make: Callable[[], TextEnv],
        first: TextEnv,
        name: str,
        act: Callable[[Rollout, str], str],
        max_turns: int | None,
    ) -> None:
        self._make = make
        self._spare: list[TextEnv] = [first]
        self._made: list[TextEnv] = [first]
        self._max_turns = max_turns
        self._failures = 0
        # TRL names the reward's column after the class and finds the tool in it.
        self._rollout: type[Rollout] = type(name, (Rollout,), {act.__name__: act})

    def __call__(self) -> Rollout:
        """A rollout's environment, as TRL calls it."""
        if self._spare:
            env = self._spare.pop()
        else:
            env = self._make()
            self._made.append(env)
        limit = self._max_turns or getattr(env.unwrapped, "max_turns", None)
        return self._rollout(self, env, limit)

    def tasks(self, count: int, *, first_seed: int = 0, instructions: str = "") -> list[dict[str, Any]]:
        """Rows for `datasets.Dataset.from_list`, one a task.

        Args:
            count: of tasks.
            first_seed: of the seeds `first_seed`, `first_seed + 1`, ...
            instructions: text before the first observation.
        """
        if count < 1:
            raise UsageError(f"count must be at least 1, got {count}")
        seeds: Iterable[int] = range(first_seed, first_seed + count)
        return [{"prompt": [{"role": "user", "content": instructions}], "seed": seed} for seed in seeds]

    def note_episode(self, failure: Exception | None) -> None:
        """Count an episode that began, or failed.

        Raises:
            RolloutError: too many failed in a row.
        """
        if failure is None:
            self._failures = 0
            return
        self._failures += 1
        logger.warning("an episode counts for nothing: %s: %s", type(failure).__name__, failure)
        if self._failures >= MAX_FAILURES:
            raise RolloutError(
                f"{self._failures} episodes in a row failed, at last with {failure!r}"
            ) from failure

    def close(self) -> None:
        """Close every environment; may be called more than once."""
        for env in self._made:
            with suppress(Exception):
                env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Rollout:
    """One environment with the methods that TRL looks for; a public method more would be a tool more."""

    def __init__(self, factory: EnvironmentFactory, env: TextEnv, max_turns: int | None) -> None:
        self._factory = factory
        self._env = env
        self._max_turns = max_turns
        self._running = False
        self._failed = True
        self._turns = 0
        self._reward = 0.0

    def reset(self, seed: int | None = None, prompt: Any = None, **columns: Any) -> str:
        """Begin the task of the row's seed; returns the first observation."""
        if seed is None:
            raise UsageError(
                "the rows have no column `seed`, and a group's rollouts would play different tasks: "
                "give GRPOTrainer train_dataset=Dataset.from_list(factory.tasks(N))"
            )
        self._running, self._turns, self._reward = True, 0, 0.0
        try:
            observation, _ = self._env.reset(seed=int(seed))
        except Exception as error:
            self._fail(error)
            return "The environment could not be started."
        self._failed = False
        has_text = isinstance(prompt, list) and bool(prompt) and bool(prompt[-1].get("content"))
        return f"\n\n{observation}" if has_text else observation

    def get_reward(self) -> float | None:
        """Sum of the rewards; None where the environment failed, which TRL leaves out of the group."""
        if self._failed:
            return None
        self._factory.note_episode(None)
        return self._reward

    def _act(self, action: str) -> str:
        if not self._running:
            return _OVER
        try:
            observation, reward, terminated, truncated, _ = self._env.step(str(action))
        except Exception as error:
            self._fail(error)
            raise
        self._turns += 1
        self._reward += float(reward)
        self._running = not (
            terminated or truncated or (self._max_turns is not None and self._turns >= self._max_turns)
        )
        return observation

    def _fail(self, error: Exception) -> None:
        self._running, self._failed = False, True
        self._factory.note_episode(error)


def _tool(name: str, description: str, argument: str) -> Callable[[Rollout, str], str]:
    """A method whose name, annotations and docstring are what transformers makes the tool's schema of."""

    def act(self: Rollout, action: str) -> str:
        return self._act(action)

    act.__name__ = act.__qualname__ = name
    about = f"Args:\n    action: {_one_line(argument)}\n\nReturns:\n    What happens.\n"
    act.__doc__ = f"{_one_line(description)}\n\n{about}"
    # By name they would be looked up in this module, where transformers does not look.
    act.__annotations__ = {"action": str, "return": str}
    return act


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
