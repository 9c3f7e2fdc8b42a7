"""The documents name what exists, and every number that a step logs is explained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv_trainers import SAOTrainer


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


@pytest.mark.parametrize("changes", [{}, {"beta": 0.1}, {"critic_only_steps": 1}])
def test_every_number_of_a_step_is_in_the_table_of_metrics(
    make_trainer: Callable[..., SAOTrainer], repository: Path, changes: dict[str, float]
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
