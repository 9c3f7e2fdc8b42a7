"""`agentenv list` and `agentenv info`: which environments there are, and what one takes.

Invariants:
- `list` imports no environment; `info` imports one, and makes it only where that is quick.
- What an environment's author or the environment itself wrote is shown as text, see `agentenv.console.screen`.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import gymnasium

from agentenv import registration
from agentenv.built_in import BUILT_IN, BuiltIn

__all__ = ["add_info", "add_list"]

_NAMESPACE = "agentenv/"


def add_list(subparsers: Any) -> None:
    """Add `list`."""
    parser = subparsers.add_parser(
        "list", epilog="`agentenv info ID` tells of one, `agentenv play ID` has you act in it."
    )
    parser.add_argument("--json", action="store_true", help="a JSON array of full ids")
    parser.set_defaults(run=_list)


def add_info(subparsers: Any) -> None:
    """Add `info`."""
    parser = subparsers.add_parser("info")
    parser.add_argument("id", help="such as SWE-v0")
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.set_defaults(run=_info)


def _list(args: argparse.Namespace) -> int:
    ids = registration.registered_ids()
    if args.json:
        _write(json.dumps(ids))
        return 0
    packages = {point.name: point.dist for point in metadata.entry_points(group="agentenv.envs")}
    rows = []
    for id in ids:
        name = id.removeprefix(_NAMESPACE)
        built_in = BUILT_IN.get(name)
        if built_in is not None:
            rows.append((name, built_in.summary, _needs(built_in)))
        else:
            package = packages.get(name) or packages.get(id)
            rows.append((name, "" if package is None else f"of {package.name} {package.version}", ""))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    _write("\n".join(f"{id:<{widths[0]}}  {text:<{widths[1]}}  {needs}".rstrip() for id, text, needs in rows))
    return 0


def _info(args: argparse.Namespace) -> int:
    found = registration.spec(args.id)
    creator = registration.load_entry_point(found)
    name = found.id.removeprefix(_NAMESPACE)
    built_in = BUILT_IN.get(name)
    described: dict[str, Any] = {
        "id": found.id,
        "summary": built_in.summary if built_in else "",
        "entry_point": found.entry_point if isinstance(found.entry_point, str) else repr(found.entry_point),
        "arguments": _signature(creator),
        "kwargs": found.kwargs,
        "max_turns": found.max_episode_steps or _default_turns(creator, found.kwargs),
        "policies": dict(getattr(creator, "policies", {})),
        "extra": built_in.extra if built_in else None,
        "installed": built_in.is_installed if built_in else True,
        "docs": built_in.docs if built_in else None,
        "description": inspect.getdoc(creator) or "",
    }
    example, max_turns = _first_observation(found.id, creator)
    described["first_observation"] = example
    described["max_turns"] = found.max_episode_steps or max_turns or described["max_turns"]
    if args.json:
        _write(json.dumps(described, default=str))
    else:
        _write(_described(name, described, creator, built_in))
    return 0


def _described(
    name: str, facts: dict[str, Any], creator: Callable[..., Any], built_in: BuiltIn | None
) -> str:
    from agentenv.report.transcripts import revealed

    table = {
        "turns": facts["max_turns"] and f"at most {facts['max_turns']}",
        "policies": ", ".join(sorted(facts["policies"])) or "none",
        "needs": built_in and _needs(built_in),
        "pages": facts["docs"],
        "made by": facts["entry_point"],
        "try it": f"agentenv play {name}",
    }
    lines = [f"{name}: {facts['summary']}" if facts["summary"] else name, ""]
    lines += [f"{title:<9} {text}" for title, text in table.items() if text]
    lines += ["", "arguments (--env-option NAME=VALUE of play and eval, --env_kwargs JSON of recipes):"]
    lines += [f"  {argument}" for argument in _arguments(creator, facts["kwargs"])] or ["  none"]
    if facts["description"]:
        lines += ["", facts["description"]]
    if facts["first_observation"]:
        lines += ["", "first observation of seed 0:", ""]
        lines += [f"  {line}" for line in facts["first_observation"].splitlines()]
    return revealed("\n".join(lines))


def _needs(built_in: BuiltIn) -> str:
    """What an environment needs besides the core, and whether it is there; empty: nothing."""
    if built_in.extra is None:
        return ""
    if built_in.is_installed:
        return f"extra {built_in.extra}: installed"
    hint = f"pip install 'agentenv-rl[{built_in.extra}]'"
    return f"{hint}; without it {built_in.without}" if built_in.without else hint


def _first_observation(id: str, creator: Any) -> tuple[str | None, int | None]:
    """What an environment that answers at once says first, and its turns; none of both where it would take time."""
    if getattr(creator, "worker", None) != "inline" or inspect.iscoroutinefunction(
        getattr(creator, "reset", None)
    ):
        return None, None
    try:
        env: gymnasium.Env[str, str] = registration.make(id)
        try:
            return env.reset(seed=0)[0], getattr(env, "max_turns", None)
        finally:
            env.close()
    except Exception:  # it misses an argument or an extra, which the lines above tell of
        return None, None


def _default_turns(creator: Any, registered: dict[str, Any]) -> int | None:
    """Turns by the registration's, the class's or the argument's default."""
    try:
        argument = inspect.signature(creator).parameters["max_turns"].default
    except (TypeError, ValueError, KeyError):
        argument = None
    turns = registered.get("max_turns", argument)
    turns = turns if isinstance(turns, int) else getattr(creator, "max_turns", None)
    return turns if isinstance(turns, int) else None


def _arguments(creator: Callable[..., Any], registered: dict[str, Any]) -> list[str]:
    """A line for each argument, with its default; those of the registration over the class's own."""
    try:
        parameters = inspect.signature(creator).parameters.values()
    except (TypeError, ValueError):
        return ["(unknown)"]
    lines = []
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            lines.append(f"{parameter}: whatever the entry point takes")
        elif parameter.name in registered:
            lines.append(f"{parameter.name} = {registered[parameter.name]!r}")
        elif parameter.default is inspect.Parameter.empty:
            lines.append(f"{parameter.name} (must be given)")
        else:
            lines.append(f"{parameter.name} = {parameter.default!r}")
    return lines


def _signature(creator: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(creator))
    except (TypeError, ValueError):
        return "(...)"


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    # Flushed here, so that a reader that has gone is seen inside `main`.
    sys.stdout.flush()
