"""Pages of reference, made of the source: every option of a recipe, every command."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agentenv_trainers.recipe import RecipeArguments

_RECIPES = (
    "swe_sao",
    "alfworld_sao",
    "alfworld_grpo",
    "shop_sao",
    "math_tir_sao",
    "math_rlvr_grpo",
    "online_learning",
)


def options_page(root: Path) -> str:
    """Every field of the recipes' arguments and of the trainers' configs, each in the table of the class it is of."""
    modules = {name: _load(root / "recipes" / f"{name}.py") for name in _RECIPES}
    lines = [
        "# Options",
        "",
        "Made from the source. An option is written `--name value`, or `name: value` in the YAML file of `--config`. "
        "The default is the field's own; a recipe may choose another for its embedded policy, as "
        "[configuration](../configuration.md) says, and `--help` shows.",
        "",
    ]
    seen: set[type] = set()
    for title, kind in _classes(modules):
        for part in _ours(kind):
            if part not in seen:
                seen.add(part)
                lines += _section(
                    f"{title}: `{part.__name__}`" if part is kind else f"`{part.__name__}`", part
                )
    trl = next(part for part in _parts(modules) if part.__module__.startswith("trl."))
    others = sorted(field.name for field in dataclasses.fields(trl))
    lines += [
        f"## TRL's: `{trl.__name__}`",
        "",
        "Taken over as they are; those that SAO and GRPO here do not use are refused when they are set.",
        "",
        ", ".join(f"`{name}`" for name in others),
        "",
    ]
    return "\n".join(lines)


def commands_page() -> str:
    """What `agentenv COMMAND --help` prints, for each."""
    from agentenv.cli import whole_parser

    lines = ["# Commands", "", "What `--help` of each prints.", ""]
    for name, parser in _subparsers(whole_parser()):
        lines += [f"## `agentenv {name}`", "", "```text", _help(parser), "```", ""]
    return "\n".join(lines)


def _subparsers(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield f"{before}{name}", child
                yield from _subparsers(child, f"{before}{name} ")


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = _formatter(parser.formatter_class)
    return parser.format_help().rstrip()


def _formatter(base: Any) -> Any:
    # argparse asks the terminal how wide it is, and the page must not depend on who makes it.
    return lambda prog: base(prog, width=110, max_help_position=30)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _classes(modules: dict[str, ModuleType]) -> Iterator[tuple[str, type]]:
    yield "All recipes", RecipeArguments
    for name, module in modules.items():
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, RecipeArguments) and kind is not RecipeArguments:
                yield f"`recipes/{name}.py`", kind
    from agentenv_trainers import GRPOConfig, SAOConfig

    yield "The trainer SAO", SAOConfig
    yield "The trainer GRPO", GRPOConfig


def _parts(modules: dict[str, ModuleType]) -> Iterator[type]:
    for _, kind in _classes(modules):
        yield from kind.__mro__


def _ours(kind: type) -> Sequence[type]:
    """A dataclass and its bases as far as they are this project's, the most special first."""
    foreign = ("trl.", "transformers.", "builtins")
    return [
        part for part in kind.__mro__ if not f"{part.__module__}.".startswith(foreign) and _own_fields(part)
    ]


def _own_fields(kind: type) -> list[dataclasses.Field[Any]]:
    own = inspect.get_annotations(kind)
    return (
        [field for field in dataclasses.fields(kind) if field.name in own]
        if dataclasses.is_dataclass(kind)
        else []
    )


def _section(title: str, kind: type) -> list[str]:
    lines = [f"## {title}", "", "| option | type | default | meaning |", "|---|---|---|---|"]
    for field in _own_fields(kind):
        meaning = str(field.metadata.get("help", "")).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {meaning} |")
    return [*lines, ""]


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    choices = re.sub(r"Literal\[(.*?)\]", lambda match: re.sub("[\"']", "", match[1]), text)
    return f"`{choices.replace(' | ', ' or ')}`"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "needed"
    if value is None or value == "unset" or "unset" in type(value).__name__.lower():
        return ""
    return f"`{value}`".replace("|", "\\|")
