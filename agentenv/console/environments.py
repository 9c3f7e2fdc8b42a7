"""`agentenv list` and `agentenv info`: which environments there are, and what one takes."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from agentenv import registration

__all__ = ["add_info", "add_list"]


def add_list(subparsers: Any) -> None:
    """Add `list`."""
    parser = subparsers.add_parser("list")
    parser.add_argument("--json", action="store_true", help="a JSON array of ids")
    parser.set_defaults(run=_list)


def add_info(subparsers: Any) -> None:
    """Add `info`."""
    parser = subparsers.add_parser("info")
    parser.add_argument("id", help="such as SWE-v0")
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.set_defaults(run=_info)


def _list(args: argparse.Namespace) -> int:
    ids = registration.registered_ids()
    _write(json.dumps(ids) if args.json else "\n".join(ids))
    return 0


def _info(args: argparse.Namespace) -> int:
    found = registration.spec(args.id)
    creator = registration.load_entry_point(found)
    described: dict[str, Any] = {
        "id": found.id,
        "entry_point": found.entry_point if isinstance(found.entry_point, str) else repr(found.entry_point),
        "arguments": _signature(creator),
        "kwargs": found.kwargs,
        "max_turns": found.max_episode_steps or getattr(creator, "max_turns", None),
        "policies": dict(getattr(creator, "policies", {})),
        "description": inspect.getdoc(creator) or "",
    }
    if args.json:
        _write(json.dumps(described, default=str))
        return 0
    description = described.pop("description")
    width = max(len(name) for name in described)
    lines = [f"{name:<{width}}  {value}" for name, value in described.items()]
    _write("\n".join([*lines, "", description] if description else lines))
    return 0


def _signature(creator: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(creator))
    except (TypeError, ValueError):
        return "(...)"


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    # Flushed here, so that a reader that has gone is seen inside `main`.
    sys.stdout.flush()
