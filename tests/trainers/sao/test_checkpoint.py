"""Checkpoints: whole or not there, and a run continued from one goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv.errors import UsageError
from agentenv_trainers import SAOTrainer
from agentenv_trainers.checkpoint import COMPLETE, last_complete

MakeTrainer = Callable[..., SAOTrainer]
SETTINGS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "critic_warmup_steps": 3,
    "lr_scheduler_type": "linear",
    "max_steps": 4,
}
COMPARED = (
    "loss",
    "critic_loss",
    "policy_grad_norm",
    "critic_grad_norm",
    "entropy",
    "explained_variance",
    "learning_rate",
)


def history(trainer: SAOTrainer) -> dict[int, dict[str, float]]:
    return {
        entry["step"]: {name: entry[name] for name in COMPARED}
        for entry in trainer.state.log_history
        if "loss" in entry
    }


def test_a_continued_run_has_the_same_losses_as_one_that_never_stopped(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    whole = make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS)
    whole.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"
    assert (checkpoint / COMPLETE).exists()
    resumed = make_trainer(output_dir=str(tmp_path / "b"), **SETTINGS)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    expected, got = history(whole), history(resumed)
    for step in (3, 4):
        assert got[step] == pytest.approx(expected[step], rel=1e-6), step
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name
    for name, parameter in resumed.critic.named_parameters():
        assert torch.equal(parameter, whole.critic.get_parameter(name)), name
    # The controller goes on too: its ledger, then weights of the checkpoint's version before the next batch.
    assert resumed._controller.steps == [0, 1, 2, 3]
    assert resumed._controller.synced_versions == [2, 3, 4]


def test_a_continued_run_has_the_learning_rates_that_it_is_given(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS).train()
    given = {"learning_rate": 4e-3, "critic_learning_rate": 6e-3}
    resumed = make_trainer(output_dir=str(tmp_path / "b"), **{**SETTINGS, "max_steps": 6}, **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    # Linear from 4e-3 at step 0 to 0 at step 6; the critic's warm-up of three batches is over at the third.
    logged = {line["step"]: line["learning_rate"] for line in resumed.state.log_history if "loss" in line}
    assert [logged[step] for step in (3, 4, 5)] == pytest.approx([4e-3 * left / 6 for left in (4, 3, 2)])
    assert resumed.critic_learner._schedule.get_last_lr() == [6e-3]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {"freeze_critic_attention": False}, "parameter group"),
        ({}, {"hidden_size": 64}, "size mismatch"),
        ({}, {"num_hidden_layers": 3}, "parameter group"),
        ({"advantage": "running_mean"}, {"advantage": "running_mean_per_task"}, "per_task"),
        ({"advantage": "running_mean"}, {"advantage": "gae"}, "has no critic.pt"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    make_trainer: MakeTrainer,
    make_policy: Callable[..., Any],
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    says: str,
) -> None:
    make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS, **before).train()
    model = {name: after[name] for name in ("hidden_size", "num_hidden_layers") if name in after}
    settings = {name: value for name, value in after.items() if name not in model}
    resumed = make_trainer(
        output_dir=str(tmp_path / "b"), policy=make_policy(**model), **{**SETTINGS, **before, **settings}
    )
    with pytest.raises(UsageError, match=r"checkpoint-2'") as caught:
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert says in str(caught.value)


def test_without_the_critics_optimizer_the_continued_run_would_differ(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    whole = make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS)
    whole.train()
    path = tmp_path / "a" / "checkpoint-2" / "critic.pt"
    state = torch.load(path)
    state["optimizer"]["state"] = {}
    torch.save(state, path)
    resumed = make_trainer(output_dir=str(tmp_path / "b"), **SETTINGS)
    resumed.train(resume_from_checkpoint=str(path.parent))
    assert history(resumed)[4] != pytest.approx(history(whole)[4], rel=1e-6)


def test_the_random_state_is_restored(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    drawn: dict[str, list[float]] = {"a": [], "b": []}

    def drawing(name: str) -> SAOTrainer:
        trainer = make_trainer(output_dir=str(tmp_path / name), **SETTINGS)
        real = trainer._pull

        def pull() -> Any:
            drawn[name].append(torch.rand(()).item())
            return real()

        trainer._pull = pull  # type: ignore[method-assign]
        return trainer

    drawing("a").train()
    torch.manual_seed(99)
    drawing("b").train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert drawn["b"] == drawn["a"][2:]


def test_a_checkpoint_that_fails_half_way_leaves_no_folder_of_its_name(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS)

    def fail(state: Any = None) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr(trainer._controller, "state_dict", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert not list((tmp_path / "a").glob("checkpoint-*"))
    assert last_complete(tmp_path / "a") is None
    assert list((tmp_path / "a").iterdir())  # what was written is there, under no name to continue from
    with pytest.raises(UsageError, match="no complete checkpoint"):
        make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS).train(resume_from_checkpoint=True)
    monkeypatch.undo()
    again = make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS)
    again.train()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_an_incomplete_checkpoint_is_not_continued_from(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS).train()
    (tmp_path / "a" / "checkpoint-4" / COMPLETE).unlink()
    assert last_complete(tmp_path / "a") == tmp_path / "a" / "checkpoint-2"
    trainer = make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS)
    with pytest.raises(UsageError, match="checkpoint-4' is not complete"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    with pytest.raises(UsageError, match="does not exist"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-9"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer._controller.synced_versions == [2, 3, 4]


@pytest.mark.parametrize("name", ["critic.pt", "controller.json"])
def test_a_checkpoint_without_one_of_its_parts_is_refused_by_name(
    make_trainer: MakeTrainer, tmp_path: Path, name: str
) -> None:
    make_trainer(output_dir=str(tmp_path / "a"), **SETTINGS).train()
    (tmp_path / "a" / "checkpoint-2" / name).unlink()
    with pytest.raises(UsageError, match=name):
        make_trainer(**SETTINGS).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


def test_old_checkpoints_are_removed_as_set_and_a_run_from_before_replaces_a_later_one(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "output_dir": str(tmp_path / "a"), "save_total_limit": 1}
    make_trainer(**settings).train()
    assert [p.name for p in (tmp_path / "a").glob("checkpoint-*")] == ["checkpoint-4"]
    stale = tmp_path / "a" / "checkpoint-4" / "controller.json"
    stale.write_text(json.dumps({"steps": [99]}))
    make_trainer(**settings).train()
    assert json.loads(stale.read_text()) == {"steps": [0, 1, 2, 3]}
    shutil.rmtree(tmp_path / "a")
