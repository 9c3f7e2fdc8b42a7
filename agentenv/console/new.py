"""`agentenv new NAME`: a package with an environment of one's own, to be edited.

The package is a copy of the folder `new_package`, in which `my_game` is a complete small game; only its names change.

Invariants:
- The folder is there in full or not at all, and nothing that was there before is touched.
- The package's name hides no module that is installed, and its environment no registered one.
"""

import argparse
import importlib.util
import keyword
import os
import re
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from agentenv import registration
from agentenv.errors import UsageError

__all__ = ["add_parser", "write_package"]

_FILES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "train.yaml": "train.yaml",
    "__init__.py": "my_game/__init__.py",
    "env.py": "my_game/env.py",
    "policies.py": "my_game/policies.py",
    "test_env.py": "tests/test_env.py",
}
"""Where the template's files go."""

_NAME = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9])*")


def add_parser(subparsers: Any) -> None:
    """Add `new`."""
    parser = subparsers.add_parser(
        "new",
        description="A small package with an environment that works, its test and a README: docs/own-environment.md.",
    )
    parser.add_argument("name", metavar="NAME", help="such as my_game, whose environment is MyGame-v0")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="D",
        help="the folder to write, new or empty (default: the package's name)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    package, camel = names(args.name)
    folder = Path(package) if args.dir is None else args.dir
    write_package(folder, package, camel)
    sys.stdout.write(
        f"{folder} has the environment {camel}-v0. Next:\n"
        f"  cd {folder}\n"
        "  pip install -e .\n"
        "  python -m pytest\n"
        f"  agentenv play {camel}-v0\n"
        f"The game is {package}/env.py; README.md tells how to evaluate and train.\n"
    )
    sys.stdout.flush()
    return 0


def names(name: str) -> tuple[str, str]:
    """The package's name and that of the environment, without its version: `my_game`, `MyGame`.

    Args:
        name: in either form.

    Raises:
        UsageError: it is no name for a package, or is taken.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"NAME {name!r} must be a Python name: ASCII letters, digits and single underscores between them, "
            "such as my_game"
        )
    package = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if keyword.iskeyword(package) or package in keyword.softkwlist:
        raise UsageError(f"NAME {name!r}: {package} is a word of Python")
    if package in sys.stdlib_module_names or _is_module(package):
        raise UsageError(f"NAME {name!r}: a module {package} is installed, which the package would hide")
    camel = "".join(part[0].upper() + part[1:] for part in package.split("_"))
    taken = {id.casefold() for id in registration.registered_ids()}
    if f"agentenv/{camel}-v0".casefold() in taken:
        raise UsageError(f"NAME {name!r}: there is an environment {camel}-v0")
    return package, camel


def write_package(folder: Path, package: str, camel: str) -> None:
    """Write the package.

    Args:
        folder: new, or empty; its parent exists.
        package: from `names`, as the next.
        camel: name of the environment.

    Raises:
        UsageError: the folder has content, is none, or cannot be written.
    """
    target = folder.absolute()
    if not target.parent.is_dir():
        raise UsageError(f"{folder}: its parent folder does not exist")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UsageError(f"{folder}: is there and no folder; name another with --dir")
    if target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{folder}: is there and not empty; name another with --dir")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    template = resources.files("agentenv.console") / "new_package"
    try:
        for source, place in _FILES.items():
            text = (template / f"{source}.txt").read_text(encoding="utf-8")
            for old, new in (("my_game", package), ("my-game", package.replace("_", "-")), ("MyGame", camel)):
                text, place = text.replace(old, new), place.replace(old, new)
            (part / place).parent.mkdir(parents=True, exist_ok=True)
            (part / place).write_text(text, encoding="utf-8")
        part.rename(target)  # onto nothing, or an empty folder: one that has been filled meanwhile stays
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_module(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # A folder without __init__.py, such as the one to be written, is a module as well, but hides nothing.
    return spec is not None and spec.origin is not None
