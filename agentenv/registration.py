"""Register and make environments, over gymnasium's own registry.

Invariants:
- An id without a namespace lives in `agentenv/`: "Guess-v0" is stored as "agentenv/Guess-v0", and both
  spellings work in `make` and `spec`; `gymnasium.make("agentenv/Guess-v0")` works too.
- A lazy entry point "module:Class" is imported when an environment is made, not before; so are plug-ins,
  which name themselves in the entry-point group `agentenv.envs` (id = "module:Class").
- `make` returns the environment itself, with no wrapper around it.
- `max_turns` is stored as gymnasium's `max_episode_steps`. `make` hands it to the environment as advice;
  `gymnasium.make` follows its own custom and cuts the episode with its `TimeLimit`.
"""

import difflib
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, parse_env_id

from agentenv.built_in import BUILT_IN
from agentenv.env import TextSpace
from agentenv.errors import UnknownEnvironmentError, UsageError

__all__ = ["load_entry_point", "make", "register", "registered_ids", "spec"]

logger = logging.getLogger(__name__)

_NAMESPACE = "agentenv"
_PLUGIN_GROUP = "agentenv.envs"

TextEnvCreator = Callable[..., gymnasium.Env[str, str]]

_registered: set[str] = set()


def register(
    id: str,
    entry_point: TextEnvCreator | str,
    *,
    kwargs: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
    nondeterministic: bool = False,
) -> None:
    """Register an environment.

    Args:
        id: "[namespace/]Name-vN"; without a namespace it is stored in `agentenv/`.
        entry_point: a class or function that makes the environment, or "module:Class", imported on first use.
        kwargs: arguments for the entry point; those of `make` win over them.
        max_turns: advice to rollouts: actions after which an episode is cut as truncated.
        nondeterministic: whether the same seed and actions can lead to different observations.

    Raises:
        UsageError: `id`, `entry_point` or `max_turns` is malformed.
    """
    full_id = _full_id(id)
    if isinstance(entry_point, str):
        module, _, attribute = entry_point.partition(":")
        if not module or not attribute:
            raise UsageError(
                f"entry_point of {id!r} must be 'module:Class' or a callable, got {entry_point!r}"
            )
    elif not callable(entry_point):
        raise UsageError(f"entry_point of {id!r} must be 'module:Class' or a callable, got {entry_point!r}")
    if max_turns is not None and (
        isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1
    ):
        raise UsageError(
            f"max_turns of {id!r} must be a whole number of at least 1 or None, got {max_turns!r}"
        )

    new = EnvSpec(
        id=full_id,
        entry_point=cast("Any", entry_point),
        nondeterministic=nondeterministic,
        max_episode_steps=max_turns,
        # Both would put a wrapper between the caller and the environment; check_env does their job once.
        order_enforce=False,
        disable_env_checker=True,
        kwargs=dict(kwargs or {}),
    )
    old = gymnasium.registry.get(full_id)
    if old is not None and old != new:
        logger.warning(
            "environment %s is registered again: %r replaces %r", full_id, entry_point, old.entry_point
        )
    gymnasium.registry[full_id] = new
    _registered.add(full_id)


def spec(id: str) -> EnvSpec:
    """The registered specification of an environment.

    Args:
        id: with or without the namespace `agentenv/`; ids that were registered with gymnasium alone work too.

    Raises:
        UsageError: `id` is malformed.
        UnknownEnvironmentError: nothing is registered under it.
    """
    full_id = _full_id(id)
    for candidate in (full_id, id):
        if candidate in gymnasium.registry:
            return gymnasium.registry[candidate]
    raise UnknownEnvironmentError(_unknown_message(id))


def make(id: str, **kwargs: Any) -> gymnasium.Env[str, str]:
    """Make an environment, unwrapped.

    Args:
        id: see `spec`.
        kwargs: arguments for its entry point, over the registered ones.

    Raises:
        UnknownEnvironmentError: nothing is registered under `id`.
        UsageError: the entry point cannot be found or does not take `kwargs`, or what it makes is not a
            text environment.
    """
    found = spec(id)
    creator = load_entry_point(found)
    _check_kwargs(found.id, creator, {**found.kwargs, **kwargs})
    env = gymnasium.make(found, max_episode_steps=-1, disable_env_checker=True, **kwargs)
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, TextSpace | gymnasium.spaces.Text):
            env.close()
            raise UsageError(f"environment {found.id!r} is not a text environment: its {name} is {space!r}")
    if found.max_episode_steps is not None:
        env.unwrapped.max_turns = found.max_episode_steps  # type: ignore[attr-defined]
    return env


def registered_ids() -> list[str]:
    """Full ids of the environments that were registered here or named by plug-ins, sorted."""
    return sorted(id for id in _registered if id in gymnasium.registry)


def _full_id(id: str) -> str:
    if not isinstance(id, str):
        raise UsageError(f"an environment id must be a string, got {id!r}")
    try:
        namespace, _, _ = parse_env_id(id)
    except gymnasium.error.Error:
        raise UsageError(f"malformed environment id {id!r}: it must be '[namespace/]Name-vN'") from None
    return id if namespace is not None else f"{_NAMESPACE}/{id}"


def _unknown_message(id: str) -> str:
    prefix = f"{_NAMESPACE}/"
    known = [name.removeprefix(prefix) for name in registered_ids()]
    # Compared without case and version: both are often wrong, and "-v0" makes any two names look alike.
    by_stem: dict[str, list[str]] = {}
    for name in known:
        by_stem.setdefault(_stem(name), []).append(name)
    close = difflib.get_close_matches(_stem(id.removeprefix(prefix)), by_stem, n=2, cutoff=0.6)
    if close:
        names = " or ".join(repr(name) for stem in close for name in by_stem[stem])
        return f"unknown environment {id!r}; did you mean {names}?"
    return f"unknown environment {id!r}; registered are {', '.join(known) or 'none'}"


def _stem(name: str) -> str:
    return re.sub(r"-v\d+$", "", name).casefold()


def load_entry_point(found: EnvSpec) -> TextEnvCreator:
    """Import what makes an environment.

    Raises:
        UsageError: its module or its attribute does not exist.
    """
    if callable(found.entry_point):
        return cast("TextEnvCreator", found.entry_point)
    module_name, _, attribute = str(found.entry_point).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Another missing module is a fault inside the environment's code: its own message says more.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"environment {found.id!r}: the module of its entry point {found.entry_point!r} is not installed"
        ) from error
    try:
        return cast("TextEnvCreator", getattr(module, attribute))
    except AttributeError:
        raise UsageError(
            f"environment {found.id!r}: {module_name!r} has no {attribute!r}, which its entry point names"
        ) from None


def _check_kwargs(id: str, creator: TextEnvCreator, kwargs: Mapping[str, Any]) -> None:
    """Tell a misspelt argument apart from a TypeError inside the entry point."""
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    allowed = [
        name
        for name, p in parameters.items()
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    for name in kwargs:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(allowed) or 'none'}"
            raise UsageError(f"environment {id!r} takes no argument {name!r}; {hint}")


def _register_known() -> None:
    """Register what ships with agentenv, then what plug-ins name; a broken plug-in is logged and left out."""
    for id, built_in in BUILT_IN.items():
        register(id, built_in.entry_point)
    for plugin in metadata.entry_points(group=_PLUGIN_GROUP):
        try:
            full_id = _full_id(plugin.name)
            if full_id in _registered:
                logger.warning(
                    "plug-in environment %s (%s) is left out: the id is taken", full_id, plugin.value
                )
                continue
            register(plugin.name, plugin.value)
        except UsageError as error:
            logger.warning("plug-in environment %r is left out: %s", plugin.name, error)


_register_known()
