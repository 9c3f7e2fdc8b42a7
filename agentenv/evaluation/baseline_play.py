"""Baselines in the place of a model: the same rollout plays them.

A baseline may look into its environment, so it lives with it, in whichever thread or process that is. It travels as
text: the environment hands out each observation with the baseline's action behind a mark, and the engine, which in
other evaluations is a model, reads the action out of the last message.

Invariants:

* The environment sees the actions that its baseline chose, and nothing else.
* Each episode has a baseline of its own, whose seed follows from the evaluation's and the task's: what it does depends
  on neither the slot nor what was played before.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from agentenv.baselines import Baseline, make_baseline
from agentenv.conversation import Message
from agentenv.environment_source import EnvFactory, TextEnv
from agentenv.errors import ModelError
from agentenv.inference.passive_engine import PassiveEngine
from agentenv.inference.protocol import Generation, GenerationRequest
from agentenv.inference.text_turns import read_messages, text_generation
from agentenv.wrappers import TextWrapper

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BaselineEngine", "BaselineEnv", "with_baseline", "without_actions"]

_MARK: Final = "\ufdd4"
"""A noncharacter of Unicode: no text holds it."""


class BaselineEnv(TextWrapper):
    """An environment that says with each observation what its baseline does next.

    Args:
        env: to play.
        policy: name of the baseline.
        seed: of the evaluation.
    """

    def __init__(self, env: TextEnv, policy: str, seed: int) -> None:
        super().__init__(env)
        self._policy, self._seed = policy, seed
        self._baseline: Baseline | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode with a new baseline."""
        result: Any = self.env.reset(seed=seed, options=options)
        if inspect.isawaitable(result):
            return self._begin_later(result, seed)
        return self._begin(result, seed)

    def step(self, action: str) -> Any:
        """Take the baseline's action, which comes back as it was handed out."""
        result: Any = self.env.step(action)
        return self._go_on_later(result) if inspect.isawaitable(result) else self._go_on(*result)

    def _begin(self, result: tuple[str, dict[str, Any]], seed: int | None) -> tuple[str, dict[str, Any]]:
        observation, info = result
        own_seed = random.Random(f"{self._seed}/{seed}").getrandbits(32)
        self._baseline = make_baseline(self.env, self._policy, own_seed)
        self._baseline.begin(observation, info)
        return self._with_action(observation), info

    async def _begin_later(self, result: Awaitable[Any], seed: int | None) -> tuple[str, dict[str, Any]]:
        return self._begin(await result, seed)

    def _go_on(
        self, observation: str, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not (terminated or truncated):
            observation = self._with_action(observation)
        return observation, reward, terminated, truncated, info

    async def _go_on_later(self, result: Awaitable[Any]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self._go_on(*await result)

    def _with_action(self, observation: str) -> str:
        assert self._baseline is not None
        action = self._baseline.act(observation)
        if not isinstance(action, str):
            raise TypeError(f"policy {self._policy!r} acted with {action!r}, must be a str")
        return f"{observation.replace(_MARK, '')}{_MARK}{action.replace(_MARK, '')}"


def with_baseline(env_fn: EnvFactory, policy: str, seed: int) -> TextEnv:
    """The environment of ``env_fn`` with its baseline; a function of a module, so that a process can be sent it."""
    return cast("TextEnv", BaselineEnv(env_fn(), policy, seed))


def without_actions(messages: list[Message]) -> list[Message]:
    """The messages of an episode as they are without a baseline."""
    return [{**message, "content": message["content"].partition(_MARK)[0]} for message in messages]


class BaselineEngine(PassiveEngine):
    """Engine that answers with the action that came with the observation."""

    error: BaseException | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """The action behind the last observation.

        Raises:
            ModelError: there is none.
        """
        last = read_messages(request.prompt_ids)[-1]["content"]
        _, mark, action = last.partition(_MARK)
        if not mark:
            raise ModelError("the observation came without the baseline's action")
        return text_generation(action)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Refused.

        Raises:
            ModelError: always.
        """
        raise ModelError("a baseline has no weights")
