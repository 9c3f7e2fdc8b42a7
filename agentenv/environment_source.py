"""An environment found by name: a registered id, a class of an installed module, or a file of the user's.

Invariants:
- Whatever can't be found or can't be made is a UsageError that names the option it came by.
- A file or class of the user's is imported from where the user stands; it needs no installation.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

import agentenv
from agentenv import registration
from agentenv.errors import UsageError

__all__ = ["EnvFactory", "TextEnv", "find_environment"]

TextEnv = gymnasium.Env[str, str]
EnvFactory = Callable[[], TextEnv]


class _UnusableError(Exception):
    """Why a name stands for no environment."""


def find_environment(
    name: str, kwargs: Mapping[str, Any] | None = None, *, option: str = "--env"
) -> EnvFactory:
    """What makes the environment of that name.

    Args:
        name: a registered id; ``module:Class``; ``file.py`` (which registers or defines one environment) or
            ``file.py:Class``.
        kwargs: arguments for every environment that is made.
        option: that the name was given by, for messages.

    Raises:
        UsageError: there is no such environment, or it can't be made with these arguments.
    """
    arguments = dict(kwargs or {})
    path, _, attribute = name.partition(":")
    try:
        if path.endswith(".py"):
            factory = _from_file(path, attribute, arguments, option)
        elif attribute:
            factory = _factory(_attribute(_import(path), attribute), arguments)
        else:
            agentenv.spec(name)
            factory = _registered(name, arguments)
    except _UnusableError as error:
        raise UsageError(f"{option} {name}: {error}") from error.__cause__
    # Made once here: a wrong argument is the user's mistake now, and would be a failed episode later.
    factory().close()
    return factory


def _registered(name: str, kwargs: Mapping[str, Any]) -> EnvFactory:
    return partial(agentenv.make, name, **kwargs)


def _factory(creator: Any, kwargs: Mapping[str, Any]) -> EnvFactory:
    if not callable(creator):
        raise _UnusableError(f"is a {type(creator).__name__}, must be a class or function")
    try:
        inspect.signature(creator).bind(**kwargs)
    except TypeError as error:
        raise _UnusableError(str(error)) from None
    return partial(creator, **kwargs)


def _from_file(path: str, attribute: str, kwargs: Mapping[str, Any], option: str) -> EnvFactory:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise _UnusableError("no such file")
    module, registered = _load_file(file, file.stat().st_mtime_ns)
    if attribute:
        return _factory(_attribute(module, attribute), kwargs)
    if len(registered) == 1:
        return _registered(registered[0], kwargs)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, agentenv.BaseEnv)
        and value.__module__ == module.__name__
    ]
    if not registered and len(classes) == 1:
        return _factory(classes[0], kwargs)
    found = registered or [value.__name__ for value in classes]
    raise _UnusableError(
        f"must register or define exactly one environment, found {', '.join(found) or 'none'}"
        + (f"; name one: {option} {path}:Class" if found else "")
    )


@cache
def _load_file(file: Path, modified_ns: int) -> tuple[ModuleType, list[str]]:
    """Run a file once, however often it is asked for; with the ids of the environments that it registered."""
    known = dict(gymnasium.registry)
    module_name = f"agentenv_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise _UnusableError("can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _UnusableError(f"{type(error).__name__} while importing it: {error}") from error
    return module, [id for id in registration.registered_ids() if gymnasium.registry[id] is not known.get(id)]


def _import(module: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = (
            "; run this in the folder that holds it, or install its package" if error.name == module else ""
        )
        raise _UnusableError(f"{error}{hint}") from error
    except ImportError as error:
        raise _UnusableError(str(error)) from error


def _attribute(module: ModuleType, attribute: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise _UnusableError(f"{module.__name__} has no {attribute!r}") from None
