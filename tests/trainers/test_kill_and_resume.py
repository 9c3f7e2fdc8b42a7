"""A run that is killed in the middle of a step and continued computes what it would have computed, bit by bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv_trainers.checkpoint import last_complete

PROGRAM = Path(__file__).with_name("run_training.py")
SETTINGS: dict[str, Any] = {
    "mode": "sync",
    "deterministic": True,
    "max_steps": 13,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_envs": 5,
    "max_tokens_per_turn": 6,
    "max_tokens_per_episode": 256,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 3,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def train(folder: Path, name: str, algorithm: str, settings: dict[str, Any], **options: Any) -> Any:
    """One process; returns its exit code and its log."""
    log = folder / f"{name}.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, str(PROGRAM)),
            json.dumps({"algorithm": algorithm, "settings": settings, "log": str(log), **options}),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return done.returncode, {line["step"]: line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes", "compared"),
    [
        (
            "sao",
            {
                "critic_learning_rate": 1e-2,
                "critic_warmup_steps": 6,
                "value_pretrain_episodes": 8,
                "value_pretrain_steps": 2,
            },
            {"critic_loss", "critic_grad_norm", "explained_variance", "value_mean", "critic"},
        ),
        ("grpo", {"group_size": 4, "objective": "dis"}, {"zero_variance_share"}),
    ],
)
def test_a_killed_run_that_is_continued_has_the_same_next_ten_losses_to_the_last_bit(
    tmp_path: Path, algorithm: str, changes: dict[str, Any], compared: set[str]
) -> None:
    settings = {**SETTINGS, **changes}
    compared = compared | {
        "loss",
        "grad_norm",
        "reward",
        "entropy",
        "advantage_std",
        "learning_rate",
        "policy",
    }
    _, whole = train(tmp_path, "whole", algorithm, {**settings, "output_dir": str(tmp_path / "whole")})
    settings["output_dir"] = str(tmp_path / "killed")
    code, begun = train(tmp_path, "begun", algorithm, settings, kill_at=4)
    # It died before the fifth optimizer step; what it had done after the checkpoint of the third is lost.
    assert code == -signal.SIGKILL
    assert list(begun) == [1, 2, 3, 4]
    checkpoint = last_complete(tmp_path / "killed")
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    code, continued = train(tmp_path, "continued", algorithm, settings, resume=str(checkpoint))
    assert code == 0
    assert list(continued) == list(range(4, 14))
    for step, line in continued.items():
        # JSON holds a float's shortest text that reads as the same float: equal means equal to the last bit.
        assert {name: line[name] for name in compared} == {name: whole[step][name] for name in compared}, step
    assert len({line["loss"] for line in continued.values()}) == 10
    assert len({line["policy"] for line in continued.values()}) == 10
