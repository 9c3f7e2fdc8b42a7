"""Does an environment keep the contract of `agentenv.BaseEnv`? For the tests of those who write one.

Invariants:
- Every finding is an `EnvError` that says what was called, what came back, and what is allowed.
- The global random state of Python and numpy is as before afterwards.
- The environment is closed afterwards, also when a check fails.
"""

import copy
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from agentenv.env import TextSpace
from agentenv.errors import EnvError

__all__ = ["check_env"]

Step = tuple[str, float, bool, bool, dict[str, Any]]

# What policies write while they still learn the format. None of it may raise.
_MALFORMED = (
    "",
    " \n\t ",
    "no action at all, just prose",
    "```bash\n",
    '{"name": "tool", "arguments": {',
    "<think>unfinished",
    "\x00\x07\x1b[31m",
    "héllo 世界 \U0001f600 \ufffd",
    "x" * 20_000,
)


def check_env(
    env: gymnasium.Env[str, str],
    *,
    actions: Sequence[str] = (),
    seed: int = 0,
    deterministic: bool = True,
) -> None:
    """Run an environment through resets, malformed actions and `actions`, and close it.

    Args:
        env: the environment, wrapped or not; it is closed in the end.
        actions: an episode worth replaying, played after `reset(seed=seed)`; a solution checks most.
        seed: task to check with; `seed + 1` is used too.
        deterministic: whether the same actions must give the same observations, rewards and ends again. Turn
            it off where observations hold times or the like; the first observation must be equal in any case.

    Raises:
        EnvError: the first departure from the contract.
    """
    states = random.getstate(), np.random.get_state()
    try:
        _check_declarations(env)
        first = _check_same_task(env, seed)
        _check_malformed_actions(env, seed)
        _check_episode(env, seed, actions, first, deterministic)
        _reset(env, seed + 1)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        env.close()
    try:
        env.close()
    except Exception as error:
        raise EnvError(f"the second close() raised {error!r}; close must be idempotent") from error


def _check_declarations(env: gymnasium.Env[str, str]) -> None:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, TextSpace | gymnasium.spaces.Text):
            raise EnvError(f"{name} must be a TextSpace or gymnasium.spaces.Text, got {space!r}")
    limit = getattr(env, "max_turns", None)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise EnvError(f"max_turns must be None or a whole number of at least 1, got {limit!r}")


def _check_same_task(env: gymnasium.Env[str, str], seed: int) -> str:
    """The seed alone chooses the task: not the global random state, and not the episodes before."""
    random.seed(1)
    np.random.seed(1)
    first, info = _reset(env, seed)
    _step(env, "an action before the next reset")
    random.seed(2)
    np.random.seed(2)
    again, info_again = _reset(env, seed)
    if first != again:
        raise EnvError(
            f"reset(seed={seed}) gave two different first observations: {_short(first)} and {_short(again)}; "
            "draw from self.np_random after super().reset(seed=seed), or from a generator made of the seed"
        )
    for key in ("task_id", "family"):
        if info.get(key) != info_again.get(key):
            raise EnvError(
                f"reset(seed={seed}) gave two values of info[{key!r}]: "
                f"{info.get(key)!r} and {info_again.get(key)!r}"
            )
    return first


def _check_malformed_actions(env: gymnasium.Env[str, str], seed: int) -> None:
    for action in _MALFORMED:
        _reset(env, seed)
        _step(env, action)


def _check_episode(
    env: gymnasium.Env[str, str], seed: int, actions: Sequence[str], first: str, deterministic: bool
) -> None:
    for number, action in enumerate(actions):
        if not isinstance(action, str):
            raise EnvError(f"actions[{number}] must be a string, got {action!r}")
    played = _play(env, seed, actions)
    if not deterministic:
        return
    for number, (one, two) in enumerate(zip(played, _play(env, seed, actions), strict=False)):
        for name, a, b in zip(("observation", "reward", "terminated", "truncated"), one, two, strict=False):
            if a != b:
                raise EnvError(
                    f"the same episode (seed {seed}) went two ways at action {number} "
                    f"({_short(actions[number])}): {name} was {_short(a)}, then {_short(b)}"
                )


def _play(env: gymnasium.Env[str, str], seed: int, actions: Sequence[str]) -> list[Step]:
    _reset(env, seed)
    steps: list[Step] = []
    kept: list[tuple[dict[str, Any], Any]] = []
    for number, action in enumerate(actions):
        steps.append(_step(env, action))
        info = steps[-1][4]
        kept.append((info, copy.deepcopy(info)))
        if (steps[-1][2] or steps[-1][3]) and number + 1 < len(actions):
            raise EnvError(f"the episode (seed {seed}) ended at action {number} of {len(actions)}")
    for number, (now, then) in enumerate(kept):
        if now != then:
            raise EnvError(
                f"info of action {number} was changed by later steps: return a new dict from each step"
            )
    return steps


def _reset(env: gymnasium.Env[str, str], seed: int) -> tuple[str, dict[str, Any]]:
    call = f"reset(seed={seed}, options=None)"
    try:
        result: Any = env.reset(seed=seed, options=None)
    except Exception as error:
        raise EnvError(f"{call} raised {error!r}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"{call} must return (observation, info), got {_short(result)}")
    observation, info = result
    if not isinstance(observation, str):
        raise EnvError(f"{call} must return a string as observation, got {_short(observation)}")
    _check_info(info, call)
    return observation, info


def _step(env: gymnasium.Env[str, str], action: str) -> Step:
    call = f"step({_short(action)})"
    try:
        result: Any = env.step(action)
    except Exception as error:
        raise EnvError(f"{call} raised {error!r}; answer a malformed action with an observation") from error
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(
            f"{call} must return (observation, reward, terminated, truncated, info), got {_short(result)}"
        )
    observation, reward, terminated, truncated, info = result
    if not isinstance(observation, str):
        raise EnvError(f"{call} must return a string as observation, got {_short(observation)}")
    number = isinstance(reward, int | float | np.integer | np.floating) and not isinstance(reward, bool)
    if not number or not math.isfinite(reward):
        raise EnvError(f"{call} must return a finite number as reward, got {reward!r}")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            raise EnvError(f"{call} must return a bool as {name}, got {value!r}")
    _check_info(info, call)
    return observation, float(reward), bool(terminated), bool(truncated), info


def _check_info(info: Any, call: str) -> None:
    if not isinstance(info, dict):
        raise EnvError(f"{call} must return a dict as info, got {_short(info)}")
    for key, kind in (("success", bool | np.bool_), ("task_id", str), ("family", str), ("metrics", dict)):
        if key in info and not isinstance(info[key], kind):
            raise EnvError(f"{call}: info[{key!r}] must be of type {kind}, got {info[key]!r}")
    for name, value in info.get("metrics", {}).items():
        if not isinstance(name, str) or not isinstance(value, int | float | np.integer | np.floating):
            raise EnvError(f"{call}: info['metrics'] must map names to numbers, got {name!r}: {value!r}")
    try:
        json.dumps(
            info, default=lambda value: value.item() if isinstance(value, np.generic) else _refuse(value)
        )
    except (TypeError, ValueError) as error:
        raise EnvError(f"{call}: info must be what JSON can hold: {error}") from error


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
