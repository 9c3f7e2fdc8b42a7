"""Environments of verifiers, loaded once a process, and which of their kinds can be stepped.

Invariants:
- A kind that can't be stepped is one `UsageError`, which says why.
- verifiers' signal handlers are not installed: signals are the program's.
- A reward function that raises is remembered for its episode; verifiers itself would go on with 0.
"""

from __future__ import annotations

import functools
import inspect
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from agentenv.errors import MissingExtraError, UsageError

__all__ = ["GRADING_ERRORS", "load"]

GRADING_ERRORS: ContextVar[list[Exception] | None] = ContextVar("agentenv_verifiers_errors", default=None)
"""What the reward functions of the running episode raised."""

_lock = threading.Lock()
_loaded: dict[tuple[str, str], Any] = {}


def load(env_id: str, env_kwargs: Mapping[str, Any]) -> Any:
    """The environment that verifiers finds under that id; the same one for the same arguments.

    Raises:
        MissingExtraError: verifiers is not installed.
        UsageError: this version of it has no such environments; it finds none, or one of another kind.
    """
    verifiers = _import()
    key = (env_id, json.dumps(env_kwargs, sort_keys=True, default=repr))
    with _lock:
        if key not in _loaded:
            try:
                with _no_signals(verifiers):
                    env = verifiers.load_environment(env_id, **env_kwargs)
            except (ValueError, RuntimeError, TypeError) as error:
                raise UsageError(f"env_id {env_id!r}: verifiers can't load it: {error}") from error
            _check_kind(verifiers, env, env_id)
            _remember_errors(env.rubric)
            _loaded[key] = env
        return _loaded[key]


def _import() -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise MissingExtraError(str(error.name or "verifiers"), "verifiers") from error
    try:
        import verifiers.clients
    except ModuleNotFoundError as error:
        if error.name != "verifiers.clients":
            raise MissingExtraError(str(error.name), "verifiers") from error
        raise UsageError(
            f"verifiers {verifiers.__version__} runs each rollout as a program of its own and has no environments "
            "that can be stepped; install 'verifiers>=0.2.1,<0.4'"
        ) from None
    return verifiers


def _check_kind(verifiers: Any, env: Any, env_id: str) -> None:
    kind = type(env)
    problem = None
    if not isinstance(env, verifiers.MultiTurnEnv):
        problem = "has a rollout loop of its own"
    elif any(base.__name__ in ("SandboxEnv", "SandboxMixin") for base in kind.__mro__):
        problem = "needs the sandboxes of Prime Intellect's service"
    elif kind.get_model_response is not verifiers.Environment.get_model_response:
        problem = "asks the model in a way of its own"
    elif kind.get_prompt_messages is not verifiers.MultiTurnEnv.get_prompt_messages:
        problem = "rewrites the conversation between turns"
    elif env.requires_group_rollouts:
        problem = "has rewards that compare the rollouts of a group"
    elif env.message_type != "chat":
        problem = "completes text and holds no conversation"
    if problem is not None:
        raise UsageError(
            f"env_id {env_id!r}: {kind.__name__} {problem}; supported are SingleTurnEnv, MultiTurnEnv, ToolEnv and "
            "StatefulToolEnv, and what derives from them and keeps their loop"
        )


@contextmanager
def _no_signals(verifiers: Any) -> Iterator[None]:
    """Environments install handlers as they are made, which only the main thread may do, and no library should."""
    module: Any = sys.modules[verifiers.Environment.__module__]
    real = module.signal
    module.signal = SimpleNamespace(
        signal=lambda *_: None,
        SIGINT=signal.SIGINT,
        SIGTERM=signal.SIGTERM,
        default_int_handler=signal.default_int_handler,
    )
    try:
        yield
    finally:
        module.signal = real


def _remember_errors(rubric: Any) -> None:
    for part in getattr(rubric, "rubrics", ()):
        _remember_errors(part)
    rubric.funcs = [_remembering(function) for function in rubric.funcs]


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # verifiers asks its name and its parameters
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            score = function(*args, **kwargs)
            return await score if inspect.isawaitable(score) else score
        except Exception as error:
            errors = GRADING_ERRORS.get()
            if errors is not None:
                errors.append(error)
            raise

    return call
