"""The documents name what exists, and every number that a step logs is explained."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig as TRLConfig

from agentenv_trainers import GRPOConfig, SAOConfig, SAOTrainer
from agentenv_trainers.rollout_settings import RolloutSettings
from agentenv_trainers.settings import TrainerSettings


def references(repository: Path, document: str) -> list[tuple[str, str]]:
    text = (repository / "docs" / document).read_text(encoding="utf-8")
    return re.findall(r"`([\w/]+\.py)::(\w+)`", text)


@pytest.mark.parametrize("document", ["papers.md", "rollout.md"])
def test_every_function_and_test_that_a_table_names_exists(repository: Path, document: str) -> None:
    found = references(repository, document)
    assert len(found) > 20
    for path, name in found:
        source = (repository / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE), (
            f"{path}::{name}"
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1},
        {"critic_only_steps": 1},
        {"advantage": "running_mean"},
        {"objective": "ppo_clip", "advantage": "group", "group_size": 4},
        {"objective": "tis", "beta": 0.1},
    ],
)
def test_every_number_of_a_step_is_in_the_table_of_metrics(
    make_trainer: Callable[..., SAOTrainer], repository: Path, changes: dict[str, Any]
) -> None:
    text = (repository / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = {
        name
        for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    trainer = make_trainer(max_steps=2, **changes)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert entry.keys() - {"step"} <= documented


def test_every_option_of_the_trainers_has_a_line_with_its_default(repository: Path) -> None:
    text = (repository / "docs/trainers.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    elsewhere = {field.name for base in (RolloutSettings, TRLConfig) for field in dataclasses.fields(base)}
    for config in (SAOConfig, GRPOConfig):
        ours = {**inspect.get_annotations(TrainerSettings), **inspect.get_annotations(config)}
        for field in dataclasses.fields(config):
            if field.name in elsewhere and field.name not in ours:
                continue
            default = repr(field.default).replace("'", '"')
            assert f"`{default}`" in rows.get(field.name, ""), f"{config.__name__}.{field.name}"
