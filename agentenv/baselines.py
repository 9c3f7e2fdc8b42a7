"""Baselines: what an environment is played with to know its range, such as an oracle and a random policy.

An environment names its own in the class attribute `policies`, lazily, as it names itself to the registry:

    class Guess(agentenv.BaseEnv):
        policies = {"random": "my_package.guess:RandomGuesses", "oracle": "my_package.guess:Oracle"}

    class RandomGuesses:
        def __init__(self, env, seed):
            self.rng = random.Random(seed)

        def begin(self, observation, info):
            pass

        def act(self, observation):
            return str(self.rng.randrange(10))

`agentenv eval Guess-v0 --policy random` then plays it.

Invariants:
- a baseline's module is imported when the baseline is made, not before;
- customary names: "random" takes what the observation offers, evenly, and looks at nothing else; "scripted" is a fixed
  strategy without the answer; "oracle" may look into the environment and solves what can be solved;
- the same seeds (of the baseline and of `reset`) give the same actions.
"""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import gymnasium

from agentenv.errors import UsageError

__all__ = ["Baseline", "BaselineFactory", "baseline_names", "load_baseline", "make_baseline"]


class Baseline(Protocol):
    """Plays an environment, one episode after another."""

    def begin(self, observation: str, info: Mapping[str, Any]) -> None:
        """An episode has begun.

        Args:
            observation: what `reset` said.
            info: of the same `reset`.
        """

    def act(self, observation: str) -> str:
        """The action of a turn.

        Args:
            observation: the latest: that of `reset` in the first turn, then that of each `step`.
        """


class BaselineFactory(Protocol):
    """What makes a baseline, usually its class."""

    def __call__(self, env: Any, seed: int) -> Baseline:
        """A baseline for one environment.

        Args:
            env: the environment itself, without its wrappers.
            seed: of the baseline's own random choices.
        """


def baseline_names(env: Any) -> list[str]:
    """Names of the baselines that an environment, or its class, has, sorted."""
    return sorted(_policies(env))


def load_baseline(env: Any, name: str) -> BaselineFactory:
    """Import a baseline.

    Args:
        env: an environment, wrapped or not, or its class.
        name: one of `baseline_names`, or "module:Class", which needs no entry in `policies`.

    Raises:
        UsageError: the environment has no such baseline, or what the name stands for cannot be found.
    """
    policies = _policies(env)
    described = _described(env)
    if name in policies:
        target = policies[name]
    elif ":" in name:
        target = name
    else:
        close = difflib.get_close_matches(name, policies, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(policies)) or 'none'}"
        raise UsageError(f"{described} has no policy {name!r}; {hint}")
    module_name, _, attribute = str(target).partition(":")
    if not module_name or not attribute:
        raise UsageError(f"policy {name!r} of {described} must be 'module:Class', got {target!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Another missing module is a fault inside the baseline's code: its own message says more.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"policy {name!r} of {described}: there is no module {module_name!r}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UsageError(f"policy {name!r} of {described}: {module_name!r} has no class {attribute!r}")
    return cast("BaselineFactory", factory)


def make_baseline(env: Any, name: str, seed: int = 0) -> Baseline:
    """Make a baseline for an environment; see `load_baseline`.

    Raises:
        UsageError: as `load_baseline`.
    """
    return load_baseline(env, name)(_unwrapped(env), seed)


def _unwrapped(env: Any) -> Any:
    return env.unwrapped if isinstance(env, gymnasium.Env) else env


def _policies(env: Any) -> Mapping[str, str]:
    policies = getattr(_unwrapped(env), "policies", None) or {}
    if not isinstance(policies, Mapping):
        raise UsageError(
            f"policies of {_described(env)} must map names to 'module:Class', got {type(policies).__name__}"
        )
    return policies


def _described(env: Any) -> str:
    env = _unwrapped(env)
    return env.__name__ if isinstance(env, type) else type(env).__name__
