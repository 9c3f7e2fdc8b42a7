"""`agentenv shop check`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.shop.catalogue import CatalogueSpec, load_catalogue
from agentenv_envs.shop.commands import add_commands
from agentenv_envs.shop.env import ShopSingleTurnEnv

Write = Callable[..., Path]
Record = Callable[..., dict[str, Any]]


def run(*argv: str) -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["shop", "check", *argv])
    code: int = args.run(args)
    return code


def test_a_file_is_counted_and_unmet_wishes_are_named(
    official: Write, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(number) for number in range(6)]
    records[4]["instructions"][0]["attributes"].append("木头")
    records[4]["instructions"][0]["options"].append("绿")
    path = official(records)
    assert run(str(path)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "products       6",
        "wishes, train  4, of which 2 have a persona",
        "wishes, eval   2, of which 1 have a persona",
        "unmet          1 wishes by their own product (attributes 1, options 1)",
        "               such as 700004",
    ]
    assert run(str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unmet"], found["unmet_by"]) == (1, {"attributes": 1, "options": 1})


def test_the_index_is_saved_for_the_environments(official: Write, tmp_path: Path) -> None:
    path = official()
    assert run(str(path), "--cache-dir", str(tmp_path / "cache")) == 0
    key = load_catalogue(CatalogueSpec(data=str(path))).key
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == [key]
    ShopSingleTurnEnv(data=str(path), split="eval", cache_dir=str(tmp_path / "cache"))


def test_a_broken_file_is_refused(official: Write, record: Record) -> None:
    with pytest.raises(UsageError, match="line 1: the field 'asin' is missing"):
        run(str(official([{"id": 1}])))
