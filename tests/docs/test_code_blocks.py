"""Every code block of the documentation runs, or says why it can't; see docs/_site/blocks.py."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest

from agentenv.cli import _parser, main
from agentenv.errors import UsageError

REPOSITORY = Path(__file__).parents[2]


def _load(path: str) -> ModuleType:
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_pages = _load("docs/_site/blocks.py")
blocks: Callable[..., list[Any]] = _pages.blocks
Block = Any
EXTRAS = {"alfworld_sao": "alfworld", "alfworld_grpo": "alfworld", "shop_sao": "bm25s"}
"""What a recipe cannot be imported without."""


def _named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=str)


@_named([block for block in blocks(REPOSITORY, "python") if block.mark in ("", "run with")])
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block.text
    if block.mark:
        old, new = block.value.split(" -> ")
        assert source.count(old) == 1
        source = source.replace(old, new)
    program = tmp_path / "program.py"
    program.write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "envs").symlink_to(REPOSITORY / "envs")
    for left in runpy.run_path(str(program), run_name="__main__").values():
        if isinstance(left, gymnasium.Env):
            left.close()  # or its sandboxes stay for the tests behind this one


@_named([block for block in blocks(REPOSITORY, "python") if block.mark == "not run"])
def test_what_python_that_is_not_run_imports_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), str(block), "exec"), {})


@_named([block for block in blocks(REPOSITORY, "console") if not block.mark])
def test_a_console_shows_what_the_command_prints(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    first, output = block.text.split("\n", 1)
    assert first.startswith("$ agentenv ")
    assert main(shlex.split(first)[2:]) == 0
    assert capsys.readouterr().out == output


@_named([block for block in blocks(REPOSITORY, "bash") if block.mark != "checked by"])
def test_every_command_of_a_shell_is_one_that_its_program_takes(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for beside in blocks(REPOSITORY, "python", "yaml"):
        if beside.page == block.page and beside.mark == "example":
            (tmp_path / beside.value).write_text(beside.text)
    monkeypatch.chdir(tmp_path)
    for words in block.commands:
        if words[0] == "agentenv":
            _parser(words[1:]).parse_args(words[1:])
        elif words[0] == "python" and words[1].startswith("recipes/"):
            if words[1] == "recipes/online_learning.py":
                continue  # tests/recipes/test_readme.py: its options depend on the method
            recipe = _recipe(Path(words[1]).stem)
            try:
                recipe(words[2:])
            except UsageError as error:
                pytest.fail(f"{shlex.join(words)}: {error}")
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (REPOSITORY / "Makefile").read_text(), words


@_named(blocks(REPOSITORY, "python", "bash", "console"))
def test_a_block_that_is_not_run_says_why_or_where(block: Block) -> None:
    if block.mark == "not run":
        assert len(block.value) > 10
    if block.mark == "checked by":
        checked = (REPOSITORY / block.value).read_text(encoding="utf-8")
        assert Path(block.page).name in checked


def _recipe(name: str) -> Callable[[list[str]], object]:
    """What parses the arguments of a recipe."""
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    module = sys.modules.get(f"recipes_{name}") or _load(f"recipes/{name}.py")
    parse: Callable[[list[str]], object] = module.RECIPE.parse
    return parse
