"""``report_to``: what a step logs reaches TensorBoard, under the documented names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.trajectory import Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOTrainer
from agentenv_trainers.testing import ReplayController

pytest.importorskip("tensorboard")


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every scalar in the event files below a folder, read back by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return scalars


def check(trainer: Any, folder: Path, repository: Path, names: set[str]) -> None:
    trainer.train()
    scalars = written(folder)
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["step"] for entry in logs] == [1, 2]
    for entry in logs:
        for name in entry.keys() - {"step"}:
            expected = pytest.approx(entry[name], rel=1e-6, abs=1e-9, nan_ok=True)
            assert dict(scalars[f"train/{name}"])[entry["step"]] == expected, name
    assert names <= {tag.removeprefix("train/") for tag in scalars}
    text = (repository / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = {
        name
        for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    # Beside ours: the summary that transformers writes at the end of training.
    summary = {
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "total_flos",
        "train_loss",
    }
    assert {tag.removeprefix("train/") for tag in scalars} - summary <= table


def test_tensorboard_has_every_number_of_an_sao_step_under_its_documented_name(
    make_trainer: Callable[..., SAOTrainer], repository: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(output_dir=str(tmp_path / "run"), report_to=["tensorboard"], beta=0.1)
    check(
        trainer, tmp_path / "run", repository, {"reward", "critic_loss", "masked_share", "kl", "value_mean"}
    )


def test_tensorboard_has_every_number_of_a_grpo_step_under_its_documented_name(
    make_policy: Callable[..., Any],
    make_episodes: Callable[..., list[Trajectory]],
    tokenizer: Any,
    repository: Path,
    tmp_path: Path,
) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        report_to=["tensorboard"],
        per_device_train_batch_size=8,
        group_size=4,
        max_steps=2,
        learning_rate=1e-3,
        save_strategy="no",
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    source = ReplayController(lambda step: make_episodes(8, seed=step, version=step))
    trainer = GRPOTrainer(make_policy(), config, source, tokenizer)
    check(trainer, tmp_path / "run", repository, {"reward", "zero_variance_share", "policy_grad_norm"})
