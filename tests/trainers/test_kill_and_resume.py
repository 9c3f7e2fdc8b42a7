"""A run that is killed in the middle of a step and continued computes what it would have computed, bit by bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv_trainers.checkpoint import last_complete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes", "compared"),
    [
        (
            "sao",
            {"critic_warmup_steps": 6},
            {"critic_loss", "critic_grad_norm", "explained_variance", "value_mean", "critic"},
        ),
        ("grpo", {"objective": "dis"}, {"zero_variance_share"}),
    ],
)
def test_a_killed_run_that_is_continued_has_the_same_next_ten_losses_to_the_last_bit(
    run_training: Callable[..., Any],
    tmp_path: Path,
    algorithm: str,
    changes: dict[str, Any],
    compared: set[str],
) -> None:
    settings = {
        "max_steps": 13,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 3,
        **changes,
    }
    compared = compared | {
        "loss",
        "grad_norm",
        "reward",
        "entropy",
        "advantage_std",
        "learning_rate",
        "policy",
    }
    whole = run_training("whole", algorithm, **settings)
    assert whole.code == 0, whole.stderr[-4000:]
    killed = run_training("killed", algorithm, options={"kill_at": 4}, **settings)
    # It died before the fifth optimizer step; what it had done after the checkpoint of the third is lost.
    assert killed.code == -signal.SIGKILL, killed.stderr[-4000:]
    assert list(killed.steps) == [1, 2, 3, 4]
    checkpoint = last_complete(tmp_path / "killed")
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    continued = run_training("continued", algorithm, options={"resume": str(checkpoint)}, **settings)
    assert continued.code == 0, continued.stderr[-4000:]
    assert list(continued.steps) == list(range(4, 14))
    for step, line in continued.steps.items():
        # JSON holds a float's shortest text that reads as the same float: equal means equal to the last bit.
        expected = {name: whole.steps[step][name] for name in compared}
        assert {name: line[name] for name in compared} == expected, step
    assert len({line["loss"] for line in continued.steps.values()}) == 10
    assert len({line["policy"] for line in continued.steps.values()}) == 10
