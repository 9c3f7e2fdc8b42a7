"""What an environment may return, and what becomes of its exceptions; the same for every kind of worker.

Invariants:

* A result of the wrong type is an EnvError naming the environment and the value.
* Whatever the environment raises arrives as an AgentEnvError with the original as its cause.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from numbers import Real
from typing import Any

import gymnasium

from agentenv.errors import AgentEnvError, EnvError, UsageError

TextEnv = gymnasium.Env[str, str]
ResetResult = tuple[str, dict[str, Any]]
StepResult = tuple[str, float, bool, bool, dict[str, Any]]


def env_name(env: TextEnv) -> str:
    """The registered id, or the class."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(env.unwrapped).__name__


def advised_turns(env: TextEnv) -> int | None:
    """The environment's ``max_turns``; None without advice."""
    value = getattr(env.unwrapped, "max_turns", None)
    return int(value) if value is not None else None


def making_failed(error: BaseException) -> AgentEnvError:
    """What the rollout raises for an exception from the making of an environment: UsageError stays, as bad input."""
    return error if isinstance(error, AgentEnvError) else _wrapped("making the environment", error)


def call_failed(env: TextEnv, stage: str, error: BaseException) -> AgentEnvError:
    """What the rollout raises for an exception from ``env.reset`` or ``env.step``."""
    # Bad input shows when the environment is made; from here on it is one task's trouble, not the run's.
    if isinstance(error, AgentEnvError) and not isinstance(error, UsageError):
        return error
    return _wrapped(f"{env_name(env)}.{stage}", error)


def is_cancelled(error: BaseException) -> bool:
    """Whether the present task was cancelled, and not only a coroutine that it awaits raised CancelledError."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _wrapped(doing: str, error: BaseException) -> EnvError:
    wrapped = EnvError(f"{doing} raised {type(error).__name__}: {error}")
    wrapped.origin = type(error).__name__
    wrapped.__cause__ = error
    return wrapped


def checked_reset(env: TextEnv, result: Any) -> ResetResult:
    """What ``env.reset`` returned; an observation's characters that have no UTF-8 form become question marks.

    Raises:
        EnvError: it is not (str, dict).
    """
    name = env_name(env)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvError(_malformed(name, "reset", result, "(observation, info)"))
    observation, info = result
    return _observation(name, "reset", observation), _info(name, "reset", info)


def checked_step(env: TextEnv, result: Any) -> StepResult:
    """What ``env.step`` returned, in plain Python's types; the observation as for :func:`checked_reset`.

    Raises:
        EnvError: it is not (str, finite number, bool, bool, dict).
    """
    if type(result) is tuple and len(result) == 5:
        observation, reward, terminated, truncated, info = result
        plain = type(observation) is str and type(reward) is float and type(info) is dict
        if plain and type(terminated) is bool and type(truncated) is bool and math.isfinite(reward):
            return _encodable(observation), reward, terminated, truncated, info
    name = env_name(env)
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(_malformed(name, "step", result, "(observation, reward, terminated, truncated, info)"))
    observation, reward, terminated, truncated, info = result
    return (
        _observation(name, "step", observation),
        _reward(name, reward),
        _flag(name, "terminated", terminated),
        _flag(name, "truncated", truncated),
        _info(name, "step", info),
    )


def _malformed(name: str, stage: str, result: Any, wanted: str) -> str:
    message = f"{name}.{stage} returned {_short(result)}, must be {wanted}"
    if inspect.iscoroutine(result):
        result.close()
        message += '; an environment whose methods are coroutines needs worker="inline"'
    return message


def _reward(name: str, value: Any) -> float:
    # NumPy's scalars are Reals; item() of its 0-d arrays is one too.
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    try:
        reward = float(number) if isinstance(number, Real) else math.nan
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise EnvError(f"{name}.step returned the reward {_short(value)}, must be a finite number")
    return reward


def _flag(name: str, flag: str, value: Any) -> bool:
    plain = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if not isinstance(plain, bool):
        raise EnvError(f"{name}.step returned {flag} = {_short(value)}, must be a bool")
    return plain


def _observation(name: str, stage: str, value: Any) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{name}.{stage} returned the observation {_short(value)}, must be a str")
    return _encodable(value)


def _encodable(text: str) -> str:
    """Tokenizers refuse lone surrogates, which is what undecodable bytes of a file or terminal become."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _info(name: str, stage: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvError(f"{name}.{stage} returned the info {_short(value)}, must be a dict")
    return value


def _short(value: Any) -> str:
    text = safe_repr(value)
    return f"{text if len(text) <= 100 else text[:100] + '...'} ({type(value).__name__})"


def safe_repr(value: Any) -> str:
    """``repr``, also of what raises in it."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
